"""Pipelines into Kafka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.kafka.cluster import Cluster
from tests.conftest import Databases
from tests.support.audited import assert_all_changes
from tests.support.kafka_sink import consumed
from tests.support.pipelines import PipelineUnderTest

OPS = {"r": "r", "c": "i", "u": "u", "d": "d", "t": "t"}


class KafkaPipeline(PipelineUnderTest):
    """A pipeline into Kafka, and a consumer of its topics."""

    def __init__(self, directory: Path, databases: Databases, tables: list[Any], brokers: str, **sink: Any) -> None:
        super().__init__(directory, databases, tables, snapshot={"chunk_rows": 800})
        self.document["sink"] = {"type": "kafka", "brokers": brokers, "partitions": 3, **sink}
        self.cluster = Cluster(brokers)
        self.change(stream={"max_batch_bytes": "256KiB"})

    def topic(self, table: str = "public.t") -> str:
        return f"{self.name}.{table}"

    def values(self, table: str = "public.t", committed: bool = True) -> list[dict[str, Any]]:
        """Return the messages of a table as a consumer reads them: JSON objects, without tombstones."""
        found = consumed(self.cluster, self.topic(table), committed)
        return [json.loads(message.value) for message in found if message.value is not None]

    def events(self, table: str = "public.t") -> list[tuple[Any, str, int]]:
        """Return transaction, kind and key of each event in Debezium's envelope."""
        found = []
        for value in self.values(table):
            row = value["after"] or value["before"]
            found.append((value["source"]["txId"], OPS[value["op"]], row and row["id"]))
        return found


def assert_consumed_once(pipeline: KafkaPipeline, least: int = 10) -> None:
    """Check that snapshot rows and changes occur once, see :func:`tests.support.audited.assert_all_changes`."""
    events = pipeline.events()
    read = [key for _, op, key in events if op == "r"]
    assert len(read) == len(set(read)) == sum(chunk.rows for chunk in pipeline.record.chunks)
    assert_all_changes(pipeline, [event for event in events if event[1] != "r"], least, moves_are_two=True)
