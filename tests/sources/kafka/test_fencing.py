"""Two runs over a topic: a halted run that wakes up after a takeover, and the messages that it had read.

It is halted at the dangerous places: about to commit a unit, within the sink's transaction, and after the commit of the
unit, which Spark does not know yet.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import SecondWriter
from airflow_cdc_provider.engine.sinks.postgres import fence as postgres_fence
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.topics import TopicsPipeline
from tests.support.topics_to_topic import TopicsToTopic

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

COLUMNS = "id BIGINT NOT NULL, note STRING"
# There its session has ended; the record shows the reason when it starts again.
LEARNING_LATER = "in-batch-commit"


@pytest.fixture
def to_postgres(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> Iterator[TopicsPipeline]:
    """Return the section of a changelog, in which repeated changes would be visible."""
    pipeline = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, key=["id"])
    pipeline.change(sink={"mode": "changelog"})
    yield pipeline
    pipeline.end_commands()


@pytest.fixture
def to_kafka(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> Iterator[TopicsToTopic]:
    pipeline = TopicsToTopic(tmp_path, databases, kafka, COLUMNS, key=["id"])
    yield pipeline
    pipeline.end_commands()


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["before-batch-commit", LEARNING_LATER])
def test_a_run_that_is_halted_adds_nothing_to_postgres_when_it_comes_back(
    to_postgres: TopicsPipeline, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_fence, "COMMIT_SECONDS", 1.0)
    overtake(to_postgres, place, lambda: [id_ for (id_,) in to_postgres.target_rows("SELECT id FROM t")])


@pytest.mark.thorough
def test_a_run_that_is_halted_adds_nothing_to_a_topic_when_it_comes_back(to_kafka: TopicsToTopic) -> None:
    overtake(to_kafka, "before-transaction-end:2", lambda: [row["id"] for row in to_kafka.received()])


def overtake(pipeline: TopicsPipeline, place: str, ids: Callable[[], list[int]]) -> None:
    """Halt a run, let another one continue, resume the first, and check the target all the time.

    :param place: failpoint at which it is halted, and the pass if that is not the first.
    :param ids: expected ids in the target.
    """
    pipeline.send(*({"id": n} for n in range(10)))
    pipeline.catch_up()
    pipeline.send(*({"id": n} for n in range(10, 20)))
    name, _, number = place.partition(":")
    if name == LEARNING_LATER:
        pipeline.change(stream={"restart": {"strategy": "fixed-delay", "attempts": 20, "delay": "200 ms"}})
    halted = pipeline.start("stream", "--json", failpoint=f"{name}:pause:{number}")
    halted.until(lambda: halted.paused() == 1, "the pause")
    with pytest.raises(SecondWriter, match=f"process {halted.process.pid}"):
        pipeline.catch_up()
    assert sorted(ids()) == list(range(10))

    commands.run(pipeline.pipeline, takeover=True)
    assert sorted(ids()) == list(range(20))
    pipeline.send(*({"id": n} for n in range(20, 30)))
    pipeline.catch_up()

    os.kill(halted.process.pid, signal.SIGCONT)
    assert halted.wait().json["error"]["kind"] == "Fenced", halted.output()
    assert sorted(ids()) == list(range(30))
    pipeline.send(*({"id": n} for n in range(30, 40)))
    pipeline.catch_up()
    assert sorted(ids()) == list(range(40))
    pipeline.assert_verified()
