"""Writes units of the stream to files: tasks write them, and one entry of the log commits them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    DataFile,
    FileSchema,
    file_schema,
    folder_of,
    known,
    with_files,
)
from airflow_cdc_provider.engine.sinks.files.data_writer import DataWriter, note_of, writing
from airflow_cdc_provider.engine.sinks.files.record import FilesRecord
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents
from airflow_cdc_provider.engine.sinks.staged import Staged, StagedPiece


@dataclass(frozen=True)
class FilesUnits(FilesRecord):
    """The part of a files sink that writes units."""

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Write effects to data files."""
        if not effects:
            return ()
        contents = self._contents(epoch)
        staged = []
        for effect in effects:
            target, relation = record_contents.target_of(contents, effect.label), None
            if effect.rows.num_rows:
                folder = folder_of(target)
                with self._writing(epoch, "units", folder, file_schema(contents, folder)) as out:
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
        start: LogPosition,
        end: LogPosition,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """Commit a unit with one entry of the log."""
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
        """Append an entry that names files, together with another decision; then publish it to readers.

        :param place: the failpoint before it.
        :returns: false when there was nothing to commit; the files have been removed then.
        :raises StagingLost: when a file differs from what was written.
        """

        def named(contents: Contents) -> Commit | None:
            commit = decide(contents)
            if commit is None:
                return None
            for file in files:
                if (size := self.root.size(file.path)) != file.size:
                    raise StagingLost(
                        f"{self.root.location(file.path)} was written with {file.size} bytes, but has {size or 0}",
                        "Start again: the rows are written again.",
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
        """Remove files whose entry seems to be missing, unless it exists after all.

        A process may pause between creating an entry and checking the entry before it. If that one has been removed
        meanwhile, the new entry is reported as invalid, although others may have continued from it.

        :param paths: paths of files that one entry was to name.
        :returns: whether the entry exists.
        """
        head = self.head()
        found = known({} if head is None else head.contents)
        for path in paths:
            if path not in found:
                self.root.remove(path)
        return any(path in found for path in paths)

    def _writing(
        self, epoch: int, kind: Literal["units", "chunks"], folder: str, schema: FileSchema
    ) -> AbstractContextManager[DataWriter]:
        return writing(self.root, self._staging(kind, epoch), folder, schema.version, self.format)

    def sweep(self, epoch: int) -> None:
        """Remove staged notes, and the files of notes that no entry names."""
        head = self._log.head()
        if head is None or head.contents["head"]["epoch"] != epoch:
            return
        self._remove_unnamed(head, lambda kind, left: left < epoch or (left == epoch and kind == "units"))
        super().sweep(epoch)

    def drop(self) -> None:
        """Remove the commit record and everything staged; the last manifest stays with the files."""
        if (head := self._log.head()) is not None:
            self._remove_unnamed(head, lambda kind, left: True)
        super().drop()

    def _remove_unnamed(self, head: Head, chosen: Callable[[str, int], bool]) -> None:
        """Remove files that no entry of the log names, of the chosen kinds and epochs."""
        staging, found = self._home / "staging", known(head.contents)
        for name in staging.files():
            kind, epoch, _ = name.split("/")
            path = (staging.read(name) or b"").decode()
            if chosen(kind, int(epoch)) and path and path not in found:
                self.root.remove(path)
