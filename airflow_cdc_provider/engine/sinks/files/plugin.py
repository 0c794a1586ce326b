"""Files as a kind of sinks: opened, checked, maintained."""

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
    """See :class:`.SinkPlugin`."""

    settings = FilesSettings

    def open(self, settings: FilesSettings, pipeline: str, part: str = "") -> FilesSink:
        """See :meth:`.SinkPlugin.open`."""
        from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
        from airflow_cdc_provider.engine.sinks.lake.storage import Place

        return FilesSink(Place(settings.path), pipeline, settings.mode, settings.format)

    def check(
        self,
        settings: FilesSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """See :meth:`.SinkPlugin.check`."""
        from airflow_cdc_provider.engine.sinks.files.checks import check

        check(settings, self.open(settings, pipeline), checks, targets)

    def maintain(self, settings: FilesSettings, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """See :meth:`.Maintained.maintain`: small files are compacted."""
        from airflow_cdc_provider.engine.sinks.files.compaction import RETENTION_SECONDS, compact

        seconds = RETENTION_SECONDS if retention is None else retention
        return [compact(self.open(settings, pipeline), retention=seconds).as_dict()]
