"""Topics of Kafka as a kind of sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.settings import TopicSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sources.kafka.source import KafkaSource


class KafkaSourcePlugin:
    """See :class:`.SourcePlugin`."""

    settings = TopicSettings

    def attach(self, pipeline: Pipeline) -> KafkaSource:
        """See :meth:`.SourcePlugin.attach`."""
        from airflow_cdc_provider.engine.sources.kafka.source import KafkaSource

        return KafkaSource(pipeline)
