"""The journal as a kind of sources: what the entry point names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc_journal.settings import JournalSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from cdc_journal.source import JournalSource


class JournalPlugin:
    """See ``SourcePlugin``."""

    settings = JournalSettings

    def attach(self, pipeline: Pipeline) -> JournalSource:
        """The journal of a pipeline; nothing is opened yet."""
        from cdc_journal.source import JournalSource  # late: pyarrow is not for where Dags are parsed

        return JournalSource(pipeline)
