"""Imports Kafka's client, or raises an error that says how to install it."""

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
        "cannot use Kafka because the package confluent-kafka is not installed",
        "Run `pip install 'airflow-cdc-provider[kafka]'` where the driver and Airflow's workers run.",
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
