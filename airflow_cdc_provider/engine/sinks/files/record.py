"""The commit record of a files sink, and the folders of its targets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, GateClosed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.files import manifest
from airflow_cdc_provider.engine.sinks.files.data_file import (
    DataFile,
    Shape,
    files_of,
    folder_of,
    shape_of,
    with_files,
    with_shape,
)
from airflow_cdc_provider.engine.sinks.files.settings import Format
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import LakeRecord
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step

PARTITION = "_date"
"""The column that the folders of the files stand for."""


@dataclass(frozen=True)
class FilesRecord(LakeRecord, AppendOnly):
    """See :class:`.CommitRecord`."""

    format: Format = "parquet"

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
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

    def publish(self) -> None:
        """Bring the manifests up to the log."""
        manifest.publish(self.root, self.pipeline, self._log.head)
