"""Pipelines over topics of a real broker, with Spark, and a producer for their messages."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from airflow_cdc_provider.engine import cli, commands
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import SECONDS, create_topic
from tests.support.pipelines import SPARK_CONF, Outcome, PipelineUnderTest
from tests.support.spark_jars import KAFKA, require_jars

# Otherwise each start looks for packages in every Maven repository.
SESSION_CONF = {**SPARK_CONF, "spark.jars.packages": "", "spark.log.level": "ERROR"}


class TopicsPipeline(PipelineUnderTest):
    """A pipeline over its own topic.

    :param source: further keys of the section ``source``.
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
        require_jars(KAFKA)
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
        self.change(spark={"conf": SESSION_CONF})

    def send(self, *values: Mapping[str, Any] | bytes | None, topic: str | None = None) -> None:
        """Write messages in order; those with an ``id`` use it as their key."""
        producer = Producer({"bootstrap.servers": self.broker.brokers, "linger.ms": 0})
        for value in values:
            key = str(value["id"]) if isinstance(value, Mapping) and "id" in value else None
            data = json.dumps(value).encode() if isinstance(value, Mapping) else value
            producer.produce(topic or self.topic, data, key)
        assert producer.flush(SECONDS) == 0

    def catch_up(self) -> dict[str, Any]:
        """Do the work of the command ``run``, in this process."""
        return commands.run(self.pipeline)

    def run_here(self, command: str, *options: str, code: int = 0) -> Outcome:
        """Do as :meth:`run` does, but in this process."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            ended = cli.main([command, "--pipeline", str(self.file), *options])
        assert ended == code, f"{command} {options}: {out.getvalue()}\n{err.getvalue()}"
        return Outcome(ended, out.getvalue(), err.getvalue())

    def offsets(self) -> dict[str, int]:
        """Return the offsets up to which the record says that the topic has been read."""
        return dict(self.record.identity["offsets"][self.topic])


def moments(seconds: Sequence[float]) -> list[str]:
    """Return times within one minute, in the format of the messages."""
    return [f"2024-05-01T10:00:{second:06.3f}Z" for second in seconds]
