"""Kafka as a kind of sinks: opened, checked."""

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
    """See :class:`.SinkPlugin`."""

    settings = KafkaSettings

    def open(self, settings: KafkaSettings, pipeline: str, part: str = "") -> KafkaSink:
        """See :meth:`.SinkPlugin.open`."""
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
        """See :meth:`.SinkPlugin.check`."""
        from airflow_cdc_provider.engine.sinks.kafka.checks import check

        check(settings, self.open(settings, pipeline), checks, targets, source)
