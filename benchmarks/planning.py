"""Measures the planning of chunks on a large table, which happens once per snapshot, next to a count of its rows."""

from __future__ import annotations

import time
from itertools import pairwise

from airflow_cdc_provider.engine.pipeline.settings import SnapshotSettings
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import plan
from benchmarks.lab import TABLE, Lab, create_database, drop_database, execute, query
from benchmarks.report import Series, check, tell
from benchmarks.shapes import NARROW

PLANNING = "planning"
COUNT = "planning: count(*)"
_DATABASE = "planning"
_TIMES_TOO_LARGE = 2


def measure(lab: Lab, rows: int, repeat: int) -> list[Series]:
    """Plan and count in turn, and check that chunks are less than twice as large as intended.

    :param rows: number of narrow rows in the table.
    """
    create_database(lab.source, _DATABASE)
    dsn = lab.source.dsn(_DATABASE)
    execute(dsn, NARROW.ddl(TABLE), NARROW.insert(TABLE, 1, rows), f"VACUUM ANALYZE public.{TABLE}")
    lab.settle()
    planned: list[float] = []
    counted: list[float] = []
    for _ in range(repeat):
        planned.append(_plan(lab, dsn, rows))
        tell(PLANNING, rows, planned[-1])
        started = time.monotonic()
        check((rows,), query(dsn, f"SELECT count(*) FROM public.{TABLE}"), "rows")
        counted.append(time.monotonic() - started)
        tell(COUNT, rows, counted[-1])
    drop_database(lab.source, _DATABASE)
    return [Series(COUNT, rows, tuple(counted)), Series(PLANNING, rows, tuple(planned), COUNT)]


def _plan(lab: Lab, dsn: str, rows: int) -> float:
    chunk_rows = SnapshotSettings().chunk_rows
    with connected(dsn) as source:
        (table,) = resolve(source, lab.pipeline("bench", _DATABASE).source.tables)
        started = time.monotonic()
        chunks = plan(source, table, chunk_rows)
        seconds = time.monotonic() - started
    # Keys are 1 to rows without a gap, so the bounds give the sizes.
    bounds = [1, *(int(chunk.lower[0]) for chunk in chunks if chunk.lower is not None), rows + 1]
    largest = max(upper - lower for lower, upper in pairwise(bounds))
    check(True, bounds == sorted(bounds) and largest < _TIMES_TOO_LARGE * chunk_rows, f"{PLANNING}: sizes of chunks")
    return seconds
