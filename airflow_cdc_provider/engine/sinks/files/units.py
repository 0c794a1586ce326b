"""Units of the stream in files: written by tasks, and committed by one entry of the log."""

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
    Shape,
    folder_of,
    known,
    shape_of,
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
    """See :class:`.contract.Sink`: units."""

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
        start: LogPosition,
        end: LogPosition,
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
