"""The plugin for sources that read Kafka topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.settings import TopicSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sources.kafka.source import KafkaSource


class KafkaSourcePlugin:
    """The plugin for sources that read Kafka topics."""

    settings = TopicSettings

    def attach(self, pipeline: Pipeline) -> KafkaSource:
        """Return the source of a pipeline, without connecting to it."""
        from airflow_cdc_provider.engine.sources.kafka.source import KafkaSource

        return KafkaSource(pipeline)
