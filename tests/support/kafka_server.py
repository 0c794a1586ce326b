"""A Kafka broker for tests, with jars that are fetched once: ``python -m tests.support.kafka_server``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from airflow_cdc_provider.engine.kafka import cluster as clusters
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.sinks.kafka import staging_topic, transactions
from local_servers.jars import JarsMissing
from local_servers.kafka import KafkaServer, Login, fetch_jars

SECONDS = 30.0


class Message(NamedTuple):
    """One that was read from a topic."""

    partition: int
    key: bytes | None
    value: bytes | None


def make_broker(directory: Path, settings: Mapping[str, str] | None = None, login: Login | None = None) -> KafkaServer:
    """As :meth:`KafkaServer.create`; the test is skipped where Kafka cannot be fetched."""
    try:
        return KafkaServer.create(directory, settings, login)
    except JarsMissing as e:
        pytest.skip(e.message)


def create_topic(brokers: str, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
    """Create a topic."""
    client = AdminClient({"bootstrap.servers": brokers})  # which has to live until the topic does
    client.create_topics([NewTopic(name, partitions, 1, config=dict(settings or {}))])[name].result(SECONDS)


def set_topic(brokers: str, name: str, settings: Mapping[str, str]) -> None:
    """Change settings of a topic."""
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    client = AdminClient({"bootstrap.servers": brokers})
    client.incremental_alter_configs([resource])[resource].result(SECONDS)


def topics(cluster: Cluster) -> set[str]:
    """Return the names of all topics but the broker's own."""
    return {name for name in cluster.topics() if not name.startswith("__")}


def clear(cluster: Cluster) -> None:
    """Remove these topics."""
    for name in topics(cluster):
        cluster.remove(name)


def close_clients() -> None:
    """Close the clients that pipelines have left in this process.

    A process keeps those of its pipeline. The pipelines of all tests left a thousand files open, and Py4J accepts no
    callback on a file of a higher number.
    """
    for kept in (clusters._admins, clusters._consumers, staging_topic._producers, transactions._clients):
        kept.clear()


def properties(brokers: str, **conf: Any) -> dict[str, Any]:
    """Those of a client.

    :param conf: further ones, with underscores for dots.
    """
    return {"bootstrap.servers": brokers, "log_level": 0} | {key.replace("_", "."): conf[key] for key in conf}


def transactional(brokers: str, name: str, **conf: Any) -> Producer:
    """Return a producer that has fenced all others with its name."""
    producer = Producer(properties(brokers, transactional_id=name, **conf))
    producer.init_transactions(SECONDS)
    return producer


def committed(brokers: str, topic: str, **conf: Any) -> list[Message]:
    """All messages of a topic but those of transactions that are open or were aborted, partition by partition.

    The broker ends a transaction, and shows it, a moment after it has promised to.
    """
    ours = {"group_id": "tests", "isolation_level": "read_committed", "enable_partition_eof": True}
    consumer = Consumer(properties(brokers, **ours | conf))
    with closing(consumer):
        found = consumer.list_topics(topic, SECONDS).topics[topic]
        assert found.error is None, f"{topic}: {found.error}"
        numbers = sorted(found.partitions)
        return [message for number in numbers for message in _read(consumer, TopicPartition(topic, number, 0))]


def _read(consumer: Consumer, partition: TopicPartition) -> Iterator[Message]:
    consumer.assign([partition])
    while True:
        message = consumer.poll(SECONDS)
        assert message is not None, f"{partition} does not come to its end"
        error = message.error()
        if error is None:
            yield Message(partition.partition, message.key(), message.value())
        elif error.code() == KafkaError._PARTITION_EOF:
            return
        else:
            raise AssertionError(f"{partition}: {error}")


if __name__ == "__main__":
    try:
        fetch_jars()
    except JarsMissing as e:
        sys.exit(e.message)
