"""The plugin for Kafka sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink


class KafkaPlugin:
    """The plugin for Kafka sinks."""

    settings = KafkaSettings

    def open(self, settings: KafkaSettings, pipeline: str, part: str = "") -> KafkaSink:
        """Open the sink of a pipeline."""
        from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink

        return KafkaSink(settings, pipeline, part)

    def check(
        self,
        settings: KafkaSettings,
        checks: Checks,
        pipeline: str,
        targets: Sequence[Target] | None,
        source: SourceIdentity | None,
    ) -> None:
        """Check the sink, and whether it can have the targets."""
        from airflow_cdc_provider.engine.sinks.kafka.checks import check

        check(settings, self.open(settings, pipeline), checks, targets, source)
