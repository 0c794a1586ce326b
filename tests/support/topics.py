"""Pipelines over topics of a real broker, with Spark, and a producer for their messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.sources.kafka.settings import PACKAGE
from local_servers.jars import JarsMissing, fetch
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import SECONDS, create_topic
from tests.support.pipelines import SPARK_CONF, PipelineUnderTest

_OF_SPARK = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")


def kafka_jars() -> str:
    """The jars that Spark does not have, fetched if need be, as ``spark.jars`` takes them."""
    try:
        jars = fetch(PACKAGE)
    except JarsMissing as e:
        pytest.skip(e.message)
    return ",".join(str(jar) for jar in jars if any(name in jar.name for name in _OF_SPARK))


class TopicsPipeline(PipelineUnderTest):
    """A pipeline over a topic of its own.

    :param source: further keys of the section.
    """

    def __init__(
        self,
        directory: Path,
        databases: Databases,
        broker: KafkaServer,
        columns: str,
        partitions: int = 2,
        **source: Any,
    ) -> None:
        super().__init__(directory, databases, [])
        self.broker = broker
        self.topic = f"in-{uuid.uuid4().hex[:8]}"
        create_topic(broker.brokers, self.topic, partitions)
        self.document["source"] = {
            "type": "kafka",
            "brokers": broker.brokers,
            "topics": [self.topic],
            "columns": columns,
            "table": "public.t",
            **source,
        }
        # Packages are looked for in every Maven repository at each start.
        conf = {**SPARK_CONF, "spark.jars.packages": "", "spark.jars": kafka_jars(), "spark.log.level": "ERROR"}
        self.change(spark={"conf": conf})

    def send(self, *values: Mapping[str, Any] | bytes | None, topic: str | None = None) -> None:
        """Write messages in their order; those with an ``id`` are keyed by it."""
        producer = Producer({"bootstrap.servers": self.broker.brokers, "linger.ms": 0})
        for value in values:
            key = str(value["id"]) if isinstance(value, Mapping) and "id" in value else None
            data = json.dumps(value).encode() if isinstance(value, Mapping) else value
            producer.produce(topic or self.topic, data, key)
        assert producer.flush(SECONDS) == 0

    def catch_up(self) -> dict[str, Any]:
        """What the command ``run`` does, in this process."""
        return commands.run(self.pipeline)

    def offsets(self) -> dict[str, int]:
        """Up to where the record says that the topic has been read."""
        return dict(self.record.identity["offsets"][self.topic])


def moments(seconds: Sequence[float]) -> list[str]:
    """Times of one minute, as messages have them."""
    return [f"2024-05-01T10:00:{second:06.3f}Z" for second in seconds]
