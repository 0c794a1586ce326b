"""The plugin that registers Postgres as a type of source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sources.postgres.source import PostgresSource


class PostgresSourcePlugin:
    """See :class:`.SourcePlugin`."""

    settings = PostgresSourceSettings

    def attach(self, pipeline: Pipeline) -> PostgresSource:
        """See :meth:`.SourcePlugin.attach`."""
        from airflow_cdc_provider.engine.sources.postgres.source import PostgresSource

        return PostgresSource(pipeline)
