"""Pipelines into Kafka in Avro, with a real registry: the messages as Confluent's own deserializer reads them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka.schema_registry import ConfigCompatibilityLevel, SchemaRegistryClient, ServerConfig
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import CannotFollow
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.kafka_pipeline import KafkaPipeline
from tests.support.kafka_runs import assert_once, finish, kill
from tests.support.kafka_server import clear, committed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Decoded(NamedTuple):
    """A message as another program reads it; a tombstone has no value."""

    partition: int
    key: dict[str, Any] | None
    value: dict[str, Any] | None


class AvroPipeline(KafkaPipeline):
    """A pipeline whose messages are in Avro, and a reader that knows only the registry."""

    def __init__(self, directory: Path, databases: Databases, brokers: str, registry: str, **sink: Any) -> None:
        super().__init__(directory, databases, ["public.t"], brokers, format="avro", registry=registry, **sink)
        self.brokers = brokers
        self.registry = SchemaRegistryClient({"url": registry})

    def decoded(self, as_of: int | None = None) -> list[Decoded]:
        """Return all committed messages.

        :param as_of: version of the values' schema with which to read; by default each message's own version.
        """
        subject = f"{self.topic()}-value"
        schema = None if as_of is None else self.registry.get_version(subject, as_of).schema
        read_key, read_value = AvroDeserializer(self.registry), AvroDeserializer(self.registry, schema)
        key, value = (SerializationContext(self.topic(), field) for field in (MessageField.KEY, MessageField.VALUE))
        return [
            Decoded(message.partition, read_key(message.key, key), read_value(message.value, value))
            for message in committed(self.brokers, self.topic())
        ]

    def values(self, table: str = "public.t", committed: bool = True) -> list[dict[str, Any]]:
        return [message.value for message in self.decoded() if message.value is not None]

    def require(self, level: ConfigCompatibilityLevel) -> None:
        """Let the registry check the compatibility of the values' schemas."""
        self.registry.set_config(f"{self.topic()}-value", ServerConfig(level))


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, kafka: KafkaServer, registry: str) -> Iterator[AvroPipeline]:
    made = AvroPipeline(tmp_path, databases, kafka.brokers, registry)
    yield made
    for process in multiprocessing.active_children():
        process.kill()
    clear(made.cluster)


def test_a_foreign_reader_gets_each_change_of_a_row(pipeline: AvroPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    pipeline.source("INSERT INTO public.t SELECT n, 'a' FROM generate_series(1, 40) n")
    assert all(finding.ok for finding in preflight(pipeline.pipeline))
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        "INSERT INTO public.t VALUES (41, 'new')",
        "UPDATE public.t SET body = NULL WHERE id = 41",
        "UPDATE public.t SET id = 42 WHERE id = 41",
        "DELETE FROM public.t WHERE id > 38 AND id < 41",
        "INSERT INTO public.t VALUES (39, 'back')",
    )
    pipeline.apply()

    found = pipeline.decoded()
    told: dict[int, list[Any]] = {}
    for _, key, value in found:
        assert key is not None
        told.setdefault(key["id"], []).append(value and (value["op"], value["before"], value["after"]))
    row = [{"id": n, "body": "a"} for n in range(41)]
    new, bare, moved = ({"id": 41, "body": "new"}, {"id": 41, "body": None}, {"id": 42, "body": None})
    assert told == {
        **{n: [("r", None, row[n])] for n in range(1, 39)},
        39: [("r", None, row[39]), ("d", row[39], None), None, ("c", None, {"id": 39, "body": "back"})],
        40: [("r", None, row[40]), ("d", row[40], None), None],
        41: [("c", None, new), ("u", new, bare), ("d", bare, None), None],
        42: [("c", None, moved)],
    }
    places = {(message.key["id"], message.partition) for message in found if message.key}
    assert len(places) == len(told)
    assert {partition for _, partition in places} == {0, 1, 2}
    last = {message.key["id"]: message.value and message.value["after"] for message in found if message.key}
    alive = [(row["id"], row["body"]) for row in last.values() if row is not None]
    assert sorted(alive) == pipeline.source_rows("SELECT id, body FROM public.t ORDER BY id")

    pipeline.assert_verified()
    pipeline.source("UPDATE public.t SET body = 'unseen' WHERE id = 1", "DELETE FROM public.t WHERE id = 2")
    (differing,) = commands.verify(pipeline.pipeline)["tables"]
    assert {(d["key"]["id"], d["kind"]) for d in differing["differences"]} == {("1", "different"), ("2", "extra")}


def test_an_envelope_says_where_it_comes_from(pipeline: AvroPipeline) -> None:
    pipeline.change(sink={"database": "shop"})
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, big text, n int)")
    pipeline.source("INSERT INTO public.t SELECT 1, string_agg(md5(n::text), ''), 0 FROM generate_series(1, 500) n")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("CREATE TABLE public.seen AS SELECT 1 AS xid, now() AS at", "DELETE FROM public.seen")
    pipeline.source(
        "WITH changed AS (UPDATE public.t SET n = 1 RETURNING id)"
        " INSERT INTO public.seen SELECT pg_current_xact_id()::text::int, now() FROM changed"
    )
    pipeline.apply()
    read, update = pipeline.values()
    assert (read["op"], read["source"]["snapshot"], read["source"]["unchanged"]) == ("r", "true", None)
    source = update["source"]
    assert {name: source[name] for name in ("connector", "name", "db", "schema", "table", "snapshot", "unchanged")} == {
        "connector": "postgresql",
        "name": pipeline.name,
        "db": "shop",
        "schema": "public",
        "table": "t",
        "snapshot": "false",
        "unchanged": ["big"],
    }
    ((xid, begun),) = pipeline.source_rows("SELECT xid, extract(epoch FROM at) * 1000000 FROM public.seen")
    assert source["txId"] == xid
    assert begun <= source["ts_us"] <= update["ts_us"]
    assert [source["lsn"], read["source"]["lsn"] < source["lsn"]] == [int(json.loads(source["sequence"])[0]), True]
    assert update["after"] == {"id": 1, "big": "__debezium_unavailable_value", "n": 1}
    pipeline.assert_verified()


TYPES = """
CREATE TABLE public.t (id bigint, at timestamptz, "odd Näme" text, flag boolean, small smallint, price numeric(12, 3),
    n numeric, m numeric, f double precision, day date, local timestamp, milli timestamp(3), clock time, bytes bytea,
    doc jsonb, tags text[], span interval, u uuid, PRIMARY KEY (id, at, "odd Näme"))
"""
VALUES = """
INSERT INTO public.t VALUES ({}, '2024-03-31 01:30:00.123456+02', E'tab\\t"q"', true, -3, -1.28,
    12345678901234567890.5, -1, 'Infinity', '2024-02-29', '2024-01-01 00:00:00.25', '2024-01-01 00:00:00.25', '24:00',
    '\\x00ff', '{{"a": [1, null]}}', ARRAY['a b', NULL], '1 mon -2 days', '00000000-0000-0000-0000-000000000001')
"""
DECODED = {
    "at": "2024-03-30T23:30:00.123456Z",
    "odd_N_me": 'tab\t"q"',
    "flag": True,
    "small": -3,
    "price": Decimal("-1.280"),
    "n": {"scale": 1, "value": (123456789012345678905).to_bytes(9, signed=True)},
    "m": {"scale": 0, "value": b"\xff"},
    "f": float("inf"),
    "day": 19782,
    "local": 1_704_067_200_250_000,
    "milli": 1_704_067_200_250,
    "clock": 86_400_000_000,
    "bytes": b"\x00\xff",
    "doc": '{"a": [1, null]}',
    "tags": '{"a b",NULL}',
    "span": "1 mon -2 days",
    "u": "00000000-0000-0000-0000-000000000001",
}
TEXTS = {"price": "-1.280", "n": "12345678901234567890.5", "m": "-1"}


@pytest.mark.parametrize(("decimals", "differing"), [("precise", {}), ("string", TEXTS)], ids=["precise", "string"])
def test_values_of_all_kinds_are_what_postgres_has(
    pipeline: AvroPipeline, decimals: str, differing: dict[str, Any]
) -> None:
    pipeline.change(sink={"decimals": decimals})
    pipeline.source(TYPES, VALUES.format(1))
    pipeline.provision()
    pipeline.copy()
    nulls = "INSERT INTO public.t (id, at, \"odd Näme\") VALUES (3, '2024-01-01 00:00+00', '')"
    pipeline.source(VALUES.format(2), nulls, "DELETE FROM public.t WHERE id = 2")
    pipeline.apply()
    row = {**DECODED, **differing}
    key = {name: row[name] for name in ("at", "odd_N_me")}
    bare = {"id": 3, "at": "2024-01-01T00:00:00.000000Z", "odd_N_me": ""}
    told = sorted(pipeline.decoded(), key=lambda message: message.key["id"] if message.key else 0)
    assert [(m.key, m.value and (m.value["op"], m.value["before"], m.value["after"])) for m in told] == [
        ({"id": 1, **key}, ("r", None, {"id": 1, **row})),
        ({"id": 2, **key}, ("c", None, {"id": 2, **row})),
        ({"id": 2, **key}, ("d", {"id": 2, **dict.fromkeys(row), **key}, None)),
        ({"id": 2, **key}, None),
        (bare, ("c", None, {**dict.fromkeys(row), **bare})),
    ]
    pipeline.assert_verified()


def test_a_column_that_is_added_makes_a_second_version(pipeline: AvroPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO public.t VALUES (1, 'x')")
    pipeline.provision()
    pipeline.copy()
    pipeline.require(ConfigCompatibilityLevel.FULL_TRANSITIVE)
    pipeline.source("ALTER TABLE public.t ADD COLUMN b numeric", "INSERT INTO public.t VALUES (2, 'y', 1.5)")
    pipeline.apply()
    assert pipeline.registry.get_versions(f"{pipeline.topic()}-value") == [1, 2]
    assert pipeline.registry.get_versions(f"{pipeline.topic()}-key") == [1]

    def rows(as_of: int | None) -> list[dict[str, Any]]:
        found = [message.value["after"] for message in pipeline.decoded(as_of) if message.value]
        return sorted(found, key=lambda row: int(row["id"]))

    older, newer = {"id": 1, "a": "x"}, {"id": 2, "a": "y", "b": "1.5"}
    assert rows(None) == [older, newer]
    assert rows(1) == [older, {"id": 2, "a": "y"}]
    assert rows(2) == [{**older, "b": None}, newer]
    pipeline.assert_verified()


def test_a_change_that_the_registry_refuses_waits_until_it_is_let_in(pipeline: AvroPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO public.t VALUES (1, '7')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.require(ConfigCompatibilityLevel.BACKWARD)
    pipeline.source(
        "INSERT INTO public.t VALUES (2, '8')",
        "ALTER TABLE public.t ALTER COLUMN a TYPE int USING a::int",
        "INSERT INTO public.t VALUES (3, 9)",
    )
    before = pipeline.decoded()
    for _ in range(2):
        with pytest.raises(CannotFollow, match=f"{pipeline.topic()}-value") as told:
            pipeline.apply()
        assert "compatibility" in told.value.solution
    # Changes before the incompatible one are in the topic; that change and later ones are not.
    assert [m.value["after"] for m in pipeline.decoded() if m not in before and m.value] == [{"id": 2, "a": "8"}]
    assert pipeline.registry.get_versions(f"{pipeline.topic()}-value") == [1]

    pipeline.require(ConfigCompatibilityLevel.NONE)
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.registry.get_versions(f"{pipeline.topic()}-value") == [1, 2]
    last = {m.key["id"]: m.value["after"]["a"] for m in pipeline.decoded() if m.key and m.value}
    assert last == {1: 7, 2: 8, 3: 9}


@pytest.mark.thorough
def test_runs_that_die_leave_nothing_out_and_nothing_twice(pipeline: AvroPipeline) -> None:
    pipeline.change(snapshot={"chunk_rows": 150})
    pipeline.source(AUDITED)
    with writing(pipeline.databases.source, LONG_PAUSE):
        for place in (
            *("after-chunk-staged:1", "before-chunk-commit:1", "after-chunk-commit:1"),
            *("after-batch-staged:1", "in-batch-commit:1", "before-transaction-end:3", "after-batch-commit:1"),
        ):
            kill(pipeline, place)
        finish(pipeline)
    assert_once(pipeline)
