"""Topics in Avro, with the schemas of a real registry."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.avro_texts import TEXT, AvroTexts
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import committed, create_topic
from tests.support.topics import TopicsPipeline

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]

AMOUNT = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
ROW = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "amount", "type": ["null", AMOUNT]},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None},
        {"name": "data", "type": ["null", "bytes"], "default": None},
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "Row"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
COLUMNS = "id BIGINT NOT NULL, amount DECIMAL(12, 2), at TIMESTAMP, day DATE, data BINARY"
FULL = {
    "id": 1,
    "amount": Decimal("-0.50"),
    "at": datetime(2024, 5, 1, 10, 0, 0, 250000, UTC),
    "day": date(2024, 2, 29),
    "data": b"\x00\xff",
}


def encoded(registry: str, subject: str, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bytes:
    """Return a value as Confluent's serializer writes it."""
    number = SchemaRegistryClient({"url": registry}).register_schema(subject, Schema(json.dumps(schema), "AVRO"))
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(dict(schema)), value)
    return struct.pack(">bI", 0, number) + stream.getvalue()


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """Record the schemas that the registry lacks, each time that dead letters are collected."""
    found: list[frozenset[int]] = []
    troubled = message_view.dead_letter_rows
    monkeypatch.setattr(message_view, "dead_letter_rows", lambda *given: (found.append(given[-1]), troubled(*given))[1])
    return found


def test_values_of_avro_become_rows_and_others_dead_letters(
    databases: Databases, kafka: KafkaServer, registry: str, tmp_path: Path, missing: list[frozenset[int]]
) -> None:
    pipeline = TopicsPipeline(
        tmp_path, databases, kafka, COLUMNS, key=["id"], format="avro", registry=registry, partitions=1
    )
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    good = encoded(registry, pipeline.topic, ROW, FULL)
    later = {**ROW, "fields": [*ROW["fields"], {"name": "new", "type": ["null", "string"], "default": None}]}  # type: ignore[misc]
    bad = [b"{}", struct.pack(">bI", 0, 1 << 30), good[:-1], good + b"x"]
    pipeline.send(good, *bad, encoded(registry, pipeline.topic, later, {"id": 2, "amount": None}))
    pipeline.catch_up()
    assert set().union(*missing) == {1 << 30}
    rows = pipeline.target_rows('SELECT id, amount, "at", day, data FROM t ORDER BY id')
    assert rows == [tuple(FULL.values()), (2, None, None, None, None)]
    assert [message.value for message in committed(kafka.brokers, dead)] == bad


@pytest.mark.thorough
def test_what_stands_in_front_of_a_truncate_is_a_dead_letter_by_the_same_schemas(
    databases: Databases, kafka: KafkaServer, registry: str, tmp_path: Path, missing: list[frozenset[int]]
) -> None:
    """A schema may arrive between both reads: the second one has to write what the first leaves out without it."""
    pipeline = TopicsPipeline(
        tmp_path, databases, kafka, COLUMNS, key=["id"], format="debezium", registry=registry, partitions=1
    )
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}}, sink={"mode": "changelog"})
    created, emptied = (
        encoded(registry, pipeline.topic, ENVELOPE, event) for event in ({"op": "c", "after": FULL}, {"op": "t"})
    )
    bad = struct.pack(">bI", 0, 1 << 30)
    pipeline.send(created, bad, emptied)
    pipeline.catch_up()
    assert missing == [frozenset({1 << 30})]
    assert pipeline.target_rows("SELECT id, _op FROM t ORDER BY _seq") == [(1, "i"), (None, "t")]
    assert [message.value for message in committed(kafka.brokers, dead)] == [bad]


def test_a_schema_that_the_registry_has_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one read of a batch considers a schema missing, so does the other one."""
    there: list[Schema] = []
    asked = 0

    def ask(registry: Registry, what: str, ask: object) -> Schema:
        nonlocal asked
        asked += 1
        if not there:
            raise ConnectionFailed(what, "") from SchemaRegistryError(404, 40403, "not found")
        return there[0]

    def read(texts: AvroTexts) -> list[str | None]:
        value = struct.pack(">bI", 0, 7) + b"\x02a"
        (found,) = texts(iter([pa.RecordBatch.from_pydict({"value": [value, value]})]))
        return list(found.column(TEXT).to_pylist())

    monkeypatch.setattr(Registry, "ask", ask)
    registry = Registry("http://nowhere")
    assert read(AvroTexts(registry)) == [None, None]
    assert asked == 1
    there.append(Schema('"string"', "AVRO"))
    assert read(AvroTexts(registry, missing=frozenset({7}))) == [None, None]
    assert read(AvroTexts(registry)) == ['"a"', '"a"']


def test_debezium_s_envelope_may_be_in_avro(
    databases: Databases, kafka: KafkaServer, registry: str, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(
        tmp_path, databases, kafka, COLUMNS, key=["id"], format="debezium", registry=registry, partitions=1
    )
    other = {**FULL, "id": 2}
    events: list[dict[str, Any]] = [
        {"op": "c", "after": FULL},
        {"op": "c", "after": other},
        {"op": "u", "before": FULL, "after": {**FULL, "amount": Decimal("7.25")}},
        {"op": "d", "before": other},
    ]
    pipeline.send(*(encoded(registry, pipeline.topic, ENVELOPE, event) for event in events), None)
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id, amount FROM t") == [(1, Decimal("7.25"))]
