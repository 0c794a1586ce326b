"""A Kafka sink on a broker of the tests, and the calls that tests make on it in place of the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Producer

from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.kafka.consumer import Received
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import text_of
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import CHUNKS, SUFFIX, UNITS, Blob
from airflow_cdc_provider.engine.sinks.staged import Staged
from tests.sinks.begun_sink import SinkUnderTest
from tests.support.kafka_server import topics


def settings(brokers: str, **more: Any) -> KafkaSettings:
    """Return settings with two partitions per topic and no pipeline name in topics, so that pipelines can interfere."""
    return KafkaSettings(brokers, **{"format": "json", "topic": "{schema}.{table}", "partitions": 2, **more})


def consumed(cluster: Cluster, topic: str, committed: bool = True) -> list[Received]:
    """Return all messages of a topic as a consumer reads them, partition by partition."""
    there = cluster.topic(topic)
    if there is None:
        return []
    found = [message for messages in cluster.read(there, there.beginning, committed) for message in messages]
    return sorted(found, key=lambda message: (message.partition, message.offset))


def send(cluster: Cluster, topic: str, key: str | None, value: str | None) -> None:
    producer = Producer(cluster.conf())
    producer.produce(topic, value, key)
    producer.flush()


class KafkaStore(SinkUnderTest):
    """A broker without topics."""

    moves_are_two = True

    def __init__(self, brokers: str, **more: Any) -> None:
        self.settings = settings(brokers, **more)
        self.cluster = Cluster(brokers)

    def sink(self, mode: Mode, pipeline: str = "p") -> KafkaSink:
        assert mode == "changelog"
        return KafkaSink(self.settings, pipeline)

    def topic(self, target: Target) -> str:
        return self.settings.topic_of("p", target.schema, target.name)

    def read(self, target: Target) -> Sequence[dict[str, Any]]:
        found = [json.loads(message.value or b"") for message in consumed(self.cluster, self.topic(target))]
        for event in found:
            if before := event.get("_before"):
                event["_before"] = {name: text_of(value) for name, value in before.items()}
        truncates = [event for event in found if event["_op"] == "t"]
        # Every partition has them.
        return [event for n, event in enumerate(found) if event not in truncates or found.index(event) == n]

    def names(self) -> set[str]:
        return topics(self.cluster)

    def staged(self) -> int:
        count = 0
        for name in self.names():
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                partitions = (CHUNKS, *UNITS)
                firsts, ends = self.cluster.first(name, partitions), self.cluster.ends(name, partitions)
                count += sum(ends.values()) - sum(firsts.values())
        return count

    def damage(self, staged: Staged) -> None:
        assert staged.relation is not None
        blob = Blob.from_dict(json.loads(staged.relation)["blob"])
        self.cluster.truncate(f"{PREFIX}p{SUFFIX}", {blob.partition: blob.offsets[-1] + 1})

    def occupy(self, target: Target) -> None:
        self.cluster.create([self.topic(target)], 1, -1, {})
        send(self.cluster, self.topic(target), "theirs", "{}")

    def remove(self, target: Target) -> None:
        self.cluster.remove(self.topic(target))
