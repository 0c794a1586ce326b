"""Measures views: a wide table that moves with its mirror, against the mirror alone and against a full refresh.

Orders, customers and products are copied into a mirror with the view ``wide`` of one row an order. A backlog consists
of units, each of which updates orders all over the table, some customers and some products; it is drained with and
without the view. A tenth of these changes is drained into the same tables and into tables of a tenth of the size.
Finally, single customers with more and more orders are renamed while the stream runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, ClassVar

import psycopg

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.settings import SnapshotSettings
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from benchmarks.backlog import walsender_start
from benchmarks.lab import Lab, create_database, drop_database, execute, laboratory, query
from benchmarks.orders import SELECT, TABLES, UNITS, Unit
from benchmarks.orders import fill as rows_of
from benchmarks.report import check, spread, tell

VIEWS = "views"
FAN_OUT = (1, 100, 10_000, 1_000_000)

_SECONDS = 600.0
_POLL_SECONDS = 0.02
_WAITING = "SELECT count(*) FROM airflow_cdc.views WHERE behind_lsn IS NOT NULL OR NOT complete"


@dataclass(frozen=True)
class FanOut:
    """The renaming of a customer with many orders.

    :param rows: number of its orders.
    :param seconds: from the commit at the source until all rows of the view are up to date.
    :param lag: highest lag of the stream meanwhile, in seconds.
    """

    rows: int
    seconds: float
    lag: float


@dataclass(frozen=True)
class Views:
    """What views cost.

    :param changes: number of changes of a backlog.
    :param mirror, view: seconds of each repeat, without and with the view.
    :param fewer: number of changes of a tenth of the backlog.
    :param large, small: seconds of each repeat for these, with the view over tables of both sizes.
    :param large_alone, small_alone: the same without the view.
    :param upkeep: seconds a unit that the view takes, as the record has it.
    :param refresh: seconds of each REFRESH MATERIALIZED VIEW of the same SELECT.
    :param fan_out: single changes that affect many rows.
    """

    changes: int
    mirror: tuple[float, ...]
    view: tuple[float, ...]
    fewer: int
    large: tuple[float, ...]
    small: tuple[float, ...]
    large_alone: tuple[float, ...]
    small_alone: tuple[float, ...]
    upkeep: float
    refresh: tuple[float, ...]
    fan_out: tuple[FanOut, ...]

    name: ClassVar[str] = VIEWS
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        found = {
            name: {"changes": changes, "seconds": [round(s, 3) for s in series]}
            | spread((changes / s for s in series), 0)
            for name, (changes, series) in self._series().items()
        }
        return {
            "cases": found,
            "ratio_to_mirror": round(median(self.mirror) / median(self.view), 3),
            "ratio_to_small": round(median(self.large) / median(self.small), 3),
            "ratio_to_small_alone": round(median(self.large_alone) / median(self.small_alone), 3),
            "upkeep_seconds_a_unit": round(self.upkeep, 3),
            "refresh": spread(self.refresh, 3),
            "fan_out": [asdict(each) for each in self.fan_out],
        }

    def _series(self) -> dict[str, tuple[int, tuple[float, ...]]]:
        return {
            "mirror": (self.changes, self.mirror),
            "mirror + view": (self.changes, self.view),
            "mirror + view, fewer changes": (self.fewer, self.large),
            "the same, smaller tables": (self.fewer, self.small),
            "mirror, fewer changes": (self.fewer, self.large_alone),
            "the same, smaller tables, without the view": (self.fewer, self.small_alone),
        }

    def as_text(self) -> str:
        """Return the figures as tables."""
        found = self.as_json()
        cases = [
            [name, f"{each['median']:,.0f}", f"{each['min']:,.0f}-{each['max']:,.0f}"]
            for name, each in found["cases"].items()
        ]
        single = [[f"{each.rows:,}", f"{each.seconds:.2f}", f"{each.lag:.2f}"] for each in self.fan_out]
        return "\n".join(
            [
                text_table(["case", "changes/s", "min-max"], cases),
                f"with the view {found['ratio_to_mirror']:.2f} times as fast as the mirror alone; the same changes of"
                f" tables ten times as large take {found['ratio_to_small']:.2f} times the time, without the view"
                f" {found['ratio_to_small_alone']:.2f} times",
                f"upkeep of the view {self.upkeep:.2f} s a unit, a full refresh {found['refresh']['median']:.2f} s",
                text_table(["rows of one customer", "seconds", "lag of the stream"], single),
            ]
        )


def measure(orders: int, repeat: int) -> Views:
    """Measure all of it.

    :param orders: number of orders; a unit changes the share of them that it changes of a million.
    :raises WrongResult: if a view differs from its SELECT.
    """
    with laboratory() as lab:
        _drain(lab, "warm", orders // 10, Unit.of(orders // 10), False)  # so that the session has run all of the code
        unit, fewer = Unit.of(orders), Unit.of(orders // 10)
        mirror, view, large, small, large_alone, small_alone, upkeep, refresh = ([] for _ in range(8))
        for i in range(repeat):
            mirror.append(_drain(lab, f"mirror{i}", orders, unit, False).seconds)
            drained = _drain(lab, f"view{i}", orders, unit, True)
            view.append(drained.seconds)
            upkeep.append(drained.upkeep)
            refresh.append(drained.refresh)
            large.append(_drain(lab, f"large{i}", orders, fewer, True).seconds)
            small.append(_drain(lab, f"small{i}", orders // 10, fewer, True).seconds)
            large_alone.append(_drain(lab, f"large_alone{i}", orders, fewer, False).seconds)
            small_alone.append(_drain(lab, f"small_alone{i}", orders // 10, fewer, False).seconds)
        fans = _fan_out(lab, [size for size in FAN_OUT if size <= orders])
    return Views(
        UNITS * unit.changes,
        tuple(mirror),
        tuple(view),
        UNITS * fewer.changes,
        tuple(large),
        tuple(small),
        tuple(large_alone),
        tuple(small_alone),
        median(upkeep),
        tuple(refresh),
        fans,
    )


@dataclass(frozen=True)
class _Drained:
    seconds: float
    upkeep: float = 0.0
    refresh: float = 0.0


def _pipeline(lab: Lab, name: str, view: bool, fill: list[str]) -> Pipeline:
    """Provision a pipeline from and to databases of this name, whose mirror has the rows already."""
    for server in (lab.source, lab.target):
        create_database(server, name)
    execute(lab.source.dsn(name), *TABLES, *fill)
    sink: dict[str, Any] = {"dsn": lab.target.dsn(name)}
    if view:
        sink["views"] = {"dwd.wide": {"sql": SELECT}}
    pipeline = replace(lab.pipeline(name, name, sink), snapshot=SnapshotSettings(mode="never"))
    commands.provision(pipeline)
    execute(lab.target.dsn(name), *fill)
    return pipeline


def _discard(lab: Lab, pipeline: Pipeline) -> None:
    commands.drop(pipeline)
    for server in (lab.source, lab.target):
        drop_database(server, pipeline.name)


def _check_view(lab: Lab, name: str) -> None:
    """Compare the view with its SELECT."""
    for one, other in ((SELECT, "TABLE dwd.wide"), ("TABLE dwd.wide", SELECT)):
        wrong = query(lab.target.dsn(name), f"SELECT count(*) FROM ({one} EXCEPT ALL {other}) AS different")
        check((0,), wrong, f"{VIEWS}: rows in which the view differs")


def _drain(lab: Lab, name: str, orders: int, unit: Unit, view: bool) -> _Drained:
    """Drain a backlog into a mirror, with or without the view."""
    pipeline = _pipeline(lab, name, view, rows_of(orders))
    source, target = lab.source.dsn(name), lab.target.dsn(name)
    with connected(source) as connection:
        _follow(lab, pipeline, emit_marker(connection, "begin"))  # builds the view
        execute(target, "VACUUM ANALYZE")
        for number in range(UNITS):
            execute(source, "; ".join(unit.statements(number, orders)))
        end = emit_marker(connection, "end")
    lab.settle()
    seconds = _follow(lab, pipeline, end, UNITS * unit.changes)
    tell(f"{VIEWS}, {name}", UNITS * unit.changes, seconds)
    upkeep = refresh = 0.0
    if view:
        _check_view(lab, name)
        upkeep = float(str(query(target, "SELECT seconds / greatest(units, 1) FROM airflow_cdc.views")[0]))
        execute(target, f"CREATE MATERIALIZED VIEW public.peer AS {SELECT}")
        began = time.monotonic()
        execute(target, "REFRESH MATERIALIZED VIEW public.peer")
        refresh = time.monotonic() - began
    _discard(lab, pipeline)
    return _Drained(seconds, upkeep, refresh)


def _follow(lab: Lab, pipeline: Pipeline, end: int, changes: int | None = None) -> float:
    """Stream to an LSN.

    :returns: the seconds from the start of the walsender until everything is committed and no view waits for anything.
    """
    ended, applied = 0.0, threading.Event()

    def see(progress: StreamProgress) -> None:
        if progress.applied >= end:
            applied.set()

    def is_over() -> bool:
        nonlocal ended
        if applied.is_set() and not ended and query(pipeline.sink.dsn, _WAITING) == (0,):
            ended = time.time()
        return bool(ended) or following.done()

    with run_part(pipeline, "stream", None) as (run, record), ThreadPoolExecutor(1) as thread:
        following = thread.submit(StreamJob(lab.spark, run, record, see).follow, end)
        try:
            await_condition(lambda: _is_read(pipeline) or following.done(), _SECONDS, 0.01)
            began = walsender_start(pipeline.source.dsn, pipeline.source.slot)
            await_condition(is_over, _SECONDS, 0.01)
            done = following.result()
            check(True, bool(ended), f"{VIEWS}: whether views are up to date")
        finally:
            run.ask_to_stop()
    if changes is not None:
        check(changes, done.changes, f"{VIEWS}: changes")
    return ended - began


def _is_read(pipeline: Pipeline) -> bool:
    """Return whether a walsender reads the pipeline's slot."""
    active = "SELECT active_pid IS NOT NULL FROM pg_replication_slots WHERE slot_name = %s"
    return query(pipeline.source.dsn, active, pipeline.source.slot) == (True,)


# -- single changes --------------------------------------------------------------------------------


def _fan_out(lab: Lab, sizes: Sequence[int]) -> tuple[FanOut, ...]:
    """Rename customers with more and more orders while the stream runs."""
    fill = ["INSERT INTO public.products SELECT n, 'title ' || n FROM generate_series(1, 1000) n"]
    first = 1
    for number, size in enumerate(sizes):
        fill += [
            f"INSERT INTO public.customers VALUES ({number}, 'name', 'city')",
            f"INSERT INTO public.orders SELECT n, {number}, 1 + n % 1000, 1, 9.99, 'new'"
            f" FROM generate_series({first}, {first + size - 1}) n",
        ]
        first += size
    pipeline = _pipeline(lab, "fanout", True, [*fill, "ANALYZE"])
    source, target = lab.source.dsn("fanout"), lab.target.dsn("fanout")
    with _streaming(lab, pipeline):
        _await_view(source, target)
        execute(target, "VACUUM ANALYZE")
        found = tuple(_rename(source, target, number, size) for number, size in enumerate(sizes))
        _check_view(lab, "fanout")
    _discard(lab, pipeline)
    return found


@contextmanager
def _streaming(lab: Lab, pipeline: Pipeline) -> Iterator[None]:
    with run_part(pipeline, "stream", None) as (run, record), ThreadPoolExecutor(1) as thread:
        following = thread.submit(StreamJob(lab.spark, run, record, lambda _: None).follow, None)
        try:
            yield
        finally:
            run.ask_to_stop()
            following.result()


_AS_OF = """
SELECT p.applied_lsn >= %s::pg_lsn, coalesce(bool_and(v.relation = 'wide' AND v.behind_lsn IS NULL), false)
FROM airflow_cdc.pipelines p LEFT JOIN airflow_cdc.views v USING (pipeline) GROUP BY p.pipeline, p.applied_lsn
"""


def _await_view(source: str, target: str, each: Callable[[bool], None] = lambda applied: None) -> float:
    """Wait until mirror and view have all that is committed; return the seconds.

    :param each: called with whether the mirror has it, again and again.
    """
    began = time.monotonic()
    with connected(source) as connection, psycopg.connect(target, autocommit=True) as here:
        marker = format_lsn(emit_marker(connection, VIEWS))

        def up_to_date() -> bool:
            found = here.execute(_AS_OF, [marker]).fetchone()
            each(bool(found and found[0]))
            return found == (True, True)

        check(True, await_condition(up_to_date, _SECONDS, _POLL_SECONDS), f"{VIEWS}: a view that is up to date")
    return time.monotonic() - began


def _rename(source: str, target: str, customer: int, size: int) -> FanOut:
    with psycopg.connect(source, autocommit=True) as there, psycopg.connect(target, autocommit=True) as here:
        applied = "SELECT applied_lsn FROM airflow_cdc.pipelines"
        pending: list[tuple[float, str]] = []
        lag = 0.0

        def look(_: bool) -> None:
            """Commit a change, and measure how long the oldest one that is not applied has been waiting."""
            nonlocal lag
            there.execute("UPDATE public.products SET title = title WHERE id = 1")
            ((lsn,),) = there.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
            pending.append((time.monotonic(), lsn))
            ((reached,),) = here.execute(applied).fetchall()
            low = parse_lsn(reached)
            while pending and parse_lsn(pending[0][1]) <= low:
                pending.pop(0)
            if pending:
                lag = max(lag, time.monotonic() - pending[0][0])

        there.execute("UPDATE public.customers SET city = city || '!' WHERE id = %s", [customer])
        seconds = _await_view(source, target, look)
    tell(f"{VIEWS}, fan-out", size, seconds)
    return FanOut(size, round(seconds, 3), round(lag, 3))
