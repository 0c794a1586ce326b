"""The plugin that the entry point names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_journal.settings import JournalSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from cdc_journal.source import JournalSource


class JournalPlugin:
    """The source type ``journal``; implements ``SourcePlugin``."""

    settings = JournalSettings

    def attach(self, pipeline: Pipeline) -> JournalSource:
        """Return the source of a pipeline; nothing is opened yet."""
        from cdc_journal.source import JournalSource  # late, so that parsing Dags does not import pyarrow

        return JournalSource(pipeline)
