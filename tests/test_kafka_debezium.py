"""Messages beside those that Debezium has written of the same changes, see :mod:`tests.recorded.debezium`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.demo.kafka import KafkaServer
from tests.conftest import Databases
from tests.kafka_sink import clear, consumed
from tests.recorded.debezium import CHANGES, DECIMALS, TABLE, recorded
from tests.test_kafka_pipeline import KafkaPipeline

PLACE = ("version", "db", "sequence", "txId", "lsn", "ts_ms", "ts_us", "ts_ns")
# Debezium names all values that the one may have; the other is ours.
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
    schema, expected = recorded(pipeline.document["sink"]["decimals"])
    found = consumed(pipeline.cluster, pipeline.topic())
    assert [(message.key or b"").decode() for message in found] == [key for key, _ in expected]

    values = [None if message.value is None else json.loads(message.value) for message in found]
    assert [told(value and value["payload"]) for value in values] == [told(payload) for _, payload in expected]
    assert all(without(value["schema"], *SPECIAL) == without(schema, *SPECIAL) for value in values if value)


def told(payload: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a message tells, but for where and when it was."""
    if payload is None:
        return None
    source = {name: value for name, value in payload["source"].items() if name not in PLACE}
    return {**{name: value for name, value in payload.items() if name not in PLACE}, "source": source}


def without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """A schema without fields of some names, wherever they are."""
    kept = [without(each, *names) for each in schema.get("fields", []) if each["field"] not in names]
    return {**schema, "fields": kept}
