"""The files sink: change logs as data files, each unit in all tables at once.

Staging tasks write data files under their final names. A unit, a chunk or a re-read is committed by one entry of the
log, which names them; what no entry names is in no changelog, and is swept. Manifests are made of the log for readers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, GateClosed, StagingLost, UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.files import manifest
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    DataFile,
    Shape,
    files_of,
    folder_of,
    known,
    room_of,
    shape_of,
    with_files,
    with_read,
    with_shape,
)
from airflow_cdc_provider.engine.sinks.files.data_writer import DataWriter, note_of, writing
from airflow_cdc_provider.engine.sinks.files.settings import Format
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import LakeRecord
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly, only
from airflow_cdc_provider.engine.sinks.record_log.read_position import Room
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, RowsNeeded, Staged, StagedPiece

PARTITION = "_date"
"""The column that the folders of the files stand for."""


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


@dataclass(frozen=True)
class FilesSink(LakeRecord, AppendOnly):
    """A pipeline's change logs below a path; see :class:`.contract.Sink` and, for its fields, the record."""

    format: Format = "parquet"

    # -- targets -----------------------------------------------------------------------------------

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: int | None) -> None:
        if any(column.name == PARTITION for column in target.table.columns):
            raise ConfigError(
                f"{target.table.label} has a column {PARTITION}, which is the name of the partitions' dates",
                "Leave it out by `columns` in the pipeline file, or rename it at the source.",
            )
        folder = folder_of(target)
        ours_there: Sequence[DataFile] = ()
        if recorded is not None and (head := self._log.head()) is not None:
            ours_there = [file for file in files_of(head.contents) if file.folder == folder]
        elif ours:
            ours_there = manifest.published(self.root, self.pipeline, folder)
        self._require_format(ours_there)
        if ours_there:
            last = max(file.last for file in ours_there)
            if start is not None and last > start:
                raise GateClosed(
                    f"the changelog {target.schema}.{target.name} has events up to {format_lsn(last)}, but the"
                    f" source's log is at {format_lsn(start)}: they are of a history that the source has left, and new"
                    " ones would come before",
                    f"Move the folder {self.root.location(folder)} away, then run `airflow-cdc resnapshot --all`.",
                )
        elif recorded is None and (found := self.root.files(folder)):
            raise ForeignTable(
                f"the folder {self.root.location(folder)} has files that pipeline {self.pipeline!r} did not write,"
                f" such as {found[0].rpartition('/')[2]}",
                "Move them away, or give the pipeline another path or target schema (`sink.path`, `sink.schema`).",
            )

    def _require_format(self, files: Sequence[DataFile]) -> None:
        """Refuse to go on in another format: no reader takes the files of one list in two.

        :raises ConfigError: naming both.
        """
        other = next((file for file in files if file.format != self.format), None)
        if other is not None:
            raise ConfigError(
                f"sink.format: {self.format!r}, but the change logs of pipeline {self.pipeline!r} are in"
                f" {other.format}, such as {self.root.location(other.path)}",
                "Put the format back, or use another pipeline name, and another path, for the other format.",
            )

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        change = Change()
        for target in targets:
            folder = folder_of(target)
            shape = shape_of(contents, folder)
            change += self._without_lost(contents, folder)
            if target.table.label in ours and (found := manifest.published(self.root, self.pipeline, folder)):
                # Of what types its columns are is not known any more.
                shape = Shape(max(file.version for file in found) + 1)
                change += with_files(found)
            change += with_shape(folder, shape.anew(target.table, self.format))
        return change

    def _without_lost(self, contents: Contents, folder: str) -> Change:
        """Name files no more that somebody has removed with their target's folder: no reader would get past them."""
        named = [file.path for file in files_of(contents) if file.folder == folder]
        if not named or any(self.root.size(path) is not None for path in named):
            return Change()
        return Change(removed={"files": named})

    def _carry_out(self, contents: Contents, step: Step) -> None:
        """Nothing is done beside the log but what follows from it, see :meth:`publish`."""

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.record.LakeRecord._missing`: those whose files have all gone."""
        named = {file.folder for file in files_of(head.contents)} if head is not None else set[str]()
        return tuple(t for t in targets if folder_of(t) in named and not self.root.files(folder_of(t)))

    # -- the record ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`.contract.Sink.prepare`."""
        super().prepare(*args, **kwargs)
        self.publish()

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.Sink.take_epoch`; manifests that an earlier run has left behind are brought up first."""
        if (head := self.head()) is not None:
            self._require_format(files_of(head.contents))
        epoch = super().take_epoch(owner, at_least)
        self.publish()
        return epoch

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`. Files stay as they are; those to come have the columns of then."""
        failpoint("before-redefinition")
        folder, change = folder_of(after), redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"rows of before have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("files keep the names of the columns that they have")

        def decide(contents: Contents) -> Commit:
            shape = shape_of(contents, folder).with_table(after.table, self.format)
            if shape is None:
                raise RowsNeeded("files keep the types of the columns that they have")
            return Commit(record_contents.redefined(after) + with_shape(folder, shape))

        self._append(epoch, f"{after.table.label} redefined", decide)
        failpoint("after-redefinition")

    # -- chunks and re-reads -----------------------------------------------------------------------

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

    # -- stream units ------------------------------------------------------------------------------

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.contract.Sink.stage`."""
        if not effects:
            return ()
        contents = self._contents(epoch)
        staged = []
        for effect in effects:
            target, relation = record_contents.target_of(contents, effect.label), None
            if effect.rows.num_rows:
                folder = folder_of(target)
                with self._writing(epoch, "units", folder, shape_of(contents, folder)) as out:
                    out.write(rows_.changes(target, self.format, effect.rows))
                    relation = json.dumps([file.to_dict() for file in out.close()])
            columns = tuple(effect.rows.column_names)
            staged.append(Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, columns))
        failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: int,
        end: int,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """See :meth:`.contract.Sink.commit`."""
        failpoint("before-batch-commit")
        staged = chain.from_iterable(piece.tables for piece in sorted(pieces, key=lambda piece: piece.index))
        files = [DataFile.from_dict(f) for s in staged if s.relation is not None for f in json.loads(s.relation)]

        def decide(contents: Contents) -> Commit | None:
            if not self._is_next(contents, start, end, pieces):
                return None
            return Commit(record_contents.unit_applied(contents, end, time.time(), noted))

        title = f"unit ({format_lsn(start)}, {format_lsn(end)}]"
        applied = self._commit_files(epoch, "units", title, files, decide, "in-batch-commit")
        failpoint("after-batch-commit")
        return applied

    def _commit_files(
        self,
        epoch: int,
        kind: Literal["units", "chunks"],
        title: str,
        files: Sequence[DataFile],
        decide: Callable[[Contents], Commit | None],
        place: Literal["before-chunk-commit", "before-reread-commit", "in-batch-commit"],
    ) -> bool:
        """Append an entry that names files, and whatever else has been decided; then tell readers.

        :param place: the failpoint before it.
        :returns: false when nothing was to be committed; the files are gone then.
        :raises StagingLost: when a file is not as it was written.
        """

        def named(contents: Contents) -> Commit | None:
            commit = decide(contents)
            if commit is None:
                return None
            for file in files:
                if (size := self.root.size(file.path)) != file.size:
                    raise StagingLost(
                        f"{self.root.location(file.path)} was written with {file.size} bytes, and has {size or 0}",
                        "Start again: the rows are written anew.",
                    )
            failpoint(place)
            return Commit(commit.now + with_files(files))

        done = self._append(epoch, title, named) is not None
        if not done:
            done = self.settled([file.path for file in files])
        notes = self._staging(kind, epoch)
        for file in files:
            notes.remove(note_of(file.path))
        self.publish()
        return done

    def settled(self, paths: Sequence[str]) -> bool:
        """Remove files whose entry was not appended as far as is known, unless it was.

        Who stands still between the creation of an entry and its look at the one before is told that it does not count
        when that one has been removed meanwhile, although others have gone on from it.

        :param paths: of files that one entry was to name.
        :returns: whether it did.
        """
        head = self.head()
        found = known({} if head is None else head.contents)
        for path in paths:
            if path not in found:
                self.root.remove(path)
        return any(path in found for path in paths)

    def _writing(
        self, epoch: int, kind: Literal["units", "chunks"], folder: str, shape: Shape
    ) -> AbstractContextManager[DataWriter]:
        return writing(self.root, self._staging(kind, epoch), folder, shape.version, self.format)

    def publish(self) -> None:
        """Bring the manifests up to the log."""
        manifest.publish(self.root, self.pipeline, self._log.head)

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.Sink.sweep`; with the notes go the files that no entry names."""
        head = self._log.head()
        if head is None or head.contents["head"]["epoch"] != epoch:
            return
        self._remove_unnamed(head, lambda kind, left: left < epoch or (left == epoch and kind == "units"))
        super().sweep(epoch)

    def drop(self) -> None:
        """See :meth:`.contract.Sink.drop`; the last manifest stays with the files."""
        if (head := self._log.head()) is not None:
            self._remove_unnamed(head, lambda kind, left: True)
        super().drop()

    def _remove_unnamed(self, head: Head, chosen: Callable[[str, int], bool]) -> None:
        """Remove files that no entry of the log names, of some kinds and epochs."""
        staging, found = self._home / "staging", known(head.contents)
        for name in staging.files():
            kind, epoch, _ = name.split("/")
            path = (staging.read(name) or b"").decode()
            if chosen(kind, int(epoch)) and path and path not in found:
                self.root.remove(path)

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.contract.Sink.compared`."""
        if self.missing([target]):
            raise UnknownTable(
                f"the files of the target {target.schema}.{target.name} are gone",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """All events of a target since it was last begun anew: the files that one entry of the log names.

        :param keys: all events come, whatever the keys.
        """
        head = self._log.head()
        folder = folder_of(target)
        contents: Contents = {} if head is None else head.contents
        version = shape_of(contents, folder).version
        for each in files_of(contents):
            if (each.folder, each.version) == (folder, version):
                with self.root.reading(each.path) as file:
                    for batch in rows_.batches(each.format, file):
                        yield rows_.texts(target, batch)
