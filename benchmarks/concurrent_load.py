"""Measures what a snapshot costs the source's other work: the rate of pgbench alongside it, and alongside two ``COPY``.

The load is pgbench's default (TPC-B, four clients), in another database of the source's server. Each transaction adds a
row to the history table, so the rows there count the transactions. Rates are transactions per second while the copy
runs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import copy_chunks
from benchmarks.backlog import sums
from benchmarks.lab import TABLE_DDL, Lab, create_database, drop_database, execute, fill, query
from benchmarks.outlets import OUTLETS
from benchmarks.peers import copies
from benchmarks.report import Series, WrongResult, check, tell
from benchmarks.shapes import Shape

CASE = "concurrent-load"
ALONE, BY_SNAPSHOT, BY_COPY = "pgbench alone", "pgbench during a snapshot", "pgbench during COPY by 2 readers"
_DATABASE, _LOAD = "concurrent", "concurrent_load"
_SCALE, _CLIENTS = 10, 4
_UNIT = 1000
"""Number of transactions for which a series gives the time."""


def measure(lab: Lab, rows: int, repeat: int) -> list[Series]:
    """Run pgbench alone, alongside a snapshot and alongside ``COPY``, in turn.

    :param rows: rows of the table that is copied. Without a copy, pgbench runs for as long as the snapshot took.
    """
    create_database(lab.source, _DATABASE)
    execute(lab.source.dsn(_DATABASE), TABLE_DDL)
    fill(lab.source.dsn(_DATABASE), 1, rows)
    create_database(lab.source, _LOAD)
    command = [*_pgbench(lab), "--initialize", f"--scale={_SCALE}", "--quiet", lab.source.dsn(_LOAD)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    taken: dict[str, list[float]] = {ALONE: [], BY_SNAPSHOT: [], BY_COPY: []}

    def note(case: str, work: Callable[[], None]) -> float:
        transactions, seconds = _while(lab, work)
        tell(case, transactions, seconds)
        taken[case].append(_UNIT * seconds / transactions)
        return seconds

    for _ in range(repeat):
        with _snapshot(lab, rows) as snapshot:
            seconds = note(BY_SNAPSHOT, snapshot)
        with copies.target(lab, _DATABASE, Shape(), BY_COPY) as into:
            halves = (f"id <= {rows // 2}", f"id > {rows // 2}")
            source = lab.source.dsn(_DATABASE)
            note(BY_COPY, lambda: copies.copy(lab, source, into, halves))  # noqa: B023 - called at once
        note(ALONE, lambda: time.sleep(seconds))  # noqa: B023 - called at once
    for database in (_DATABASE, _LOAD):
        drop_database(lab.source, database)
    return [
        Series(case, _UNIT, tuple(times), None if case == ALONE else ALONE, (BY_COPY,) if case == BY_SNAPSHOT else ())
        for case, times in taken.items()
    ]


def _while(lab: Lab, work: Callable[[], None]) -> tuple[int, float]:
    """Return the number of transactions committed while ``work`` runs, and the seconds that it took."""
    dsn = lab.source.dsn(_LOAD)
    execute(dsn, "TRUNCATE pgbench_history")
    command = [*_pgbench(lab), "--no-vacuum", f"--client={_CLIENTS}", "--time=86400", dsn]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pgbench:
        try:
            before = _await_first(dsn)
            started = time.monotonic()
            work()
            seconds = time.monotonic() - started
            after = _committed(dsn)
            check(None, pgbench.poll(), "pgbench's exit code")
        finally:
            pgbench.kill()
    return after - before, seconds


def _await_first(dsn: str) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := _committed(dsn):
            return found
        time.sleep(0.05)
    raise WrongResult("pgbench committed no transaction within a minute")


def _committed(dsn: str) -> int:
    (found,) = query(dsn, "SELECT count(*) FROM pgbench_history")
    assert isinstance(found, int)
    return found


@contextmanager
def _snapshot(lab: Lab, rows: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies the chunks of a provisioned pipeline, and check the result afterwards."""
    outlet, shape = OUTLETS["mirror"], Shape()
    pipeline = lab.pipeline(_DATABASE, _DATABASE, outlet.section(lab, _DATABASE))
    commands.provision(pipeline)
    with run_part(pipeline, "snapshot", None) as (run, record):
        lab.settle()

        def copy() -> None:
            check(rows, copy_chunks(lab.spark, run, record, choose_chunks(record), lambda _: None).rows, "rows copied")

        yield copy
    right = sums(lab.source.dsn(_DATABASE), shape, mirror=True)
    check(right, outlet.sums(lab, _DATABASE, shape), f"{BY_SNAPSHOT}: sums")
    commands.drop(pipeline)
    outlet.discard(lab, _DATABASE, shape)


def _pgbench(lab: Lab) -> list[str]:
    return [str(lab.source.binaries / "pgbench")]
