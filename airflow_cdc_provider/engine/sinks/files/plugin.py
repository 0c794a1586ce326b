"""The plugin for files sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.sinks.files.settings import FilesSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.files.sink import FilesSink


class FilesPlugin:
    """The plugin for files sinks."""

    settings = FilesSettings

    def open(self, settings: FilesSettings, pipeline: str, part: str = "") -> FilesSink:
        """Open the sink of a pipeline."""
        from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
        from airflow_cdc_provider.engine.sinks.lake.storage import Storage

        return FilesSink(Storage(settings.path), pipeline, settings.mode, settings.format)

    def check(
        self,
        settings: FilesSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the sink, and whether it can have the targets."""
        from airflow_cdc_provider.engine.sinks.files.checks import check

        check(settings, self.open(settings, pipeline), checks, targets)

    def maintain(self, settings: FilesSettings, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """Compact small files."""
        from airflow_cdc_provider.engine.sinks.files.compaction import RETENTION_SECONDS, compact

        seconds = RETENTION_SECONDS if retention is None else retention
        return [compact(self.open(settings, pipeline), retention=seconds).as_dict()]
