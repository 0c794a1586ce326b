"""The plugin for MySQL and MariaDB sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.sinks.mysql.settings import MysqlSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink


class MysqlPlugin:
    """The plugin for MySQL and MariaDB sinks."""

    settings = MysqlSettings

    def open(self, settings: MysqlSettings, pipeline: str, part: str = "") -> MysqlSink:
        """Open the sink of a pipeline."""
        from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink

        return MysqlSink(settings.dsn, pipeline, settings.mode, part, settings.views)

    def check(
        self,
        settings: MysqlSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the sink, and whether it can have the targets."""
        from airflow_cdc_provider.engine.sinks.mysql.checks import check

        check(settings, checks, pipeline, targets)
