"""Pipelines over Kafka topics: rows and windows reach real databases once each, whatever fails in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import (
    BadRecord,
    CdcError,
    ConfigError,
    GateClosed,
    LimitExceeded,
    StreamFailed,
)
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.sources.kafka import stream_job
from airflow_cdc_provider.engine.sources.kafka.spark_failures import spark_failure
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import SECONDS, committed, create_topic, properties, set_topic, transactional
from tests.support.topic_queries import ORDERS
from tests.support.topics import TopicsPipeline

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]


@pytest.fixture
def orders(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsPipeline:
    return TopicsPipeline(tmp_path, databases, kafka, ORDERS, key=["id"])


def test_a_mirror_has_the_last_message_of_each_key(orders: TopicsPipeline) -> None:
    orders.send(*({"id": n % 7, "amount": f"{n}.50", "note": f"ü{n}"} for n in range(50)))
    told = orders.catch_up()
    assert told["stream"]["caught_up"]
    assert told["stream"]["changes"] == 50
    assert orders.target_rows("SELECT id, amount::text, note FROM t ORDER BY id") == [
        (n % 7, f"{n}.50", f"ü{n}") for n in sorted(range(43, 50), key=lambda n: n % 7)
    ]
    assert sum(orders.offsets().values()) == 50
    orders.send({"id": 3, "amount": None, "note": None}, {"id": 9, "amount": 1})
    orders.catch_up()
    assert orders.target_rows("SELECT id, amount FROM t WHERE id IN (3, 9) ORDER BY 1") == [(3, None), (9, 1)]


def test_views_over_the_target_move_with_it(orders: TopicsPipeline) -> None:
    label = "public.t"
    orders.change(
        sink={"views": {"dwd.notes": {"sql": f"SELECT t.note, sum(t.amount) AS total FROM {label} t GROUP BY t.note"}}}
    )
    orders.send(*({"id": n, "amount": n, "note": "odd" if n % 2 else "even"} for n in range(6)))
    orders.catch_up()
    totals = "SELECT note, total::int FROM dwd.notes ORDER BY 1"
    assert orders.target_rows(totals) == [("even", 6), ("odd", 9)]
    orders.send({"id": 5, "amount": 50, "note": "even"}, {"id": 6, "amount": 1, "note": "new"})
    orders.catch_up()
    assert orders.target_rows(totals) == [("even", 56), ("new", 1), ("odd", 4)]
    assert commands.verify(orders.pipeline)["equal"]


def test_only_what_is_committed_is_read_from_where_the_pipeline_begins(orders: TopicsPipeline) -> None:
    orders.send({"id": 0})
    orders.change(source={"starting": "latest"})
    commands.provision(orders.pipeline)
    producer = transactional(orders.broker.brokers, orders.topic)
    for end, number in ((producer.abort_transaction, 1), (producer.commit_transaction, 2)):
        producer.begin_transaction()
        producer.produce(orders.topic, json.dumps({"id": number}).encode())
        end()
    orders.catch_up()
    assert orders.target_rows("SELECT id FROM t") == [(2,)]
    assert orders.catch_up()["stream"]["caught_up"]


def test_an_open_transaction_is_named_and_what_stands_behind_it_counts(
    orders: TopicsPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_job, "_OPEN_SECONDS", 0.1)
    orders.send({"id": 0})
    producer = transactional(orders.broker.brokers, orders.topic)
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(orders.topic, json.dumps({"id": 1}).encode(), partition=partition)
    assert producer.flush(SECONDS) == 0
    orders.send(*({"id": n} for n in range(2, 12)))
    assert not orders.catch_up()["stream"]["caught_up"]
    assert orders.target_rows("SELECT id FROM t") == [(0,)]
    status = commands.status(orders.pipeline)
    assert (status["lag_messages"], status["held_messages"]) == (12, 12)
    assert "12 of them behind an open transaction" in orders.run_here("status").stdout
    producer.commit_transaction()
    assert orders.catch_up()["stream"]["caught_up"]
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(n,) for n in range(12)]


def test_a_changelog_has_every_row_once(orders: TopicsPipeline) -> None:
    orders.change(
        sink={"mode": "changelog"},
        source={"sql": "SELECT id, amount * 2 AS doubled FROM messages WHERE id > 1", "max_batch_messages": 2},
    )
    orders.send(*({"id": n, "amount": n} for n in range(5)))
    orders.catch_up()
    assert orders.record.applied >= 3
    orders.send({"id": 5, "amount": 5})
    orders.catch_up()
    found = orders.target_rows("SELECT id, doubled::int, _op, _commit_lsn::text FROM t ORDER BY 1")
    assert [row[:3] for row in found] == [(n, 2 * n, "i") for n in range(2, 6)]
    assert found[0][3] < found[-1][3]


def test_a_sink_that_fails_in_the_middle_of_a_batch_moves_no_offsets(orders: TopicsPipeline) -> None:
    orders.send(*({"id": n, "amount": n} for n in range(10)))
    orders.catch_up()
    before = orders.offsets()
    orders.target("ALTER TABLE public.t ADD CONSTRAINT small CHECK (amount < 15)")
    orders.send(*({"id": n, "amount": n} for n in range(10, 20)))
    with pytest.raises(CdcError, match=rf"message \d of {orders.topic}.*small"):
        orders.catch_up()
    assert orders.target_rows("SELECT count(*) FROM t") == [(10,)]
    assert orders.offsets() == before
    orders.target("ALTER TABLE public.t DROP CONSTRAINT small")
    orders.catch_up()
    assert orders.target_rows("SELECT id, amount::int FROM t ORDER BY 1") == [(n, n) for n in range(20)]


def test_a_query_without_state_cannot_be_made_one_that_keeps_some(orders: TopicsPipeline) -> None:
    orders.send({"id": 1})
    orders.catch_up()
    last = "SELECT id, max(amount) AS amount, max(note) AS note FROM messages GROUP BY id"
    orders.change(source={"sql": last})
    with pytest.raises(ConfigError, match="keeps state, but"):
        orders.catch_up()


@pytest.mark.thorough
def test_a_join_keeps_the_order_of_messages_or_is_refused_and_names_have_dots(orders: TopicsPipeline) -> None:
    """Spark chooses the kind of join with each batch, so only the batch shows whether rows were shuffled."""
    join = "SELECT /*+ {} */ id, amount AS `a.b`, name FROM messages JOIN (VALUES (1, 'one'), (2, 'two')) AS n(k, name)"
    orders.change(source={"sql": join.format("MERGE(n)") + " ON id = k"})
    orders.send(*({"id": n % 3, "amount": n} for n in range(60)))
    with pytest.raises(ConfigError, match="shuffle"):
        orders.catch_up()
    assert orders.target_rows("SELECT * FROM t") == []
    orders.change(source={"sql": join.format("BROADCAST(n)") + " ON id = k"})
    orders.catch_up()
    assert orders.target_rows('SELECT id, "a.b"::int, name FROM t ORDER BY 1') == [(1, 58, "one"), (2, 59, "two")]
    assert commands.verify(orders.pipeline)["equal"]


def test_a_bad_record_stops_the_pipeline_before_its_batch(orders: TopicsPipeline) -> None:
    orders.send({"id": 1}, {"id": 2}, b"nonsense")
    with pytest.raises(BadRecord, match=rf"message \d of {orders.topic}\[\d\]"):
        orders.catch_up()
    assert orders.target_rows("SELECT * FROM t") == []


def test_bad_records_go_to_a_topic_of_their_own(orders: TopicsPipeline) -> None:
    dead = f"{orders.topic}-dead"
    create_topic(orders.broker.brokers, dead)
    orders.change(source={"bad_records": {"dead_letter": dead}})
    bad = [b"nonsense", b'{"id": "text"}', b'{"amount": 1}', b"[]", None]
    orders.send({"id": 1}, *bad, {"id": 2})
    orders.change(source={"sql": "SELECT /*+ MERGE(n) */ id FROM messages LEFT JOIN (VALUES (1)) AS n(k) ON id = k"})
    for _ in range(2):
        with pytest.raises(ConfigError):
            orders.catch_up()
    assert committed(orders.broker.brokers, dead) == []
    orders.change(source={"sql": "SELECT id FROM messages"})
    orders.catch_up()
    orders.catch_up()
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    assert sorted(message.value or b"" for message in committed(orders.broker.brokers, dead)) == sorted(
        each or b"" for each in bad
    )


@pytest.mark.thorough
def test_a_bad_record_may_be_as_large_as_the_topic_for_it_takes(orders: TopicsPipeline) -> None:
    large, dead = f"{orders.topic}-large", f"{orders.topic}-dead"
    create_topic(orders.broker.brokers, large, settings={"max.message.bytes": "5000000"})
    create_topic(orders.broker.brokers, dead)
    orders.change(source={"topics": [orders.topic, large], "bad_records": {"dead_letter": dead}})
    producer = Producer(properties(orders.broker.brokers, message_max_bytes=5_000_000))
    producer.produce(large, b"{bad" + 1_500_000 * b"x")
    assert producer.flush(SECONDS) == 0
    orders.send({"id": 1})
    with pytest.raises(LimitExceeded, match="RecordTooLargeException") as told:
        orders.catch_up()
    assert "max.message.bytes" in told.value.solution
    assert orders.target_rows("SELECT id FROM t") == []
    set_topic(orders.broker.brokers, dead, {"max.message.bytes": "5000000"})
    orders.catch_up()
    assert orders.target_rows("SELECT id FROM t") == [(1,)]
    assert [len(message.value or b"") for message in committed(orders.broker.brokers, dead)] == [1_500_004]


@pytest.mark.thorough
def test_a_pattern_reads_whole_names_and_topics_that_come_later(orders: TopicsPipeline) -> None:
    later, longer = f"{orders.topic}x", f"{orders.topic}-longer"
    create_topic(orders.broker.brokers, longer)
    del orders.document["source"]["topics"]
    orders.change(source={"pattern": f"{orders.topic}x?"})
    orders.send({"id": 1})
    orders.send({"id": 100}, topic=longer)
    orders.catch_up()
    create_topic(orders.broker.brokers, later)
    orders.send({"id": 2}, {"id": 3}, topic=later)
    orders.catch_up()
    orders.send({"id": 4}, topic=later)
    orders.catch_up()
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,), (4,)]
    assert orders.record.identity["topics"].keys() == {orders.topic, later}
    orders.change(source={"pattern": later})
    with pytest.raises(ConfigError, match=f"leaves out {orders.topic}, "):
        orders.catch_up()


@pytest.mark.thorough
def test_changes_in_debezium_s_format_make_the_same_table(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, ORDERS, partitions=1, key=["id"], format="debezium")
    one, two = ({"id": n, "amount": "1.50", "note": "x"} for n in (1, 2))
    pipeline.send(
        {"op": "r", "before": None, "after": one},
        {"payload": {"op": "c", "before": None, "after": two}},
        {"op": "u", "before": one, "after": {**one, "note": "y"}},
        {"op": "d", "before": two, "after": None},
        None,
    )
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id, amount::text, note FROM t") == [(1, "1.50", "y")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"columns": "id NONSENSE"}, "source.columns"),
        ({"sql": "SELECT nothing FROM messages"}, "nothing"),
        ({"sql": "SELECT struct(id) AS s, id FROM messages"}, "STRUCT|struct"),
        ({"key": ["other"]}, "other"),
        ({"topics": ["not-there"]}, "not-there"),
        ({"bad_records": {"dead_letter": "not-there"}}, "not-there"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(
    orders: TopicsPipeline, change: dict[str, Any], said: str
) -> None:
    orders.change(source=change)
    with pytest.raises(ConfigError, match=said):
        commands.provision(orders.pipeline)
    assert orders.target_rows("SELECT to_regclass('public.t')") == [(None,)]


def test_preflight_looks_at_the_query_and_at_what_the_sinks_make_of_it(orders: TopicsPipeline) -> None:
    told = orders.run_here("preflight", "--json").json["findings"]
    assert "3 columns, and keeps no state" in next(each["message"] for each in told if each["check"] == "query")
    assert len({(each["check"], each["message"]) for each in told}) == len(told)
    orders.change(sink={"mode": "changelog"}, source={"sql": "SELECT id, note AS _seq FROM messages"})
    outcome = orders.run_here("preflight", code=2)
    assert "_seq" in outcome.stdout
    assert "AS" in outcome.stderr
    with pytest.raises(ConfigError, match="_seq"):
        commands.provision(orders.pipeline)


def test_messages_that_retention_has_removed_and_a_topic_that_was_made_anew_are_refused(orders: TopicsPipeline) -> None:
    orders.send({"id": 1})
    orders.catch_up()
    cluster = Cluster(orders.broker.brokers)
    orders.send(*({"id": n} for n in range(20)))
    cluster.truncate(orders.topic, cluster.ends(orders.topic, [0, 1]))
    with pytest.raises(GateClosed, match="begins at offset"):
        orders.catch_up()
    client = AdminClient({"bootstrap.servers": orders.broker.brokers})
    client.delete_topics([orders.topic])[orders.topic].result(SECONDS)
    with pytest.raises(ConfigError, match="no topic"):
        orders.catch_up()
    create_topic(orders.broker.brokers, orders.topic, 2)
    with pytest.raises(GateClosed, match="has been recreated"):
        orders.catch_up()


def test_what_cannot_be_read_any_more_is_told_with_what_can_be_done() -> None:
    late = spark_failure(
        "[KAFKA_DATA_LOSS.ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO] Added partition t-1 starts from 5"
    )
    assert isinstance(late, GateClosed)
    assert "remove the pipeline's checkpoint" in late.solution
    lost = spark_failure("[KAFKA_DATA_LOSS.SOME_PARTITIONS_MAY_HAVE_BEEN_DELETED] t-1")
    assert isinstance(lost, GateClosed)
    assert "Start again" in lost.solution
    assert isinstance(spark_failure("whatever"), StreamFailed)


def test_the_commands_know_it(orders: TopicsPipeline) -> None:
    orders.send({"id": 1, "amount": 2})
    told = orders.json("run")
    assert told["stream"]["caught_up"]
    orders.send({"id": 2, "amount": 2})
    status = orders.run_here("status", "--json").json
    assert (status["state"], status["lag_messages"], status["slot"]) == ("stopped", 1, None)
    assert "1 messages behind" in orders.run_here("status").stdout
    orders.run_here("preflight")
    orders.run_here("resnapshot", "--all", code=2)
    orders.run_here("drop", "--yes")
    assert not orders.state.exists()
    assert orders.target_rows("SELECT id FROM t") == [(1,)]


def test_several_sinks_get_the_same_units(orders: TopicsPipeline, tmp_path: Path) -> None:
    orders.change(sink=None)
    sinks = [
        {"type": "files", "path": str(tmp_path / "lake"), "format": "json"},
        {"dsn": orders.databases.pipeline_target},
    ]
    orders.change(sink=sinks)
    commands.provision(orders.pipeline)
    orders.target("ALTER TABLE public.t ADD CONSTRAINT small CHECK (id < 4)")
    orders.send(*({"id": n} for n in range(5)))
    with pytest.raises(CdcError):  # in the first batch of the checkpoint, which the second record does not know
        orders.catch_up()
    orders.target("ALTER TABLE public.t DROP CONSTRAINT small")
    orders.catch_up()
    orders.send({"id": 5})
    orders.target("ALTER TABLE public.t ADD CONSTRAINT small CHECK (id < 5)")
    with pytest.raises(CdcError):
        orders.catch_up()
    orders.target("ALTER TABLE public.t DROP CONSTRAINT small")
    orders.catch_up()
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(n,) for n in range(6)]
    files = (tmp_path / "lake" / "public" / "t").rglob("*.json*")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == list(range(6))
