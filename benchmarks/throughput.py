"""Measures rows per second in one laboratory: drains of backlogs, snapshots, planning, and a load during a snapshot."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from benchmarks import concurrent_load, planning, snapshot, stream
from benchmarks.lab import JDBC, laboratory
from benchmarks.outlets import Outlet
from benchmarks.peers import jdbc
from benchmarks.report import Series
from benchmarks.shapes import Shape

CASES = {
    snapshot.SNAPSHOT: "copy of a table into a mirror, compared with COPY",
    **{case: f"the same, into {case.partition('-')[2]}" for case in snapshot.PIPELINES if case != snapshot.SNAPSHOT},
    **dict.fromkeys(snapshot.PEERS, "another program, compared with snapshots"),
    stream.NOOP: "backlog, decoded and discarded, compared with pg_recvlogical",
    stream.PARQUET: "the same, with each change written to Parquet",
    **{case: f"the same, into {case.partition('-')[2]}" for case in stream.PIPELINES},
    **dict.fromkeys(stream.PEERS, "another program, compared with streams"),
    planning.PLANNING: "division of a large table into chunks",
    concurrent_load.CASE: "pgbench during a snapshot",
}
"""All cases that can be measured, with their descriptions."""


def measure(
    cases: Collection[str],
    rows: int,
    repeat: int,
    shapes: Sequence[Shape] = (Shape(),),
    readers: Sequence[int] = (snapshot.READERS,),
) -> list[Series]:
    """Start the servers that the cases need, and run the cases.

    :param cases: any of :data:`CASES`.
    :param rows: rows of snapshots, and changes of backlogs.
    :param shapes: shapes of backlogs; snapshots copy tables of their rows.
    :param readers: numbers of chunks at a time.
    """
    outlets: list[Outlet] = [
        outlet for case, outlet in {**stream.PIPELINES, **snapshot.PIPELINES}.items() if case in cases
    ]
    packages = {outlet.package for outlet in outlets if outlet.package}
    if not {jdbc.JDBC, jdbc.PARQUET}.isdisjoint(cases):
        packages.add(JDBC)
    servers = {outlet.server for outlet in outlets if outlet.server}
    series: list[Series] = []
    with laboratory(servers, sorted(packages), max(2, *readers)) as lab:
        if not set(snapshot.CASES).isdisjoint(cases):
            for row in dict.fromkeys(shape.row for shape in shapes):
                series += snapshot.measure(lab, rows, repeat, cases, row, readers)
        if not set(stream.CASES).isdisjoint(cases):
            series += stream.measure(lab, rows, repeat, cases, shapes)
        if planning.PLANNING in cases:
            series += planning.measure(lab, rows, repeat)
        if concurrent_load.CASE in cases:
            series += concurrent_load.measure(lab, rows, repeat)
    return series
