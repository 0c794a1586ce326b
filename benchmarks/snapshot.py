"""Measures the snapshot: Spark tasks copy chunks into sinks, and other programs copy the same table.

Each case writes into an empty table with a primary key, or into an empty folder or topic. The time includes the chunks'
snapshots, locks, markers and commits, but not the planning of the chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import copy_chunks
from benchmarks.backlog import PUBLICATION, sums
from benchmarks.lab import Lab, create_database, drop_database, execute
from benchmarks.outlets import OUTLETS, Outlet
from benchmarks.peers import copies, debezium, jdbc
from benchmarks.report import Series, check, tell
from benchmarks.shapes import Row, Shape

SNAPSHOT = "snapshot"
PIPELINES = {(SNAPSHOT if name == "mirror" else f"{SNAPSHOT}-{name}"): outlet for name, outlet in OUTLETS.items()}
DUMP = "pg_dump"
PEERS = (DUMP, jdbc.JDBC, jdbc.PARQUET, debezium.SNAPSHOT)
CASES = (*PIPELINES, *PEERS)
READERS = 2
"""Default number of chunks at a time."""

_WARM_ROWS = 20_000


def measure(
    lab: Lab, rows: int, repeat: int, cases: Collection[str], row: Row, readers: Sequence[int] = (READERS,)
) -> list[Series]:
    """Run ``COPY`` and the cases, one after the other in every repeat, so that the machine's fluctuations affect all.

    :param readers: numbers of chunks at a time for each case of this project.
    """
    if rows > _WARM_ROWS:
        _measure(lab, "snapshot_warm", _WARM_ROWS, 1, cases, Shape(row), readers[:1])
    return _measure(lab, "snapshot", rows, repeat, cases, Shape(row), readers)


def _measure(
    lab: Lab, database: str, rows: int, repeat: int, cases: Collection[str], shape: Shape, readers: Sequence[int]
) -> list[Series]:
    create_database(lab.source, database)
    dsn = lab.source.dsn(database)
    publication = f"CREATE PUBLICATION {PUBLICATION} FOR TABLE public.t"
    execute(dsn, *shape.ddl, *shape.fill(rows, 0), "VACUUM ANALYZE public.t", publication)
    peers: dict[str, Callable[[], float]] = {
        DUMP: lambda: _dump(lab, database, shape),
        jdbc.JDBC: lambda: jdbc.copy(lab, database, shape, rows),
        jdbc.PARQUET: lambda: jdbc.to_parquet(lab, database, shape, rows),
        debezium.SNAPSHOT: lambda: debezium.snapshot(lab, database, rows, rows * (rows + 1) // 2),
    }
    ours = {
        case if n == READERS else f"{case}, {n} reader{'s' if n > 1 else ''}": partial(
            _chunks, lab, database, case, outlet, shape, rows, n
        )
        for case, outlet in PIPELINES.items()
        for n in readers
        if case in cases
    }
    runs = {copies.COPY: lambda: _copy(lab, database, shape), **{c: p for c, p in peers.items() if c in cases}, **ours}
    seconds: dict[str, list[float]] = {case: [] for case in runs}
    for _ in range(repeat):
        for case, run in runs.items():
            seconds[case].append(run())
            tell(f"{case}{shape.title}", rows, seconds[case][-1])
    drop_database(lab.source, database)
    peer = f"{copies.COPY}{shape.title}"
    return [
        Series(
            f"{case}{shape.title}",
            rows,
            tuple(taken),
            None if case == copies.COPY else peer,
            tuple(f"{other}{shape.title}" for other in _others(case) if other in runs),
        )
        for case, taken in seconds.items()
    ]


def _others(case: str) -> tuple[str, ...]:
    """Return further peers, in addition to ``COPY``, to compare a case with."""
    name = case.partition(",")[0]
    into_files = (f"{SNAPSHOT}-files", f"{SNAPSHOT}-delta", f"{SNAPSHOT}-delta-changelog")
    like = {SNAPSHOT: (DUMP, jdbc.JDBC), **dict.fromkeys(into_files, (jdbc.PARQUET,))}
    return (*like.get(name, ()), debezium.SNAPSHOT) if name in PIPELINES else ()


def _copy(lab: Lab, database: str, shape: Shape) -> float:
    with copies.target(lab, database, shape, copies.COPY) as into:
        started = time.monotonic()
        copies.copy(lab, lab.source.dsn(database), into)
        return time.monotonic() - started


def _dump(lab: Lab, database: str, shape: Shape) -> float:
    with copies.target(lab, database, shape, copies.DUMP) as into:
        started = time.monotonic()
        copies.dump(lab, lab.source.dsn(database), into)
        return time.monotonic() - started


def _chunks(lab: Lab, database: str, case: str, outlet: Outlet, shape: Shape, rows: int, readers: int) -> float:
    """Return the seconds that a provisioned pipeline takes to copy its chunks."""
    section = outlet.section(lab, database)
    pipeline = lab.pipeline(database, database, section, publication=PUBLICATION, parallelism=readers)
    commands.provision(pipeline)
    with run_part(pipeline, "snapshot", None) as (run, record):
        lab.settle()
        started = time.monotonic()
        progress = copy_chunks(lab.spark, run, record, choose_chunks(record), lambda progress: None)
        seconds = time.monotonic() - started
    check(rows, progress.rows, f"{case}: rows copied")
    right = sums(lab.source.dsn(database), shape, mirror=outlet.mode == "mirror")
    check(right, outlet.sums(lab, database, shape), f"{case}: sums")
    if case == SNAPSHOT:
        lab.check_equal(database, database, f"{case}: rows and checksum")
    commands.drop(pipeline)
    outlet.discard(lab, database, shape)
    return seconds
