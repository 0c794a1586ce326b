"""Measures the floor of a batch: the time of an empty and of a one-row batch in a warm session, by phase.

The durations are those that Spark reports for each batch. An empty batch only moves the position past a message in the
log.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.settings import SnapshotSettings
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from benchmarks.lab import TABLE_DDL, create_database, execute, fill, laboratory
from benchmarks.report import check, spread

FLOOR = "floor"
EMPTY, ONE_ROW = "empty", "one row"
WHOLE = "whole"
"""The whole batch, from the start of its planning; the other phases, under Spark's names, are parts of it."""

_WARM = 10
_SECONDS = 60.0


@dataclass(frozen=True)
class Floor:
    """Milliseconds of each batch by phase, grouped by kind of batch."""

    batches: dict[str, tuple[dict[str, int], ...]]

    name: ClassVar[str] = FLOOR
    faults: ClassVar[tuple[str, ...]] = ()

    def phases(self, kind: str) -> dict[str, dict[str, float]]:
        """Return the spread of each phase in milliseconds, longest first."""
        found = self.batches[kind]
        phases = {phase: [batch.get(phase, 0) for batch in found] for phase in found[0]}
        return {phase: spread(each) for phase, each in sorted(phases.items(), key=lambda item: -median(item[1]))}

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {kind: {"phases": self.phases(kind), "batches": found} for kind, found in self.batches.items()}

    def as_text(self) -> str:
        """Return a table with a row per phase."""
        body = [
            [kind, phase, *(f"{each[name]:.0f}" for name in ("median", "min", "max"))]
            for kind in self.batches
            for phase, each in self.phases(kind).items()
        ]
        return text_table(["batch", "phase", "ms", "min", "max"], body)


def measure(batches: int) -> Floor:
    """Let a stream process some batches of each kind, in turn.

    :raises WrongResult: if a batch is not applied, or source and target differ at the end.
    """
    with laboratory() as lab:
        create_database(lab.source, FLOOR)
        create_database(lab.target, FLOOR)
        execute(lab.source.dsn(FLOOR), TABLE_DDL)
        pipeline = replace(lab.pipeline(FLOOR, FLOOR), snapshot=SnapshotSettings(mode="never"))
        commands.provision(pipeline)
        found = _follow(lab.spark, pipeline, batches)
        lab.check_equal(FLOOR, FLOOR, FLOOR)
        commands.drop(pipeline)
    return Floor(found)


def _follow(spark: SparkSession, pipeline: Pipeline, batches: int) -> dict[str, tuple[dict[str, int], ...]]:
    dsn, done = pipeline.source.dsn, StreamProgress(0)
    found: dict[str, tuple[dict[str, int], ...]] = {EMPTY: (), ONE_ROW: ()}

    def tell(progress: StreamProgress) -> None:
        nonlocal done
        done = progress

    def write_row(row: int) -> None:
        fill(dsn, row, row)
        check(True, await_condition(lambda: done.changes >= row, _SECONDS, 0.005), "a row applied")

    def write_message(_: int) -> None:
        with connected(dsn) as connection:
            marker = emit_marker(connection, FLOOR)
        check(True, await_condition(lambda: done.applied >= marker, _SECONDS, 0.005), "a message passed")

    with run_part(pipeline, "stream", None) as (run, record), ThreadPoolExecutor(1) as thread:
        following = thread.submit(StreamJob(spark, run, record, tell).follow, None)
        try:
            for row in range(1, _WARM + 1):
                write_row(row)
            for row in range(_WARM + 1, _WARM + batches + 1):  # in turn, because a JVM gets faster for minutes
                for kind, write in ((EMPTY, write_message), (ONE_ROW, write_row)):
                    found[kind] += _batches(spark, partial(write, row))
        finally:
            run.ask_to_stop()
        following.result()
    return found


def _batches(spark: SparkSession, write: Callable[[], None]) -> tuple[dict[str, int], ...]:
    """Call ``write`` and return the durations of the batch that follows; a heartbeat may add another batch."""
    (query,) = spark.streams.active
    last = max(_reported(query))

    def news() -> tuple[dict[str, int], ...]:
        return tuple(durations for batch, durations in _reported(query).items() if batch > last)

    write()
    check(True, await_condition(lambda: bool(news()), _SECONDS, 0.01), "a batch reported by Spark")
    return news()


def _reported(query: StreamingQuery) -> dict[int, dict[str, int]]:
    """Return the durations of the last batches by number, without triggers that ran no batch."""
    return {each.batchId: _phases(each.durationMs) for each in query.recentProgress if "addBatch" in each.durationMs}


def _phases(durations: dict[str, int]) -> dict[str, int]:
    """Return the phases of a batch, without the offset phase, in which the source waits for changes."""
    told = {name: value for name, value in durations.items() if name not in ("triggerExecution", "latestOffset")}
    return {WHOLE: durations["triggerExecution"] - durations["latestOffset"], **told}
