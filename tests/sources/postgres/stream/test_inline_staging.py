"""Staging in the tasks that read: when it happens there, when in later tasks, and how this shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql.classic.dataframe import DataFrame

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.stream import pipelined_commit
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import InlineStaging
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

CHANGES = {
    "rows": ("INSERT INTO public.t SELECT n, 'zebra' FROM generate_series(1, 50) n",),
    "a column in between": (
        "INSERT INTO public.t SELECT n, 'zebra' FROM generate_series(1, 25) n",
        "ALTER TABLE public.t ADD COLUMN w text",
        "INSERT INTO public.t SELECT n, 'zebra', 'new' FROM generate_series(26, 50) n",
    ),
}


def copied(databases: Databases, directory: Path, cores: int) -> PipelineUnderTest:
    """Return a pipeline of an empty table, whose Spark runs on some cores and writes an :func:`event_log`."""
    (directory / "events").mkdir()
    conf = {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false"}
    conf |= {"spark.eventLog.dir": f"file://{directory}/events"}
    pipeline = PipelineUnderTest(directory, databases, ["public.t"], spark={"master": f"local[{cores}]", "conf": conf})
    pipeline.source("CREATE TABLE public.t (k int PRIMARY KEY, v text)")
    pipeline.provision()
    pipeline.copy()
    return pipeline


def event_log(directory: Path) -> list[str]:
    """Return the events, each as JSON, without the checksum files that Hadoop writes next to them."""
    logs = [path for path in (directory / "events").rglob("[!.]*") if path.is_file()]
    return [line for path in logs for line in path.read_text().splitlines()]


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("changes", "told"), [*((name, True) for name in CHANGES), ("rows", False)])
def test_pieces_are_staged_where_they_are_read_if_that_is_known_in_time(
    databases: Databases, tmp_path: Path, changes: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes since the batch was planned are passed to later tasks instead; the rows are the same.

    The same holds if tasks receive no information.
    """
    monkeypatch.setattr(pipelined_commit, "PATIENCE_SECONDS", SECONDS)  # a busy machine stages slowly
    pipeline = copied(databases, tmp_path, cores=1)
    pipeline.source(*CHANGES[changes])
    behind: list[str] = []
    map_in_arrow: Any = DataFrame.mapInArrow

    def counted(self: DataFrame, function: Any, schema: Any) -> Any:
        behind.append(schema)
        return map_in_arrow(self, function, schema)

    monkeypatch.setattr(DataFrame, "mapInArrow", counted)
    ahead: list[int] = []
    commit_as_staged = PostgresSink.commit_as_staged

    def noted(sink: PostgresSink, epoch: int, start: int, end: int, pieces: Iterator[StagedPiece]) -> bool:
        committed = commit_as_staged(sink, epoch, start, end, pieces)
        ahead.append(end)
        return committed

    monkeypatch.setattr(PostgresSink, "commit_as_staged", noted)
    if not told:
        monkeypatch.setattr(SparkContext, "setLocalProperty", lambda *_: None)
    commands.stream(pipeline.pipeline, until="caught-up")
    assert bool(behind) == (changes != "rows" or not told)
    pipeline.assert_equal()
    assert bool(ahead) == told, "units are applied while they are staged, if tasks can tell of it"
    seen = "\n".join(event_log(tmp_path))
    found = {json.loads(value) for value in re.findall(r'"airflow_cdc\.stage":("[^"]*")', seen)}
    assert bool(found) == told
    assert all(value.isdigit() for value in found)
    assert databases.target not in seen
    assert "zebra" not in seen


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cores", "told"), [(1, True), (2, True), (1, False)])
def test_a_batch_has_no_more_tasks_than_run_at_once(
    databases: Databases, tmp_path: Path, cores: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine a task takes several pieces, each of which is staged once, in the read or after it."""
    pipeline = copied(databases, tmp_path, cores)
    pipeline.source("INSERT INTO public.t SELECT n, repeat('v', 8000) FROM generate_series(1, 3750) n")
    staged: list[list[int]] = []
    stage = InlineStaging.stage

    def noted(self: InlineStaging, *arguments: Any) -> list[Any]:
        messages = stage(self, *arguments)
        staged.append(sorted(message.index for message in messages))
        return messages

    monkeypatch.setattr(InlineStaging, "stage", noted)
    if not told:
        monkeypatch.setattr(SparkContext, "setLocalProperty", lambda *_: None)
    commands.stream(pipeline.pipeline, until="caught-up")
    pipeline.assert_equal()
    assert [0, 1, 2, 3] in staged
    events = [json.loads(line) for line in event_log(tmp_path)]
    stages = [event["Stage Info"] for event in events if event["Event"] == "SparkListenerStageCompleted"]
    assert max(stage["Number of Tasks"] for stage in stages) == cores
