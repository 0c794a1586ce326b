"""The plugin for Delta Lake sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink


class DeltaPlugin:
    """The plugin for Delta Lake sinks."""

    settings = DeltaSettings

    def open(self, settings: DeltaSettings, pipeline: str, part: str = "") -> DeltaSink:
        """Open the sink of a pipeline."""
        from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
        from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout
        from airflow_cdc_provider.engine.sinks.lake.storage import Storage

        root = Storage(settings.path)
        layout = Layout(root, settings.catalog, settings.partition_by, settings.table_properties)

        conf = settings.spark or tuple(settings.spark_conf.items())
        return DeltaSink(root, pipeline, settings.mode, layout, conf, settings.views)

    def check(
        self,
        settings: DeltaSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the sink, and whether it can have the targets."""
        from airflow_cdc_provider.engine.sinks.delta.checks import check

        check(settings, self.open(settings, pipeline), checks, targets)

    def maintain(self, settings: DeltaSettings, pipeline: str, retention: float | None) -> Sequence[Mapping[str, Any]]:
        """Run ``OPTIMIZE`` and ``VACUUM`` on the target tables."""
        from airflow_cdc_provider.engine.sinks.delta.maintenance import RETAINED_HOURS, maintain

        hours = RETAINED_HOURS if retention is None else retention / 3600
        return [asdict(table) for table in maintain(self.open(settings, pipeline), retained_hours=hours)]
