"""Writes chunks and re-reads to files: tasks write them, and one entry of the log commits them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    DataFile,
    FileSchema,
    file_schema,
    folder_of,
    next_read_position,
    with_file_schema,
    with_read,
)
from airflow_cdc_provider.engine.sinks.files.units import FilesUnits
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import only
from airflow_cdc_provider.engine.sinks.record_log.read_position import ReadPosition
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk


@dataclass(frozen=True)
class FilesReads(FilesUnits):
    """The part of a files sink that writes rows read from the source."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: ServerIdentity,
        rows: SourceRows,
    ) -> WrittenRead | None:
        """Write the rows of a chunk to files."""
        contents = self._contents(epoch)
        if not self._is_open(contents, chunk, origin):
            return None
        failpoint("before-chunk-staged")
        schema = file_schema(contents, folder_of(target))
        written = self._write_rows(epoch, contents, target, schema, None if chunk.whole else (), rows)
        failpoint("after-chunk-staged")
        return written

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """Commit chunks one by one, each with an entry that names its files."""
        return [self._commit_chunk(epoch, each) for each in copied]

    def _commit_chunk(self, epoch: int, copied: CopiedChunk) -> int | None:
        found: WrittenRead = copied.written
        chunk = copied.chunk

        def decide(contents: Contents) -> Commit | None:
            if not self._is_open(contents, chunk, copied.origin):
                return None
            self._require_position(contents, copied.target, found)
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
        rows: SourceRows,
        before: Target | None,
    ) -> int:
        """Commit a re-read."""
        contents = self._contents(epoch)
        if before is None:
            self._check([target], {})
        schema = file_schema(contents, folder_of(target))
        if keys is None:
            schema = schema.for_rewrite(target.table, self.format)
        else:
            rows = rows.changed(partial(only, target, keys))
        written = self._write_rows(epoch, contents, target, schema, keys, rows)

        def decide(contents: Contents) -> Commit:
            self._require_position(contents, target, written)
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
        schema: FileSchema,
        keys: Collection[tuple[str, ...]] | None,
        rows: SourceRows,
    ) -> WrittenRead:
        """Write rows read from the source, preceded by events for the rows that they replace.

        :param keys: keys of the replaced rows; ``None`` for all rows.
        """
        folder = folder_of(target)
        lsn = parse_lsn(contents["head"]["applied"])
        position = next_read_position(contents, folder, lsn, keys is None or bool(keys))
        count, now = 0, int(time.time() * 1_000_000)
        with self._writing(epoch, "chunks", folder, schema) as out:
            if position.marker is not None and keys is None:
                out.write(rows_.truncate(target, self.format, lsn, position.marker, now))
            elif position.marker is not None and keys:
                out.write(rows_.deletes(target, self.format, sorted(keys), lsn, position.marker, now))
            for batch in rows.batches():
                if batch.num_rows:
                    out.write(rows_.read_rows(target, self.format, batch, lsn, position.seq))
                    count += batch.num_rows
            return WrittenRead(tuple(out.close()), position, schema, count, rows.finish())

    def _read(self, target: Target, written: WrittenRead) -> Change:
        folder = folder_of(target)
        return with_file_schema(folder, written.schema) + with_read(folder, written.position)

    def _require_position(self, contents: Contents, target: Target, written: WrittenRead) -> None:
        """Refuse rows that would not come after everything in the changelog.

        :raises StagingLost: when the stream has advanced, or the table was read again, since the rows were written.
        """
        folder = folder_of(target)
        applied, schema = parse_lsn(contents["head"]["applied"]), file_schema(contents, folder)
        position = next_read_position(contents, folder, applied, written.position.marker is not None)
        overtaken = applied != written.position.lsn or position.seq > written.position.seq
        if overtaken or schema.version > written.schema.version:
            raise StagingLost(
                f"rows of {target.table.label} were written for {format_lsn(written.position.lsn)}, but the changelog"
                f" has advanced to {format_lsn(applied)}",
                "Start again: the rows are read again.",
            )


@dataclass(frozen=True)
class WrittenRead:
    """Rows that have been read from the source and written, but not yet committed.

    :param position: their position in the changelog.
    :param schema: schema of the target's files with these rows.
    """

    files: tuple[DataFile, ...]
    position: ReadPosition
    schema: FileSchema
    rows: int
    watermark: Watermark
