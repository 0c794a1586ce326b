"""Kafka's client, or a sentence that says how to install it."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import ConfigError

try:
    from confluent_kafka import (
        Consumer,
        IsolationLevel,
        KafkaError,
        KafkaException,
        TopicCollection,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType
except ImportError as e:
    raise ConfigError(
        "Kafka as a source or sink needs the package confluent-kafka, which is not installed",
        "Install it where the driver and Airflow's workers run: pip install 'airflow-cdc-provider[kafka]'.",
    ) from e

__all__ = [
    "AdminClient",
    "ConfigResource",
    "Consumer",
    "IsolationLevel",
    "KafkaError",
    "KafkaException",
    "NewTopic",
    "OffsetSpec",
    "ResourceType",
    "TopicCollection",
    "TopicPartition",
]
