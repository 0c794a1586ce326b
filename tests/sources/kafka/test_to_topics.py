"""From topics to other topics on a real broker, through Spark: consumers of committed messages see each row once."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import SinkIsSource
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.kafka_server import SECONDS as PATIENCE
from tests.support.kafka_server import create_topic
from tests.support.topics import moments
from tests.support.topics_to_topic import VALID, VISITS, TopicsToTopic

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_session")]


@pytest.fixture
def copy(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsToTopic:
    return TopicsToTopic(tmp_path, databases, kafka, "id BIGINT NOT NULL, note STRING", key=["id"])


@pytest.fixture
def visits(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsToTopic:
    watermark = {"column": "at", "delay": "1 second"}
    return TopicsToTopic(tmp_path, databases, kafka, VISITS, key=["id", "start"], watermark=watermark, sql=VALID)


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["before-transaction-end:2", "after-transaction:2"])
def test_a_driver_that_dies_leaves_nothing_out_and_nothing_twice(copy: TopicsToTopic, place: str) -> None:
    copy.send(*({"id": n, "note": "x"} for n in range(20)))
    copy.catch_up()
    copy.send(*({"id": n, "note": "y"} for n in range(20, 40)))
    name, _, number = place.partition(":")
    killed = copy.start("run", failpoint=f"{name}:kill:{number}")
    assert killed.process.wait(120) == -9
    killed.kill()
    copy.catch_up()
    assert sorted(row["id"] for row in copy.received()) == list(range(40))
    assert sum(copy.offsets().values()) == 40


def test_its_own_topics_are_not_read(copy: TopicsToTopic) -> None:
    topics = copy.document["source"].pop("topics")
    for pattern in (f"in-.*|{copy.out}.*", "in-.*|.*cdc.*", "in-.*|.*[.]staging"):
        copy.change(source={"pattern": pattern})
        with pytest.raises(SinkIsSource):
            commands.provision(copy.pipeline)
    del copy.document["source"]["pattern"]
    copy.change(source={"topics": [*topics, f"{copy.out}.t"]})
    create_topic(copy.broker.brokers, f"{copy.out}.t")
    with pytest.raises(SinkIsSource, match=f"{copy.out}.t"):
        commands.provision(copy.pipeline)


def test_windows_of_valid_identifiers_are_told_once(visits: TopicsToTopic) -> None:
    # The time of a batch takes effect in the next one.
    for batch in ([0, 1, 19], [21, 22], [45], [46]):
        visits.send(*({"id": id_, "at": at} for at in moments(batch) for id_ in ("abc1", "not valid", "xyz22")))
        visits.catch_up()
    told = [(row["id"], row["start"], row["visits"]) for row in visits.received()]
    first, second = "2024-05-01 10:00:00+00", "2024-05-01 10:00:20+00"
    assert sorted(told) == [("abc1", first, 3), ("abc1", second, 2), ("xyz22", first, 3), ("xyz22", second, 2)]


@pytest.mark.thorough
def test_a_broker_that_restarts_and_partitions_that_are_added_lose_and_repeat_nothing(copy: TopicsToTopic) -> None:
    """Partitions are not assigned by a consumer group, so the only kind of rebalance is that partitions are added."""
    copy.change(stream={"restart": {"strategy": "fixed-delay", "attempts": 20, "delay": "1 second"}})
    copy.send(*({"id": n} for n in range(10)))
    copy.catch_up()
    running = copy.start("stream")
    copy.await_beat(running, "stream")
    copy.send(*({"id": n} for n in range(10, 20)))
    copy.broker.restart("kill")
    copy.send(*({"id": n} for n in range(20, 30)))
    running.until(lambda: sum(copy.offsets().values()) >= 30, "the last message")
    admin = AdminClient({"bootstrap.servers": copy.broker.brokers})  # keep it alive until they exist
    admin.create_partitions([NewPartitions(copy.topic, 5)])[copy.topic].result(PATIENCE)
    copy.send(*({"id": n} for n in range(30, 60)))
    running.until(lambda: sum(copy.offsets().values()) >= 60, "the last message of all partitions")
    copy.run("stop")
    assert running.wait().code == 0
    assert len(copy.offsets()) == 5
    assert sorted(row["id"] for row in copy.received()) == list(range(60))
    assert commands.verify(copy.pipeline)["equal"]
