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
    FileSchema,
    file_schema,
    files_of,
    folder_of,
    with_file_schema,
    with_files,
)
from airflow_cdc_provider.engine.sinks.files.settings import FileFormat
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import LakeRecord
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step

PARTITION = "_date"
"""The partition column in the names of the files' folders."""


@dataclass(frozen=True)
class FilesRecord(LakeRecord, AppendOnly):
    """The commit record of a files sink, see :class:`.CommitRecord`."""

    format: FileFormat = "parquet"

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        if any(column.name == PARTITION for column in target.table.columns):
            raise ConfigError(
                f"{target.table.label} has a column {PARTITION}, which is reserved for the dates of the partitions",
                "Leave it out with `columns` in the pipeline file, or rename it at the source.",
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
                    f" source's log is at {format_lsn(start)}: they belong to a timeline that the source has abandoned,"
                    " so new events would sort before them",
                    f"Move the folder {self.root.location(folder)} away, then run `airflow-cdc resnapshot --all`.",
                )
        elif recorded is None and (found := self.root.files(folder)):
            raise ForeignTable(
                f"the folder {self.root.location(folder)} has files that pipeline {self.pipeline!r} did not write,"
                f" such as {found[0].rpartition('/')[2]}",
                "Move them away, or give the pipeline another path or target schema (`sink.path`, `sink.schema`).",
            )

    def _require_format(self, files: Sequence[DataFile]) -> None:
        """Refuse to continue in another format, because no reader can read two formats in one list.

        :raises ConfigError: naming both formats.
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
            schema = file_schema(contents, folder)
            change += self._without_lost(contents, folder)
            if target.table.label in ours and (found := manifest.published(self.root, self.pipeline, folder)):
                # The types of its columns are not known anymore.
                schema = FileSchema(max(file.version for file in found) + 1)
                change += with_files(found)
            change += with_file_schema(folder, schema.for_rewrite(target.table, self.format))
        return change

    def _without_lost(self, contents: Contents, folder: str) -> Change:
        """Remove files from the record that were deleted with their target's folder; readers would fail on them."""
        named = [file.path for file in files_of(contents) if file.folder == folder]
        if not named or any(self.root.size(path) is not None for path in named):
            return Change()
        return Change(removed={"files": named})

    def _carry_out(self, contents: Contents, step: Step) -> None:
        """Do nothing: the effects of an entry follow from the log, see :meth:`publish`."""

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose files are all gone."""
        named = {file.folder for file in files_of(head.contents)} if head is not None else set[str]()
        return tuple(t for t in targets if folder_of(t) in named and not self.root.files(folder_of(t)))

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Create the commit record and accept target folders, then publish the manifests."""
        super().prepare(*args, **kwargs)
        self.publish()

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Take the epoch, and update manifests that an earlier run has left outdated."""
        if (head := self.head()) is not None:
            self._require_format(files_of(head.contents))
        epoch = super().take_epoch(owner, at_least)
        self.publish()
        return epoch

    def publish(self) -> None:
        """Update the manifests to the log."""
        manifest.publish(self.root, self.pipeline, self._log.head)
