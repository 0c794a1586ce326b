"""Postgres as a kind of sinks: opened, checked."""

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
    """See :class:`.SinkPlugin`."""

    settings = PostgresSettings

    def open(self, settings: PostgresSettings, pipeline: str, part: str = "") -> PostgresSink:
        """See :meth:`.SinkPlugin.open`."""
        from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink

        return PostgresSink(settings.dsn, pipeline, settings.mode, part, settings.types == "convert")

    def check(
        self,
        settings: PostgresSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """See :meth:`.SinkPlugin.check`."""
        from airflow_cdc_provider.engine.sinks.postgres.checks import check

        check(settings, checks, pipeline, targets, source)
