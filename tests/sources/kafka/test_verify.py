"""Comparisons of topics with their targets find every difference, and nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.query import QueryResult
from airflow_cdc_provider.engine.sources.kafka.verify import _Remaining, _way_of
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import SECONDS
from tests.support.kafka_sink import consumed
from tests.support.topic_queries import CLICKS, ORDERS, SUMS
from tests.support.topics import TopicsPipeline, moments
from tests.support.topics_to_topic import VALID, VISITS, TopicsToTopic

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]


@pytest.fixture
def orders(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsPipeline:
    return TopicsPipeline(tmp_path, databases, kafka, ORDERS, key=["id"])


def verified(pipeline: TopicsPipeline) -> dict[str, Any]:
    return commands.verify(pipeline.pipeline)


def found(result: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the differences, by the first column of the key."""
    return {(each["kind"], next(iter(each["key"].values()))) for t in result["tables"] for each in t["differences"]}


def counted_again(ranges: Sequence[Mapping[str, Any]], brokers: str, topic: str) -> None:
    """Compare the rows of offset ranges with those that a plain consumer reads."""
    received = consumed(Cluster(brokers), topic)
    for each in ranges:
        there = [m for m in received if m.partition == each["partition"] and each["begin"] <= m.offset < each["end"]]
        keys = sum(zlib.crc32(message.key or b"") for message in there)
        assert (each["topic"], each["messages"], each["keys"]) == (topic, len(there), keys)


def test_a_mirror_and_what_differs_in_it(orders: TopicsPipeline) -> None:
    orders.send(*({"id": n % 10, "amount": f"{n}.50", "note": f"ü{n}"} for n in range(40)), {"id": 77})
    orders.catch_up()
    orders.send({"id": 3, "note": "not read yet"})
    result = verified(orders)
    assert result["equal"]
    (table,) = result["tables"]
    assert (table["table"], table["source_rows"], table["target_rows"]) == ("public.t", 11, 11)
    counted_again(result["ranges"], orders.broker.brokers, orders.topic)
    assert {str(each["partition"]): each["end"] for each in result["ranges"]} == orders.offsets()
    assert sum(each["messages"] for each in result["ranges"]) == 41
    assert (result["lag_messages"], result["begins_late"], result["live"]) == (1, False, False)

    orders.target(
        "UPDATE t SET note = 'other' WHERE id = 1", "DELETE FROM t WHERE id = 2", "INSERT INTO t (id) VALUES (99)"
    )
    assert found(verified(orders)) == {("different", "1"), ("missing", "2"), ("extra", "99")}
    assert "public.t: different" in orders.run_here("verify", code=4).stdout
    orders.target("DROP TABLE t")
    with pytest.raises(UnknownTable):
        verified(orders)


@pytest.mark.thorough
def test_messages_that_retention_has_removed_are_not_asked_for(orders: TopicsPipeline) -> None:
    orders.send(*({"id": n} for n in range(30)))
    orders.catch_up()
    client = AdminClient({"bootstrap.servers": orders.broker.brokers})
    removed = [TopicPartition(orders.topic, int(p), end // 2) for p, end in orders.offsets().items()]
    for future in client.delete_records(removed).values():
        future.result(SECONDS)
    result = verified(orders)
    assert result["equal"]
    assert result["begins_late"]
    rows = result["tables"][0]["source_rows"]
    assert rows == sum(end - end // 2 for end in orders.offsets().values())
    orders.target("UPDATE t SET note = 'other'")
    assert len(found(verified(orders))) == rows


@pytest.mark.thorough
def test_a_changelog_has_each_row_as_often_as_it_was_made(orders: TopicsPipeline) -> None:
    del orders.document["source"]["key"]
    orders.change(sink={"mode": "changelog"})
    orders.send(*({"id": n % 5} for n in range(20)))
    orders.catch_up()
    result = verified(orders)
    assert (result["equal"], result["tables"][0]["target_rows"]) == (True, 20)
    orders.target("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE id = 4)")
    orders.target("INSERT INTO t SELECT * FROM t WHERE id = 2 LIMIT 1")
    assert found(verified(orders)) == {("different", "4"), ("different", "2")}


@pytest.mark.thorough
def test_windows_that_change(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, CLICKS, **SUMS)
    for start in (0, 1, 2):
        pipeline.send(*({"id": key, "at": at, "value": 7} for at in moments([start, start + 1.5]) for key in "ab"))
        pipeline.catch_up()
    assert verified(pipeline)["equal"]
    pipeline.target("UPDATE t SET total = total + 1 WHERE id = 'b'")
    assert {key for _, key in found(verified(pipeline))} == {"b"}


@pytest.mark.thorough
def test_windows_that_are_told_once_closed(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    watermark = {"column": "at", "delay": "1 second"}
    pipeline = TopicsToTopic(tmp_path, databases, kafka, VISITS, key=["id", "start"], watermark=watermark, sql=VALID)
    for batch in ([0, 1, 19], [21, 22], [45], [46]):
        pipeline.send(*({"id": "abc1", "at": at} for at in moments(batch)))
        pipeline.catch_up()
    assert len(pipeline.received()) == 2
    result = verified(pipeline)
    (table,) = result["tables"]
    assert (result["equal"], table["source_rows"]) == (True, 2)
    counted_again(result["ranges"], pipeline.broker.brokers, pipeline.topic)
    counted_again(table["ranges"], pipeline.broker.brokers, f"{pipeline.out}.t")
    assert sum(each["messages"] for each in table["ranges"]) == 2


@pytest.mark.thorough
def test_a_closed_window_that_the_target_lacks(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    """The watermark of its last unit determines what the target must contain by now, not its contents."""
    watermark = {"column": "at", "delay": "1 second"}
    pipeline = TopicsPipeline(tmp_path, databases, kafka, VISITS, key=["id", "start"], watermark=watermark, sql=VALID)
    pipeline.change(sink={"mode": "changelog"})
    for batch in ([0, 1, 19], [21, 22], [45], [59]):
        pipeline.send(*({"id": key, "at": at} for at in moments(batch) for key in ("abc1", "xyz2")))
        pipeline.catch_up()
        assert verified(pipeline)["equal"]
    assert verified(pipeline)["tables"][0]["source_rows"] == 4
    pipeline.target(
        "DELETE FROM t WHERE id = 'abc1' AND start = (SELECT min(start) FROM t)",
        "UPDATE t SET visits = visits + 1 WHERE id = 'xyz2' AND start = (SELECT max(start) FROM t)",
    )
    assert {(kind, key) for kind, key in found(verified(pipeline))} == {
        ("missing", "abc1"),
        ("missing", "xyz2"),
        ("extra", "xyz2"),
    }
    pipeline.target("DELETE FROM t")
    result = verified(pipeline)
    assert (result["equal"], result["tables"][0]["source_rows"], result["tables"][0]["target_rows"]) == (False, 4, 0)


@pytest.mark.thorough
def test_windows_that_change_are_so_in_a_changelog_beside_a_mirror() -> None:
    """The query gives the same to all sinks: repeated rows are summed up, and not compared event by event."""
    table = Table(1, "public", "t", (), ("id",), "d", None, (), "r", 0)
    way = _way_of("changelog", "update", QueryResult(table, stateful=True, has_ops=False))
    assert way is not None
    assert (way.keyed, way.closing) == (True, False)


def test_events_up_to_the_last_truncate_are_left_out() -> None:
    """They are left out whatever their number and order; but not before the record says that there was a truncate."""
    events = [("2/1", "5", "i", "5"), ("1/9", "7", "i", "1"), ("1/9", "8", "t", None), ("2/1", "4", "t", None)]
    events += [("2/0", "9", "i", "2"), ("2/1", None, "i", "6"), ("2/1", "3", "i", "3")]
    names = ("_commit_lsn", "_seq", "_op", "id")
    batches = [
        pa.RecordBatch.from_pydict(dict(zip(names, map(list, zip(*some, strict=True)), strict=True)))
        for some in (events[:3], events[3:])
    ]
    before = RecordedTopics(0, "cluster", {}, {}, {}, {}, False, None, 0)
    target = Target(Table(1, "public", "t", (), (), "f", None, (), "r", 0), "public", "t")
    for position, ids in ((replace(before, truncated={"t": {"0": 3}}), ["5", "6"]), (before, [e[3] for e in events])):
        remaining = _Remaining(lambda *given: iter(batches), lambda position=position: position)
        assert [id_ for batch in remaining(target, None) for id_ in batch["id"].to_pylist()] == ids


@pytest.mark.thorough
def test_updates_of_debezium_s_add_up(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, ORDERS, partitions=1, key=["id"], format="debezium")
    pipeline.change(sink={"mode": "changelog"})
    one, two = ({"id": n, "amount": "1.50", "note": "x"} for n in (1, 2))
    pipeline.send(
        {"op": "r", "after": one}, {"op": "c", "after": two}, {"op": "u", "before": one, "after": {**one, "note": "y"}}
    )
    pipeline.send({"op": "d", "before": two, "after": None})
    pipeline.catch_up()
    result = verified(pipeline)
    assert (result["equal"], result["tables"][0]["source_rows"]) == (True, 1)
    pipeline.target("UPDATE t SET note = 'z' WHERE _op = 'u'")
    assert found(verified(pipeline)) == {("different", "1")}


@pytest.mark.thorough
def test_a_stream_may_run_meanwhile(orders: TopicsPipeline) -> None:
    orders.run("provision")
    running = orders.start("stream")
    orders.await_beat(running, "stream")
    orders.send(*({"id": n, "note": "x"} for n in range(50)))
    result = verified(orders)
    assert (result["live"], result["equal"], result["tables"][0]["source_rows"]) == (True, True, 50)
    orders.target("UPDATE t SET note = 'other' WHERE id = 7")
    assert found(verified(orders)) == {("different", "7")}
    orders.run("stop")
    assert running.wait().code == 0
