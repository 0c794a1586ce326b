"""Truncates in Debezium topics: followed if all partitions have them, whichever a unit reads first."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import BadRecord, ValueRefused
from airflow_cdc_provider.engine.sources.kafka import truncate_messages
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.dead_letters import dead_letters
from tests.support.kafka_server import SECONDS, create_topic
from tests.support.topics import TopicsPipeline

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]

COLUMNS = "id INT NOT NULL, n INT"


def send(pipeline: TopicsPipeline, partition: int, *values: int | str) -> None:
    """Write rows by their keys, and truncates by their name, to a partition."""
    producer = Producer({"bootstrap.servers": pipeline.broker.brokers, "linger.ms": 0})
    for value in values:
        row = None if isinstance(value, str) else {"id": value, "n": value}
        source = {"sequence": f'["{value}","1"]', "ts_ms": 1} if isinstance(value, str) else {}
        event = {"op": "c" if row else "t", "before": None, "after": row, "source": source}
        key = None if row is None else json.dumps({"id": value})
        producer.produce(pipeline.topic, json.dumps(event).encode(), key, partition=partition)
    assert producer.flush(SECONDS) == 0


@pytest.fixture
def pipeline(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsPipeline:
    made = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, key=["id"], format="debezium", max_batch_messages=4)
    send(made, 0, 1, 3, "first", 5, "second", 7)
    send(made, 1, 2, 4, 6, 8, 10, 12, "first", 14, "second", 16)
    return made


def verified(pipeline: TopicsPipeline) -> bool:
    return bool(commands.verify(pipeline.pipeline)["equal"])


def test_a_mirror_has_what_stands_behind_the_last_truncate_in_each_partition(
    pipeline: TopicsPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The query never sees the truncate, but it applies to all rows of the condition.
    pipeline.change(source={"sql": "SELECT id, n, _op FROM messages WHERE n > 0"})
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id FROM t ORDER BY id") == [(7,), (16,)]
    assert verified(pipeline)
    send(pipeline, 0, 20)
    send(pipeline, 1, 22, "third")
    with monkeypatch.context() as patch:
        patch.setattr(truncate_messages, "_VISIBLE_SECONDS", 1.5)  # a job of Spark looks for it each second
        with pytest.raises(BadRecord, match="it is missing from some partitions"):
            pipeline.catch_up()
    send(pipeline, 0, "third", 24)
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id FROM t ORDER BY id") == [(24,)]
    assert verified(pipeline)


@pytest.mark.thorough
def test_a_changelog_has_every_event_and_the_truncates_between_them(pipeline: TopicsPipeline) -> None:
    pipeline.change(sink={"mode": "changelog"})
    pipeline.catch_up()
    found = pipeline.target_rows("SELECT id, _op FROM t ORDER BY _commit_lsn, _seq")
    assert Counter(id_ for id_, op in found if op == "i") == Counter([1, 3, 5, 7, *range(2, 17, 2)])
    cuts = [place for place, (_, op) in enumerate(found) if op == "t"]
    assert len(cuts) == 2
    parts: list[set[Any]] = [{id_ for id_, op in part if op == "i"} for part in (found[: cuts[0]], found[cuts[1] :])]
    assert parts == [{1, 3, 2, 4, 6, 8, 10, 12}, {7, 16}]
    assert verified(pipeline)


@pytest.mark.thorough
def test_row_by_row_a_changelog_is_compared_behind_the_last_one(pipeline: TopicsPipeline) -> None:
    """This also holds if the query leaves out changes of a row."""
    pipeline.change(sink={"mode": "changelog"}, source={"sql": "SELECT id, n FROM messages"})
    pipeline.catch_up()
    assert verified(pipeline)
    pipeline.target("INSERT INTO t SELECT * FROM t WHERE id = 7")
    (found,) = commands.verify(pipeline.pipeline)["tables"]
    assert [each["key"]["id"] for each in found["differences"]] == ["7"]


@pytest.mark.thorough
def test_a_message_in_front_of_one_may_be_refused(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    """The unit starts with it, even if it is beyond the unit's own end."""
    sql = "SELECT id, 100 / n AS part, _op FROM messages"
    pipeline = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, key=["id"], format="debezium", sql=sql)
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(sink={"mode": "changelog"}, source={"bad_records": {"dead_letter": dead}, "max_batch_messages": 4})
    send(pipeline, 0, 1, "first", 5)
    send(pipeline, 1, 2, 4, 6, 10, 0, "first", 8)
    pipeline.catch_up()
    found = pipeline.target_rows("SELECT id, _op FROM t ORDER BY _commit_lsn, _seq")
    cut = [op for _, op in found].index("t")
    assert [{id_ for id_, _ in part} for part in (found[:cut], found[cut + 1 :])] == [{1, 2, 4, 6, 10}, {5, 8}]
    assert dead_letters(pipeline, dead).keys() == {("1", 4)}
    assert verified(pipeline)


@pytest.mark.thorough
def test_what_one_takes_out_of_a_mirror_refuses_no_message(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    sql = "SELECT id, 100 / (n % 10) AS part, _op FROM messages"
    pipeline = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, partitions=1, key=["id"], format="debezium", sql=sql)
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    send(pipeline, 0, 1)
    pipeline.catch_up()
    pipeline.target("ALTER TABLE t ADD UNIQUE (part)")
    send(pipeline, 0, "first", 11, 10)
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id, part FROM t") == [(11, 100.0)]
    assert dead_letters(pipeline, dead).keys() == {("0", 3)}


@pytest.mark.thorough
def test_sinks_may_stand_on_both_sides_of_one(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    """Each is compared according to its own record."""
    pipeline = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, partitions=1, key=["id"], format="debezium")
    pipeline.change(sink=None)
    files = {"type": "files", "path": str(tmp_path / "lake"), "format": "json"}
    pipeline.change(sink=[files, {"dsn": databases.pipeline_target}])
    send(pipeline, 0, 1)
    pipeline.catch_up()
    pipeline.target("ALTER TABLE t ADD CHECK (id < 9)")
    send(pipeline, 0, "first", 9)
    with pytest.raises(ValueRefused):
        pipeline.catch_up()
    assert verified(pipeline)


def test_one_of_a_query_with_state_is_a_bad_record(pipeline: TopicsPipeline) -> None:
    pipeline.change(source={"sql": "SELECT id, count(*) AS n FROM messages GROUP BY id"})
    with pytest.raises(BadRecord, match="cannot remove from its state"):
        pipeline.catch_up()
