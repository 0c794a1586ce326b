"""Chunks and re-reads in files: written by tasks, and committed by one entry of the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    DataFile,
    Shape,
    folder_of,
    room_of,
    shape_of,
    with_read,
    with_shape,
)
from airflow_cdc_provider.engine.sinks.files.units import FilesUnits
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import only
from airflow_cdc_provider.engine.sinks.record_log.read_position import Room
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk


@dataclass(frozen=True)
class FilesReads(FilesUnits):
    """See :class:`.contract.Sink`: chunks and re-reads."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written | None:
        """See :meth:`.contract.Sink.write_chunk`."""
        contents = self._contents(epoch)
        if not self._is_open(contents, chunk, origin):
            return None
        failpoint("before-chunk-staged")
        shape = shape_of(contents, folder_of(target))
        written = self._write_rows(epoch, contents, target, shape, None if chunk.whole else (), batches, finish)
        failpoint("after-chunk-staged")
        return written

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """See :meth:`.contract.Sink.commit_chunks`; one by one, as each is an entry that names files."""
        return [self._commit_chunk(epoch, each) for each in copied]

    def _commit_chunk(self, epoch: int, copied: CopiedChunk) -> int | None:
        found: Written = copied.written
        chunk = copied.chunk

        def decide(contents: Contents) -> Commit | None:
            if not self._is_open(contents, chunk, copied.origin):
                return None
            self._require_room(contents, copied.target, found)
            committed = record_contents.chunk_committed(chunk, found.watermark, found.rows, epoch)
            return Commit(committed + self._read(copied.target, found))

        failpoint("before-chunk-prepared")
        if not self._commit_files(epoch, "chunks", f"chunk {chunk.title}", found.files, decide, "before-chunk-commit"):
            return None
        failpoint("after-chunk-commit")
        return found.rows

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""
        contents = self._contents(epoch)
        if before is None:
            self._check([target], {})
        shape = shape_of(contents, folder_of(target))
        if keys is None:
            shape = shape.anew(target.table, self.format)
        else:
            batches = (only(target, keys, batch) for batch in batches)
        written = self._write_rows(epoch, contents, target, shape, keys, batches, finish)

        def decide(contents: Contents) -> Commit:
            self._require_room(contents, target, written)
            read = record_contents.reread(contents, target, keys, written.watermark, written.rows)
            if keys is None:
                read += self._without_lost(contents, folder_of(target))
            return Commit(read + self._read(target, written))

        title = f"{target.table.label} read again"
        self._commit_files(epoch, "chunks", title, written.files, decide, "before-reread-commit")
        failpoint("after-reread-commit")
        return written.rows

    def _write_rows(
        self,
        epoch: int,
        contents: Contents,
        target: Target,
        shape: Shape,
        keys: Collection[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written:
        """Write rows that were read from the source, and before them what they replace.

        :param keys: of the rows that they replace, ``None`` for all.
        """
        folder = folder_of(target)
        lsn = parse_lsn(contents["head"]["applied"])
        room = room_of(contents, folder, lsn, keys is None or bool(keys))
        rows, now = 0, int(time.time() * 1_000_000)
        with self._writing(epoch, "chunks", folder, shape) as out:
            if room.marker is not None and keys is None:
                out.write(rows_.truncate(target, self.format, lsn, room.marker, now))
            elif room.marker is not None and keys:
                out.write(rows_.deletes(target, self.format, sorted(keys), lsn, room.marker, now))
            for batch in batches:
                if batch.num_rows:
                    out.write(rows_.read_rows(target, self.format, batch, lsn, room.seq))
                    rows += batch.num_rows
            return Written(tuple(out.close()), room, shape, rows, finish())

    def _read(self, target: Target, written: Written) -> Change:
        folder = folder_of(target)
        return with_shape(folder, written.shape) + with_read(folder, written.room)

    def _require_room(self, contents: Contents, target: Target, written: Written) -> None:
        """Refuse rows that do not come behind all that is in the changelog by now.

        :raises StagingLost: when the stream has gone on, or the table was read again, since they were written.
        """
        folder = folder_of(target)
        applied, shape = parse_lsn(contents["head"]["applied"]), shape_of(contents, folder)
        room = room_of(contents, folder, applied, written.room.marker is not None)
        if applied != written.room.lsn or room.seq > written.room.seq or shape.version > written.shape.version:
            raise StagingLost(
                f"rows of {target.table.label} were written for {format_lsn(written.room.lsn)}, but the changelog has"
                f" gone on to {format_lsn(applied)}",
                "Start again: the rows are read anew.",
            )


@dataclass(frozen=True)
class Written:
    """Rows that have been read from the source and written, and not been committed yet.

    :param room: where they stand in the changelog.
    :param shape: of the target, with them.
    """

    files: tuple[DataFile, ...]
    room: Room
    shape: Shape
    rows: int
    watermark: Watermark
