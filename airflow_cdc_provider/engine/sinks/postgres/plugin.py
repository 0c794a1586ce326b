"""The plugin for Postgres sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.sinks.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink


class PostgresPlugin:
    """The plugin for Postgres sinks."""

    settings = PostgresSettings

    def open(self, settings: PostgresSettings, pipeline: str, part: str = "") -> PostgresSink:
        """Open the sink of a pipeline."""
        from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink

        return PostgresSink(settings.dsn, pipeline, settings.mode, part, settings.types == "convert", settings.views)

    def check(
        self,
        settings: PostgresSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the sink, and whether it can have the targets."""
        from airflow_cdc_provider.engine.sinks.postgres.checks import check

        check(settings, checks, pipeline, targets, source)
