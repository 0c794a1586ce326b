"""Pipelines over topics through crashes, of the driver at each step and of the broker; and losses of a plain sink."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer
from tests.conftest import PIPELINE_ROLE, Databases
from tests.selection import Some
from tests.support.kafka_server import SECONDS, make_broker
from tests.support.topic_queries import CLICKS, ORDERS, SUMS
from tests.support.topics import TopicsPipeline, moments
from tests.support.topics_to_topic import VALID, VISITS, TopicsToTopic

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = (
    "before-batch-staged",
    "after-batch-staged",
    "before-batch-commit",
    "in-batch-commit",
    "after-batch-commit",
    "before-spark-commit",
)
_PASSING = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
TOTALS = "SELECT id, extract(second FROM start)::int, total::int FROM t ORDER BY 1, 2"


class Clicks:
    """Messages within a minute, and the sums that they yield."""

    def __init__(self) -> None:
        self._sent = 0
        self._totals: dict[tuple[str, int], int] = defaultdict(int)

    def send(self, pipeline: TopicsPipeline, count: int = 30) -> None:
        messages = []
        for number in range(self._sent, self._sent + count):
            second, key = number / 10, "abc"[number % 3]
            messages.append({"id": key, "at": moments([second])[0], "value": number})
            self._totals[key, int(second) // 2 * 2] += number
        pipeline.send(*messages)
        self._sent += count

    @property
    def totals(self) -> list[tuple[str, int, int]]:
        return sorted((key, second, total) for (key, second), total in self._totals.items())


class Visits:
    """Messages every two seconds, one in three without a valid identifier, and the windows that they yield."""

    def __init__(self) -> None:
        self._sent = 0
        self._counts = Counter[tuple[str, str]]()

    def send(self, pipeline: TopicsPipeline, count: int = 30) -> None:
        messages = []
        for number in range(self._sent, self._sent + count):
            at, key = datetime(2024, 5, 1, 10) + timedelta(seconds=2 * number), ("abc1", "xyz22", "abc")[number % 3]
            messages.append({"id": key, "at": f"{at.isoformat()}Z"})
            if key != "abc":
                self._counts[key, f"{at.replace(second=at.second // 20 * 20):%F %T}+00"] += 1
        pipeline.send(*messages)
        self._sent += count

    @property
    def windows(self) -> list[tuple[str, str, int]]:
        return sorted((*window, count) for window, count in self._counts.items())


def test_windows_are_right_whatever_step_the_driver_is_killed_at(
    databases: Databases, kafka: KafkaServer, tmp_path: Path, some: Some
) -> None:
    pipeline, clicks = TopicsPipeline(tmp_path, databases, kafka, CLICKS, **SUMS), Clicks()
    for step in some(STEPS):
        clicks.send(pipeline)
        killed = pipeline.start("run", failpoint=f"{step}:kill")
        assert killed.wait().code != 0, step
        killed.kill()
    pipeline.catch_up()
    assert pipeline.target_rows(TOTALS) == clicks.totals


@pytest.mark.thorough
def test_closed_windows_are_told_once_whatever_step_of_a_commit_the_driver_is_killed_at(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    watermark = {"column": "at", "delay": "10 seconds"}
    asked = {"key": ["id", "start"], "watermark": watermark, "sql": VALID, "max_batch_messages": 10}
    pipeline, visits = TopicsToTopic(tmp_path, databases, kafka, VISITS, **asked), Visits()
    for step in ("in-batch-commit", "after-batch-commit", "before-spark-commit"):
        visits.send(pipeline)
        killed = pipeline.start("run", failpoint=f"{step}:kill:3")  # the third batch closes windows
        assert killed.wait().code != 0, step
        killed.kill()
        pipeline.catch_up()
    for _ in range(2):  # the second is read by the time of the first, and closes all before both
        pipeline.send({"id": "abc1", "at": "2024-05-01T11:00:00Z"})
        pipeline.catch_up()
    told = [(row["id"], row["start"], row["visits"]) for row in pipeline.received()]
    assert sorted(told) == visits.windows


@pytest.mark.thorough
def test_windows_in_mysql_are_right_after_a_kill_and_a_restart_of_the_broker(
    databases: Databases, server_directory: Path, mariadb: MariadbServer, tmp_path: Path
) -> None:
    with make_broker(server_directory / f"broker-{tmp_path.name}") as broker:
        pipeline, clicks = TopicsPipeline(tmp_path, databases, broker, CLICKS, **SUMS), Clicks()
        pipeline.change(sink=None)
        pipeline.change(
            sink={"type": "mysql", "dsn": mariadb.dsn.replace("//root@", f"//{PIPELINE_ROLE}@"), "schema": "mirror"},
            stream={"restart": {"strategy": "fixed-delay", "attempts": 20, "delay": "1 second"}},
        )

        def right() -> bool:
            with closing(mariadb.connect()) as connection, connection.cursor() as cursor:
                cursor.execute("SELECT id, second(start), total FROM mirror.t ORDER BY 1, 2")
                return [(key, int(second), int(total)) for key, second, total in cursor.fetchall()] == clicks.totals

        for step in ("in-batch-commit", "after-batch-commit"):
            clicks.send(pipeline)
            killed = pipeline.start("run", failpoint=f"{step}:kill")
            assert killed.wait().code != 0, step
            killed.kill()
        stream = pipeline.start("stream")
        stream.until(right, "the sums after the kills")
        broker.restart("kill")
        clicks.send(pipeline)
        stream.until(right, "the sums after the restart")
        pipeline.run("stop")
        assert stream.wait().code == 0


@pytest.fixture
def orders(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> Iterator[TopicsPipeline]:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, ORDERS, partitions=1, key=["id"])
    yield pipeline
    pipeline.end_commands()


@pytest.mark.thorough
def test_a_plain_consumer_loses_what_its_sink_has_refused_and_we_do_not(orders: TopicsPipeline) -> None:
    """Both meet the same error of the sink in the middle of a batch, which is then repaired."""
    orders.send(*({"id": n, "amount": n} for n in range(20)))
    orders.target("CREATE TABLE public.plain (id bigint PRIMARY KEY, amount numeric CHECK (amount < 10))")
    with pytest.raises(psycopg.errors.CheckViolation):
        consume_plainly(orders)
    orders.target("ALTER TABLE public.plain DROP CONSTRAINT plain_amount_check")
    consume_plainly(orders)
    assert orders.target_rows("SELECT id FROM plain ORDER BY 1") == [(n,) for n in range(10)]

    orders.run("provision")
    orders.target("ALTER TABLE public.t ADD CONSTRAINT small CHECK (amount < 10)")
    orders.run("run", code=3)
    orders.target("ALTER TABLE public.t DROP CONSTRAINT small")
    orders.run("run")
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(n,) for n in range(20)]


def _committed(consumer: Consumer, place: TopicPartition) -> list[TopicPartition]:
    """Return the offsets that the group has committed; repeat the request while the broker is loading them."""
    found: list[TopicPartition] = []

    def answered() -> bool:
        try:
            found[:] = consumer.committed([place], SECONDS)
        except KafkaException as e:
            if e.args[0].code() not in _PASSING:
                raise
        return bool(found)

    assert await_condition(answered, SECONDS)
    return found


def consume_plainly(pipeline: TopicsPipeline) -> None:
    """Consume like a plain sink: commit the group's offsets for the messages taken, and write row by row."""
    conf: dict[str, Any] = {
        "bootstrap.servers": pipeline.broker.brokers,
        "group.id": f"plain-{pipeline.topic}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    with closing(Consumer(conf)) as consumer, psycopg.connect(pipeline.databases.target, autocommit=True) as target:
        place = TopicPartition(pipeline.topic, 0)
        [committed] = _committed(consumer, place)
        first, end = consumer.get_watermark_offsets(place, SECONDS)
        start = max(first, committed.offset)
        consumer.assign([TopicPartition(pipeline.topic, 0, start)])
        batch = consumer.consume(end - start, SECONDS) if start < end else []
        assert len(batch) == end - start
        if batch:
            consumer.commit(asynchronous=False)
        for message in batch:
            row = json.loads(message.value() or b"")
            target.execute("INSERT INTO public.plain VALUES (%s, %s)", [row["id"], row["amount"]])
