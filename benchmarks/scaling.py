"""Measures scaling: whether a change costs the same with more executors, more tables and longer backlogs.

Every point drains a backlog into a mirror in a warm session, and differs from the other points of its axis in one
number only. Time starts with the slot's walsender and ends with the commit of the last unit; the CPU time of the job,
the walsender and the target covers the same span. Executors are separate processes with one core each
(``local-cluster[n,1,1024]``). For the axes of tables and backlogs, ``local[2]`` drains them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psycopg

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
from airflow_cdc_provider.engine.spark.session import spark_session
from airflow_cdc_provider.engine.spark.settings import SparkSettings
from benchmarks.lab import ROW, TABLE_DDL, Lab, create_database, drop_database, execute, laboratory, query
from benchmarks.processes import Meter
from benchmarks.report import check, spread, tell

SCALING = "scaling"
EXECUTORS, TABLES, BACKLOG = "executors", "tables", "backlog"
AXES = {
    EXECUTORS: (1, 2, 4),
    TABLES: (1, 10, 100, 1000),
    BACKLOG: (100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000),
}

_STEP = 100
"""Consecutive changes of one table: half of them inserts, half of them updates of the previous step's inserts."""
_STEPS_A_TRANSACTION = 10
_TRANSACTION = _STEP * _STEPS_A_TRANSACTION
_HALF = _STEP // 2
_WARM_CHANGES = 20 * _TRANSACTION
_REPEATED = 16_000_000
"""Longer backlogs are drained once: they last long enough to average out fluctuations of the machine."""
_SECONDS = 120.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Drain:
    """One drain of a backlog.

    :param seconds: from the start of the walsender until everything is committed.
    :param cpu: seconds of CPU time in that span by kind, see :mod:`.processes`.
    """

    seconds: float
    cpu: dict[str, float]


@dataclass(frozen=True)
class Point:
    """The repeats of one point.

    :param x: position on its axis.
    :param log: bytes of the log that the backlog occupies.
    """

    x: int
    changes: int
    log: int
    drains: tuple[Drain, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values; microseconds are per change."""
        spent = [sum(each.cpu.values()) for each in self.drains]
        return {
            "x": self.x,
            "changes": self.changes,
            "log": self.log,
            "seconds": [round(each.seconds, 3) for each in self.drains],
            "cpu": [{kind: round(seconds, 2) for kind, seconds in each.cpu.items()} for each in self.drains],
            "changes_per_second": spread((self.changes / each.seconds for each in self.drains), 0),
            "microseconds": spread(each.seconds / self.changes * 1e6 for each in self.drains),
            "cpu_microseconds": spread(each / self.changes * 1e6 for each in spent),
        }


@dataclass(frozen=True)
class Scaling:
    """The points of each axis."""

    axes: dict[str, tuple[Point, ...]]

    name: ClassVar[str] = SCALING
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {axis: [each.as_json() for each in points] for axis, points in self.axes.items()}

    def as_text(self) -> str:
        """Return a table with a row per point."""
        body = []
        for axis, points in self.as_json().items():
            for each in points:
                rate, cost, cpu = (each[name] for name in ("changes_per_second", "microseconds", "cpu_microseconds"))
                sizes = (f"{each['x']:,}", f"{each['changes']:,}", f"{each['log'] / _MIB:,.0f}")
                rates = (f"{rate['median']:,.0f}", f"{rate['min']:,.0f}-{rate['max']:,.0f}")
                body.append([axis, *sizes, *rates, f"{cost['median']:.1f}", f"{cpu['median']:.1f}"])
        return text_table(
            ["axis", "", "changes", "MiB of log", "changes/s", "min-max", "µs a change", "CPU µs a change"], body
        )


def measure(changes: int, repeat: int, axes: Mapping[str, Sequence[int]]) -> Scaling:
    """Measure all points on some axes.

    :param changes: number of changes per drain, except on the axis :data:`BACKLOG`.
    :param axes: the points of each axis of :data:`AXES`.
    :raises WrongResult: if a mirror is wrong.
    """
    whole = _whole(changes)
    with laboratory() as lab:
        _warm(lab, whole)
        found = {
            TABLES: [_point(lab, TABLES, x, x, whole, repeat) for x in axes[TABLES]],
            BACKLOG: [_point(lab, BACKLOG, x, 1, _whole(x), repeat if x <= _REPEATED else 1) for x in axes[BACKLOG]],
            EXECUTORS: [],
        }
        for x in axes[EXECUTORS]:
            with _executors(lab, x) as other:
                _warm(other, whole)
                found[EXECUTORS].append(_point(other, EXECUTORS, x, 1, whole, repeat))
    return Scaling({axis: tuple(found[axis]) for axis in AXES if found[axis]})


def _whole(changes: int) -> int:
    return max(1, changes // _TRANSACTION) * _TRANSACTION


@contextmanager
def _executors(lab: Lab, count: int) -> Iterator[Lab]:
    """Return the same servers with another session in the same JVM, which can have only one at a time."""
    lab.spark.stop()
    settings = SparkSettings(
        f"local-cluster[{count},1,1024]", {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    )
    with spark_session(replace(lab.pipeline("bench", "postgres"), spark=settings).spark_start, "benchmark") as spark:
        yield replace(lab, spark=spark, cores=count)


def _warm(lab: Lab, changes: int) -> None:
    """Drain a small backlog, so that the session has already run all of the code."""
    few = min(changes, _WARM_CHANGES)
    _point(lab, "warm", few, 1, few, 1)


def _point(lab: Lab, axis: str, x: int, tables: int, changes: int, repeat: int) -> Point:
    """Drain the same backlog several times, each time into a new mirror."""
    database = f"{axis}{x}"
    create_database(lab.source, database)
    dsn = lab.source.dsn(database)
    names = [f"t{n}" for n in range(tables)]
    execute(dsn, *(TABLE_DDL.replace("public.t ", f"public.{name} ") for name in names), *map(_first_rows, names))
    pipelines = [_provision(lab, database, f"{database}_{i}", names) for i in range(repeat)]
    began, end = _write(dsn, tables, changes)
    drains = tuple(_drain(lab, pipeline, names, changes, end) for pipeline in pipelines)
    drop_database(lab.source, database)
    tell(f"{SCALING}, {x:,} {axis}", changes, min(each.seconds for each in drains))
    return Point(x, changes, end - began, drains)


def _provision(lab: Lab, database: str, name: str, tables: Sequence[str]) -> Pipeline:
    """Provision a pipeline whose mirror has the rows that precede the backlog."""
    create_database(lab.target, name)
    pipeline = replace(
        lab.pipeline(name, database, tables=[f"public.{table}" for table in tables]),  # type: ignore[arg-type]
        snapshot=SnapshotSettings(mode="never"),
    )
    commands.provision(pipeline)
    execute(lab.target.dsn(name), *map(_first_rows, tables))
    return pipeline


def _first_rows(table: str) -> str:
    return f"INSERT INTO public.{table} SELECT {ROW} FROM generate_series(1::bigint, {_HALF}::bigint) AS n"


def _write(dsn: str, tables: int, changes: int) -> tuple[int, int]:
    """Write a backlog, one table's step after another's, and return the LSNs of the markers around it."""
    row = ROW.replace("'", "''")
    text = f"""
        DO $$ DECLARE low bigint; BEGIN FOR k IN 0..{changes // _STEP - 1} LOOP
            low := k / {tables} * {_HALF};
            EXECUTE format('INSERT INTO public.t%s SELECT {row.replace("%", "%%")}
                FROM generate_series(%s::bigint, %s::bigint) AS n', k % {tables}, low + {_HALF} + 1, low + {_STEP});
            EXECUTE format('UPDATE public.t%s SET amount = amount + 1, status = ''changed''
                WHERE id BETWEEN %s AND %s', k % {tables}, low + 1, low + {_HALF});
            IF (k + 1) % {_STEPS_A_TRANSACTION} = 0 THEN COMMIT; END IF;
        END LOOP; END $$
    """
    with connected(dsn) as source:
        began = emit_marker(source, "begin")
        execute(dsn, "SET synchronous_commit = off", text)
        return began, emit_marker(source, "end")


def _drain(lab: Lab, pipeline: Pipeline, tables: Sequence[str], changes: int, end: int) -> Drain:
    source, target = pipeline.source.dsn, lab.target.dsn(pipeline.name)
    lab.settle()
    ended = 0.0
    meter = Meter(os.getpid(), lab.source, lab.target)

    def see(progress: StreamProgress) -> None:
        nonlocal ended
        if progress.applied >= end and not ended:
            ended = time.time()

    with run_part(pipeline, "stream", None) as (run, record), ThreadPoolExecutor(1) as thread:
        following = thread.submit(StreamJob(lab.spark, run, record, see).follow, end)
        try:
            began = _walsender(source, pipeline.source.slot, following.done)
            before = meter.read()
            await_condition(lambda: bool(ended) or following.done(), 3600.0, 0.01)
            cpu = meter.since(before)
        finally:
            run.ask_to_stop()
        check(changes, following.result().changes, f"{SCALING}: changes")
    for table in tables:
        check(_checksum(source, table), _checksum(target, table), f"{SCALING}: rows and checksum of {table}")
    commands.drop(pipeline)
    drop_database(lab.target, pipeline.name)
    del cpu["source"]  # it writes nothing meanwhile
    return Drain(ended - began, cpu)


def _walsender(dsn: str, slot: str, over: Callable[[], bool]) -> float:
    """Wait until a slot's walsender has started, and return the start time."""
    text = "SELECT extract(epoch FROM backend_start)::float8 FROM pg_stat_replication WHERE application_name = %s"
    began: list[float] = []

    with psycopg.connect(dsn, autocommit=True) as connection:

        def started() -> bool:
            began.extend(at for (at,) in connection.execute(text, [f"airflow-cdc {slot}"]))
            return bool(began) or over()

        await_condition(started, _SECONDS, 0.02)
    check(1, len(began), "walsenders of the slot")
    return began[0]


def _checksum(dsn: str, table: str) -> tuple[object, ...]:
    return query(dsn, f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM public.{table} AS t")
