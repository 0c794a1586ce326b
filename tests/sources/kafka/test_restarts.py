"""Restarts of queries over Kafka topics, each in its own session, so that only files and records are left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.runs import foreach_batch
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.topic_queries import CLICKS, ORDERS, SUMS
from tests.support.topics import TopicsPipeline, moments

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def orders(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsPipeline:
    return TopicsPipeline(tmp_path, databases, kafka, ORDERS, key=["id"])


@pytest.fixture
def sums(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> TopicsPipeline:
    return TopicsPipeline(tmp_path, databases, kafka, CLICKS, **SUMS)


def test_windows_are_summed_and_go_on_after_a_restart(sums: TopicsPipeline) -> None:
    own = sums.directory / "checkpoints"
    sums.change(source={"checkpoint": str(own)})
    sums.send(
        *({"id": "a", "at": at, "value": 1} for at in moments([0, 1, 1.999, 2])), {"id": "b", "at": moments([0.5])[0]}
    )
    sums.catch_up()
    totals = "SELECT id, extract(second FROM start)::int, total FROM t ORDER BY 1, 2"
    assert sums.target_rows(totals) == [("a", 0, 3), ("a", 2, 1), ("b", 0, None)]
    sums.send(*({"id": "a", "at": at, "value": 10} for at in moments([0.5, 3])))
    sums.catch_up()
    assert sums.target_rows(totals) == [("a", 0, 13), ("a", 2, 11), ("b", 0, None)]
    # RocksDB keeps its state in archives and logs of changes; Spark's default store writes deltas.
    kinds = {file.suffix for file in (own / sums.pipeline.name / "state").rglob("[0-9]*.*")}
    assert kinds & {".changelog", ".zip"}
    assert ".delta" not in kinds
    commands.drop(sums.pipeline)
    assert list(own.iterdir()) == []


@pytest.mark.thorough
def test_what_comes_too_late_is_left_out_and_counted(sums: TopicsPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also covers the last batch, after which the query is stopped at once."""
    monkeypatch.setattr(foreach_batch, "_POLL_SECONDS", 0.001)
    sums.change(source={"late": "count"})
    sums.send({"id": "a", "at": moments([0])[0], "value": 1}, {"id": "a", "at": moments([30])[0], "value": 0})
    sums.catch_up()
    # Spark considers late what lies behind the previous batch's watermark, which may not have advanced yet.
    sums.send({"id": "a", "at": moments([30])[0], "value": 1})
    sums.catch_up()
    sums.send({"id": "a", "at": moments([1])[0], "value": 100}, {"id": "a", "at": moments([28])[0], "value": 100})
    seen: list[dict[str, Any]] = []
    commands.stream(sums.pipeline, until="caught-up", report=lambda _, progress: seen.append(progress))
    assert sums.target_rows("SELECT total FROM t ORDER BY start") == [(1,), (100,), (1,)]
    assert seen[-1]["late"] == 1


@pytest.mark.thorough
def test_a_query_without_state_goes_on_from_the_record_alone(orders: TopicsPipeline) -> None:
    orders.change(sink={"mode": "changelog"})
    for start in (0, 10, 20):
        orders.send(*({"id": n} for n in range(start, start + 10)))
        orders.catch_up()
        shutil.rmtree(orders.state / "checkpoint")
    applied = orders.record.applied
    orders.send({"id": 30})
    orders.catch_up()
    assert orders.record.applied > applied
    assert orders.target_rows("SELECT id FROM t ORDER BY 1") == [(n,) for n in range(31)]


@pytest.mark.thorough
def test_a_query_with_state_refuses_to_go_on_without_its_checkpoint(sums: TopicsPipeline) -> None:
    sums.send({"id": "a", "at": moments([0])[0], "value": 1})
    sums.catch_up()
    kept = sums.directory / "kept"
    (sums.state / "checkpoint").rename(kept)
    sums.send({"id": "a", "at": moments([1])[0], "value": 1})
    with pytest.raises(GateClosed, match="checkpoint"):
        sums.catch_up()
    assert sums.target_rows("SELECT total FROM t") == [(1,)]
    outcome = sums.run("run", code=3)
    assert "Restore" in outcome.stderr
    kept.rename(sums.state / "checkpoint")
    sums.catch_up()
    assert sums.target_rows("SELECT total FROM t") == [(2,)]
    sums.change(source={"output": "append"})
    with pytest.raises(ConfigError, match="output"):
        sums.catch_up()
    sums.change(source={"output": "update"})  # as it was before
    commands.provision(sums.pipeline)
