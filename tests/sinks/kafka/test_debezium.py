"""Messages compared with those that Debezium has written of the same changes, see :mod:`tests.recorded.debezium`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest

from airflow_cdc_provider.engine.sinks.kafka.formats.avro import avro_schema
from airflow_cdc_provider.engine.sinks.kafka.formats.debezium import TableCodec
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.recorded.debezium import CHANGES, DECIMALS, TABLE, recorded
from tests.support.kafka_pipeline import KafkaPipeline
from tests.support.kafka_server import clear
from tests.support.kafka_sink import consumed

PLACE = ("version", "db", "sequence", "txId", "lsn", "ts_ms", "ts_us", "ts_ns")
# Debezium's schema lists all values of `snapshot`; `unchanged` is a field of ours.
SPECIAL = ("snapshot", "unchanged")


@pytest.fixture(params=DECIMALS)
def pipeline(
    databases: Databases, tmp_path: Path, kafka: KafkaServer, request: pytest.FixtureRequest
) -> Iterator[KafkaPipeline]:
    sink = {"schemas": True, "decimals": request.param, "partitions": 1, "topic": "shop.{schema}.{table}"}
    made = KafkaPipeline(tmp_path, databases, ["public.t"], kafka.brokers, **sink)
    made.name = "shop"
    made.change(pipeline="shop")
    yield made
    clear(made.cluster)


def test_messages_are_those_of_debezium(pipeline: KafkaPipeline) -> None:
    pipeline.source(*TABLE)
    pipeline.provision()
    pipeline.source(*CHANGES)
    pipeline.apply()
    pipeline.assert_verified()
    schema, _, _, expected = recorded(pipeline.document["sink"]["decimals"])
    found = consumed(pipeline.cluster, pipeline.topic())
    assert [(message.key or b"").decode() for message in found] == [key for key, _ in expected]

    values = [None if message.value is None else json.loads(message.value) for message in found]
    assert [told(value and value["payload"]) for value in values] == [told(payload) for _, payload in expected]
    assert all(without(value["schema"], *SPECIAL) == without(schema, *SPECIAL) for value in values if value)


def test_schemas_in_avro_are_those_of_its_converter(pipeline: KafkaPipeline) -> None:
    """A registry identifies a key's schema by its whole text, and the id is part of the key."""
    pipeline.source(*TABLE)
    pipeline.provision()
    (target,) = pipeline.record.targets
    decimals = pipeline.document["sink"]["decimals"]
    shape, expected = TableCodec(target, decimals), recorded(decimals)
    assert compact(avro_schema(shape.key_schema(pipeline.topic()))) == expected.avro_key
    values = [avro_schema(shape.value_schema(pipeline.topic())), json.loads(expected.avro_value)]
    ours, theirs = (usual(fastavro.parse_schema(value, _write_hint=False)) for value in values)
    assert compact(ours) == compact(theirs)


def test_what_differs_is_documented() -> None:
    """This covers each field that the comparisons above leave out, except those of time and place."""
    page = (Path(__file__).parents[3] / "docs" / "sinks" / "kafka.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"What differs:\n(.*?)\n### ", page, re.DOTALL)
    told = {name for name in (*PLACE, *SPECIAL) if f"`source.{name}`" in part}
    assert told == {*PLACE, *SPECIAL} - {"db", "txId", "ts_ms", "ts_us", "ts_ns"}


def compact(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def usual(schema: Any) -> Any:
    """Return an Avro schema without special fields."""
    if isinstance(schema, list):
        return [usual(each) for each in schema if not isinstance(each, dict) or each.get("name") not in SPECIAL]
    return {name: usual(each) for name, each in schema.items()} if isinstance(schema, dict) else schema


def told(payload: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the contents of a message, except for its time and place."""
    if payload is None:
        return None
    source = {name: value for name, value in payload["source"].items() if name not in PLACE}
    return {**{name: value for name, value in payload.items() if name not in PLACE}, "source": source}


def without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a schema without fields of some names, at any depth."""
    kept = [without(each, *names) for each in schema.get("fields", []) if each["field"] not in names]
    return {**schema, "fields": kept}
