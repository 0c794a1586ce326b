"""Pipelines into Kafka, from a real source to a real broker: what consumers of committed messages get, and verify."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, UnknownTable
from airflow_cdc_provider.engine.sources.postgres.reading import reread_requests
from airflow_cdc_provider.engine.state import requests
from airflow_cdc_provider.engine.state.files import State
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.audited import AUDITED, writing
from tests.support.kafka_pipeline import KafkaPipeline, assert_consumed_once
from tests.support.kafka_server import clear
from tests.support.kafka_sink import consumed, send

pytestmark = pytest.mark.slow


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, kafka: KafkaServer) -> Iterator[KafkaPipeline]:
    made = KafkaPipeline(tmp_path, databases, ["public.t"], kafka.brokers)
    yield made
    clear(made.cluster)


def test_each_change_is_consumed_once_beside_the_snapshot(pipeline: KafkaPipeline) -> None:
    pipeline.source(AUDITED)
    with writing(pipeline.databases.source) as writers:
        pipeline.provision()
        pipeline.copy()
        pipeline.apply()
        assert sum(writer.transactions for writer in writers) > 0
    pipeline.apply()
    assert_consumed_once(pipeline)
    pipeline.assert_verified()
    (table,) = commands.verify(pipeline.pipeline)["tables"]
    messages = consumed(pipeline.cluster, pipeline.topic())
    assert [(each["partition"], each["messages"], each["keys"]) for each in table["ranges"]] == [
        (p, len(keys), sum(map(zlib.crc32, keys)))
        for p in range(3)
        for keys in [[message.key or b"" for message in messages if message.partition == p]]
    ]


def test_the_messages_of_a_key_stand_in_one_partition_in_their_order(pipeline: KafkaPipeline) -> None:
    """The last message of each key is its row, as in a compacted topic; a deleted row has a tombstone."""
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)")
    pipeline.source("INSERT INTO public.t SELECT n, 'a' FROM generate_series(1, 40) n")
    pipeline.provision()
    pipeline.copy()
    for statement in (
        "UPDATE public.t SET body = 'b' WHERE id < 20",
        "UPDATE public.t SET id = id + 100 WHERE id < 10",
        "DELETE FROM public.t WHERE id > 30 AND id < 100",
        "INSERT INTO public.t VALUES (35, 'back')",
    ):
        pipeline.source(statement)
        pipeline.apply()
    places: dict[bytes, set[int]] = {}
    last: dict[int, Any] = {}
    for message in consumed(pipeline.cluster, pipeline.topic()):
        assert message.key is not None
        places.setdefault(message.key, set()).add(message.partition)
        after = json.loads(message.value)["after"] if message.value else None
        last[json.loads(message.key)["id"]] = after and after["body"]
    assert {len(found) for found in places.values()} == {1}
    assert len({place for found in places.values() for place in found}) == 3
    alive = {key: body for key, body in last.items() if body is not None}
    assert alive == dict(pipeline.source_rows("SELECT id, body FROM public.t"))
    assert set(last) - set(alive) == {*range(1, 10), *range(31, 41)} - {35}


TYPES = """
CREATE TABLE public.t (id bigint PRIMARY KEY, flag boolean, small smallint, n numeric, d numeric(12, 3),
    r real, f double precision, day date, at timestamptz, local timestamp, milli timestamp(3), clock time, bytes bytea,
    doc jsonb, tags text[], span interval, u uuid, txt varchar(20), mood public.mood, "odd Näme" text)
"""


VALUES = """
INSERT INTO public.t SELECT {0}, true, -3, 12345678901234567890.5, -0.001, 0.1, 1e300, '2024-02-29',
    '2024-03-31 01:30:00.123456+02', '0044-03-15 12:00:00 BC', '2024-01-01 00:00:00.25', '24:00', '\\x00ff',
    '{{"a": [1, null]}}', ARRAY['a b', NULL, '"'], '1 mon -2 days', '00000000-0000-0000-0000-000000000001',
    E'tab\\t"q" \\\\', 'glad', E'\\u2028'
"""


@pytest.mark.parametrize(
    "sink", [{"format": "json"}, {"schemas": True}, {"decimals": "precise", "tombstones": False}], ids=str
)
def test_values_of_all_kinds_come_back_as_they_were(
    databases: Databases, tmp_path: Path, kafka: KafkaServer, sink: dict[str, Any]
) -> None:
    pipeline = KafkaPipeline(tmp_path, databases, ["public.t"], kafka.brokers, **sink)
    pipeline.source("CREATE TYPE public.mood AS ENUM ('sad', 'glad')", TYPES)
    pipeline.source("ALTER TABLE public.t REPLICA IDENTITY FULL", VALUES.format(1))
    pipeline.provision()
    pipeline.copy()
    pipeline.source(VALUES.format(2), "INSERT INTO public.t (id) VALUES (3)", "UPDATE public.t SET small = 4")
    pipeline.source(
        "UPDATE public.t SET r = 'NaN', f = '-Infinity', day = 'infinity', local = '-infinity' WHERE id = 1"
    )
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("UPDATE public.t SET txt = 'unseen' WHERE id = 1", "DELETE FROM public.t WHERE id = 2")
    (found,) = commands.verify(pipeline.pipeline)["tables"]
    assert {(d["key"]["id"], d["kind"]) for d in found["differences"]} == {("1", "different"), ("2", "extra")}


def test_values_that_were_not_sent_are_told_from_null(pipeline: KafkaPipeline) -> None:
    big = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 500) n)"
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, note text, big text)")
    pipeline.source(f"INSERT INTO public.t VALUES (1, 'a', {big}), (2, 'b', {big})")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET note = NULL", "UPDATE public.t SET id = 3 WHERE id = 2")
    pipeline.apply()
    pipeline.assert_verified()
    told = [value for value in pipeline.values() if value["op"] in "uc"]
    assert [value["after"]["note"] for value in told] == [None] * 3
    assert {value["after"]["big"] for value in told} == {"__debezium_unavailable_value"}


def test_changes_of_schema_are_followed(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    steps = [
        ("ALTER TABLE public.t ADD COLUMN b int", "UPDATE public.t SET b = 1 WHERE id = 1"),
        ("ALTER TABLE public.t ADD COLUMN c int DEFAULT 7", "UPDATE public.t SET b = 2 WHERE id = 1"),
        ("ALTER TABLE public.t RENAME COLUMN b TO d", "UPDATE public.t SET d = 3 WHERE id = 1"),
        ("ALTER TABLE public.t ALTER COLUMN d TYPE bigint", "UPDATE public.t SET d = 5000000000 WHERE id = 1"),
        ("ALTER TABLE public.t DROP COLUMN c", "DELETE FROM public.t WHERE id = 2"),
        ("TRUNCATE public.t", "INSERT INTO public.t VALUES (9, 'z', 9)"),
    ]
    for ddl, change in steps:
        pipeline.source(ddl, change)
        pipeline.apply()
        pipeline.assert_verified()


def test_a_truncate_is_told_to_consumers_of_every_partition(pipeline: KafkaPipeline) -> None:
    pipeline.change(sink={"truncates": True})
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 30)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("TRUNCATE public.t", "INSERT INTO public.t VALUES (5)")
    pipeline.apply()
    found = consumed(pipeline.cluster, pipeline.topic())
    truncates = [m.partition for m in found if json.loads(m.value or b"")["op"] == "t"]
    assert truncates == [0, 1, 2]
    pipeline.assert_verified()


def test_a_truncate_is_not_told_by_default_and_known_all_the_same(pipeline: KafkaPipeline) -> None:
    """This is Debezium's behavior, because its consumers stop at such a message."""
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 30)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO public.t VALUES (31)", "TRUNCATE public.t", "INSERT INTO public.t VALUES (5)")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("TRUNCATE public.t")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("INSERT INTO public.t VALUES (5)")
    pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.apply()
    pipeline.assert_verified()
    assert {event["op"] for event in pipeline.values()} == {"r", "c"}


def test_a_table_without_a_key_keeps_its_order_in_one_partition(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int, body text)", "ALTER TABLE public.t REPLICA IDENTITY FULL")
    pipeline.source("INSERT INTO public.t VALUES (1, 'a'), (1, 'a')")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("DELETE FROM public.t WHERE ctid = (SELECT min(ctid) FROM public.t)")
    pipeline.apply()
    found = consumed(pipeline.cluster, pipeline.topic())
    assert [(m.key, m.partition, json.loads(m.value or b"")["op"]) for m in found] == [
        (None, 0, "r"),
        (None, 0, "r"),
        (None, 0, "d"),
    ]


def test_tables_are_read_again_while_the_pipeline_goes_on(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source("UPDATE public.t SET a = 'later' WHERE id = 2")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.cluster.remove(pipeline.topic())
    with pytest.raises(UnknownTable, match=r"public\.t"):
        commands.verify(pipeline.pipeline)
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.apply()
    pipeline.assert_verified()


def test_a_request_to_read_again_that_exceeds_a_limit_is_given_up(pipeline: KafkaPipeline) -> None:
    """Otherwise the stream would meet it again at each start."""
    noise = Random(1).randbytes(100_000).hex()
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", f"INSERT INTO t VALUES (1, '{noise}')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.change(sink={"properties": {"message.max.bytes": "100000"}})
    request = reread_requests.request(pipeline.pipeline, ["public.t"], None)
    pipeline.source("INSERT INTO public.t VALUES (2, 'b')")
    pipeline.apply()
    told = requests.outcome(State(pipeline.pipeline.state), request)
    assert told is not None
    assert "message.max.bytes" in json.dumps(told["error"])
    pipeline.assert_verified()


def test_the_repair_of_everything_begins_anew(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source(f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    pipeline.source("DELETE FROM public.t WHERE id = 1")
    commands.resnapshot(pipeline.pipeline, everything=True)
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_verified()


def test_a_preflight_finds_nothing_and_makes_no_topic(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)")
    before = pipeline.cluster.topics()
    findings = preflight(pipeline.pipeline)
    assert all(finding.ok for finding in findings), findings
    checks = {"sink", "commit record", "transaction timeout", "transactions", "topic names", "cleanup policy", "topics"}
    assert checks <= {finding.check for finding in findings}
    made = set(pipeline.cluster.topics()) - set(before)
    assert made <= {"__transaction_state"}


@pytest.mark.parametrize(
    ("sink", "check", "said"),
    [
        ({"transaction_timeout": "1 hour"}, "transaction timeout", "3600000 ms"),
        ({"topic": "x" * 250 + "{table}"}, "topic names", "characters"),
        ({"brokers": "127.0.0.1:1"}, "sink", "127.0.0.1:1"),
        ({"format": "avro", "registry": "http://127.0.0.1:1"}, "schema registry", "127.0.0.1:1"),
    ],
    ids=["timeout", "name", "brokers", "registry"],
)
def test_a_preflight_finds_what_stands_in_the_way(
    pipeline: KafkaPipeline, sink: dict[str, Any], check: str, said: str
) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)")
    pipeline.change(sink=sink)
    (found,) = [finding for finding in preflight(pipeline.pipeline) if not finding.ok]
    assert (found.check, said in found.message) == (check, True)


def test_a_preflight_finds_topics_of_others_and_policies_that_take_no_truncate(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)")
    pipeline.cluster.create([pipeline.topic()], 1, -1, {})
    send(pipeline.cluster, pipeline.topic(), "theirs", "{}")
    pipeline.change(sink={"topic_config": {"cleanup.policy": "compact"}, "truncates": True})
    findings = {finding.check: finding for finding in preflight(pipeline.pipeline)}
    assert not findings["topics"].ok
    assert findings["cleanup policy"].ok
    assert not findings["cleanup policy"].warning  # the existing topic is not compacted
    pipeline.cluster.remove(pipeline.topic())
    findings = {finding.check: finding for finding in preflight(pipeline.pipeline)}
    assert findings["topics"].ok
    assert findings["cleanup policy"].warning


def test_a_preflight_finds_what_would_forget_the_record_and_a_compacted_topic_without_keys(
    pipeline: KafkaPipeline,
) -> None:
    pipeline.source("CREATE TABLE public.t (id int)", "ALTER TABLE public.t REPLICA IDENTITY FULL")
    pipeline.cluster.create([pipeline.topic()], 1, -1, {"cleanup.policy": "compact"})
    pipeline.cluster.create([f"airflow_cdc.{pipeline.name}"], 1, -1, {})
    findings = {finding.check: finding for finding in preflight(pipeline.pipeline)}
    assert [name for name, finding in findings.items() if not finding.ok] == ["commit record", "cleanup policy"]
    assert pipeline.topic() in findings["cleanup policy"].message


def test_topics_of_another_are_written_on_to_if_the_file_says_so(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.cluster.create([pipeline.topic()], 2, -1, {})
    theirs = {"before": None, "after": {"id": 9, "a": "theirs"}, "source": {"lsn": 1}, "op": "c"}
    send(pipeline.cluster, pipeline.topic(), '{"id":9}', json.dumps(theirs))
    with pytest.raises(ForeignTable, match=r"sink\.adopt|did not write"):
        pipeline.provision()
    pipeline.change(sink={"adopt": True})
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET a = 'z' WHERE id = 1")
    pipeline.apply()
    assert sorted(value["after"]["id"] for value in pipeline.values()) == [1, 1, 2, 9]
    pipeline.assert_verified()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.assert_verified()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "mirror"}, "changelog"),
        ({"format": "csv"}, "debezium"),
        ({"topic": "{tabel}"}, "{table}"),
        ({"brokers": "user:secret@host:9092"}, "properties"),
        ({"conn_id": "kafka"}, "conn_id"),
        ({"registry": "http://r"}, "Remove"),
    ],
)
def test_settings_that_cannot_be_are_refused(pipeline: KafkaPipeline, change: dict[str, Any], said: str) -> None:
    pipeline.change(sink=change)
    with pytest.raises(ConfigError) as told:
        pipeline.pipeline
    assert said in told.value.solution
    assert "secret" not in told.value.message


def test_dropping_the_pipeline_leaves_the_messages(pipeline: KafkaPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x')")
    pipeline.provision()
    pipeline.copy()
    commands.drop(pipeline.pipeline)
    assert [value["after"] for value in pipeline.values()] == [{"id": 1, "a": "x"}]
    assert [name for name in pipeline.cluster.topics() if name.startswith("airflow_cdc.")] == []
