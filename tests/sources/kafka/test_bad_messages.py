"""Messages that a sink refuses, or on which the query fails: none of them stops a pipeline for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import BadRecord, ConfigError
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer
from tests.conftest import PIPELINE_ROLE, Databases
from tests.support.dead_letters import dead_letters
from tests.support.kafka_server import committed, create_topic
from tests.support.mysql import query
from tests.support.topics import TopicsPipeline, moments

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]


MEASURES = "id STRING NOT NULL, x DOUBLE, d BIGINT"


CLICKS = "id STRING NOT NULL, at TIMESTAMP NOT NULL, value DOUBLE"


SUMS = {
    "key": ["id", "start"],
    "watermark": {"column": "at", "delay": "4 seconds"},
    "sql": "SELECT id, window.start AS start, sum(value) AS total FROM messages"
    " WHERE assert_true(value <> 13, 'on purpose') IS NULL GROUP BY id, window(at, '2 seconds')",
}


@pytest.mark.thorough
def test_each_message_that_is_refused_goes_to_the_dead_letters_once(
    databases: Databases, kafka: KafkaServer, mariadb: MariadbServer, tmp_path: Path
) -> None:
    """The sink refuses a value or a key, the query fails on a division; and one message cannot be read."""
    sql = "SELECT id, x, 100 / d AS part FROM messages"
    pipeline = TopicsPipeline(tmp_path, databases, kafka, MEASURES, partitions=1, key=["id"], sql=sql)
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    dsn = mariadb.dsn.replace("//root@", f"//{PIPELINE_ROLE}@")
    pipeline.document["sink"] = {"type": "mysql", "dsn": dsn, "schema": "copy"}
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    good = {"id": "a", "x": 1.5, "d": 2}
    pipeline.send(good, b'{"id": "b", "x": NaN, "d": 1}', *({**good, "id": f"g{n}"} for n in range(40)))
    pipeline.send({"id": "c", "x": 1, "d": 0}, b"nonsense", {"id": "k" * 769, "x": 1, "d": 1}, {**good, "id": "last"})
    assert pipeline.catch_up()["stream"]["caught_up"]
    told = dead_letters(pipeline, dead)
    assert sorted(offset for _, offset in told) == [1, 42, 43, 44]
    assert "'x'" in told["0", 1]
    assert "NaN" in told["0", 1]
    assert "DIVIDE_BY_ZERO" in told["0", 42]
    assert "id" in told["0", 44]
    assert query(mariadb, "SELECT count(*), max(id), sum(part) FROM copy.t") == [(42, "last", 42 * 50.0)]
    status = commands.status(pipeline.pipeline)
    assert [each["first"] for each in status["skipped"]] == [1, 42, 44]
    assert "skipped" in pipeline.run_here("status").stdout
    assert commands.verify(pipeline.pipeline)["equal"]
    pipeline.send({**good, "id": "after"})
    pipeline.catch_up()
    assert len(dead_letters(pipeline, dead)) == 4


@pytest.mark.thorough
def test_a_query_with_state_goes_on_behind_a_message_that_was_skipped_or_set_aside(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, CLICKS, partitions=1, **SUMS)

    def send(*values: float) -> None:
        pipeline.send(*({"id": "a", "at": moments([1])[0], "value": value} for value in values))

    def totals() -> list[tuple[Any, ...]]:
        return pipeline.target_rows("SELECT total FROM t")

    send(1, 2)
    pipeline.catch_up()
    send(4, 13, 8)
    for _ in range(2):
        with pytest.raises(BadRecord, match=rf"message 3 of {pipeline.topic}\[0\] .*on purpose") as told:
            pipeline.catch_up()
    place = ("--topic", pipeline.topic, "--partition", "0")
    assert " ".join(place) in told.value.solution
    assert "resnapshot" not in told.value.solution
    for offset in (1, 5):
        with pytest.raises(ConfigError, match="offsets 2 to 4"):
            commands.skip(pipeline.pipeline, pipeline.topic, 0, [(offset, offset)])
    assert f"{pipeline.topic}[0] 3: " in pipeline.run_here("skip", *place, "--offset", "3").stdout
    pipeline.catch_up()
    assert totals() == [(15.0,)]
    assert commands.verify(pipeline.pipeline)["equal"]
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    send(13, 16)
    pipeline.catch_up()
    assert totals() == [(31.0,)]
    assert [offset for _, offset in dead_letters(pipeline, dead)] == [5]
    assert commands.verify(pipeline.pipeline)["equal"]
    # No single message causes this: the sum of several is too large for a constraint.
    pipeline.target("ALTER TABLE t ADD CONSTRAINT small CHECK (total < 32)")
    send(1, 1)
    with pytest.raises(Exception, match=rf"messages {pipeline.topic}\[0\] 7-8: .*small.*none of them is refused"):
        pipeline.catch_up()


def test_a_constraint_of_the_target_names_the_message(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    """The constraint may be wrong itself, so the message is not set aside, although there is a topic for it."""
    pipeline = TopicsPipeline(tmp_path, databases, kafka, "id BIGINT NOT NULL, v STRING", partitions=1, key=["id"])
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    pipeline.send({"id": 1, "v": "x"})
    pipeline.catch_up()
    pipeline.target("ALTER TABLE t ADD CONSTRAINT one UNIQUE (v)")
    pipeline.send(*({"id": n, "v": "x" if n == 12 else f"v{n}"} for n in range(10, 17)), {"id": 3, "v": "a\0b"})
    with pytest.raises(BadRecord, match=r"message 3 .*one"):
        pipeline.catch_up()
    assert committed(kafka.brokers, dead) == []
    pipeline.target("ALTER TABLE t DROP CONSTRAINT one")
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT count(*) FROM t") == [(8,)]
    assert [offset for _, offset in dead_letters(pipeline, dead)] == [8]
    assert json.loads(committed(kafka.brokers, dead)[0].value or b"")["id"] == 3
