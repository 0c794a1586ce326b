"""What is measured in rows a second, in one laboratory: drains of backlogs, snapshots, planning, the load beside."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from benchmarks import beside, planning, snapshot, stream
from benchmarks.lab import JDBC, laboratory
from benchmarks.outlets import Outlet
from benchmarks.peers import jdbc
from benchmarks.report import Series
from benchmarks.shapes import Shape

CASES = {
    snapshot.SNAPSHOT: "the copy of a table into a mirror, against COPY",
    **{case: f"the same, to {case.partition('-')[2]}" for case in snapshot.PIPELINES if case != snapshot.SNAPSHOT},
    **dict.fromkeys(snapshot.PEERS, "a peer of snapshots"),
    stream.NOOP: "a backlog of the log, decoded and thrown away, against pg_recvlogical",
    stream.PARQUET: "the same, each change written to Parquet",
    **{case: f"the same, to {case.partition('-')[2]}" for case in stream.PIPELINES},
    **dict.fromkeys(stream.PEERS, "a peer of streams"),
    planning.PLANNING: "cutting a large table into chunks",
    beside.BESIDE: "pgbench beside a snapshot",
}
"""All that can be measured, and what it is."""


def measure(
    cases: Collection[str],
    rows: int,
    repeat: int,
    shapes: Sequence[Shape] = (Shape(),),
    readers: Sequence[int] = (snapshot.READERS,),
) -> list[Series]:
    """Start what cases need, and run them.

    :param cases: some of :data:`CASES`.
    :param rows: of snapshots, and changes of backlogs.
    :param shapes: of backlogs; snapshots copy tables of their rows.
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
        if beside.BESIDE in cases:
            series += beside.measure(lab, rows, repeat)
    return series
