"""Follows tables into a wide table: copies them, drains a backlog, and recovers from a kill.

Each way to do so is paused while a backlog is written, so that every way drains the same one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from benchmarks.lab import Lab, create_database, drop_database, execute, query
from benchmarks.orders import COLUMNS, KEYED, TABLES, UNITS, Unit, customers_of, fill, products_of
from benchmarks.report import WrongResult, check, tell

_COPIED, _DRAINED, _RECOVERED = "copied", "drained", "recovered"
"""What the last rows hold when a step ends."""

SECONDS = 1800.0
_POLL_SECONDS = 0.05
_RESTS = 4.0
"""Number of times that a comparison of the whole table takes, to wait before the next one."""
_STILL_SECONDS = 60.0
"""Time without any change after which a table counts as settled."""


@dataclass(frozen=True)
class Followed:
    """How a way to join followed a source.

    :param copied: seconds from the start of its process until the wide table was complete.
    :param drained: seconds that a backlog took.
    :param recovered: seconds from a kill in the middle of the same backlog until the wide table was up to date.
    :param connected: seconds from the kill until a new walsender started.
    :param state: bytes that it kept in addition to the tables.
    :param wrong: number of rows that stayed wrong after the kill.
    """

    copied: float
    drained: float
    recovered: float
    connected: float
    state: int
    wrong: int


@dataclass(frozen=True)
class Way:
    """A way to follow a source.

    :param source, target: DSNs of its databases.
    :param table: its wide table.
    :param copy: whatever is done before its process starts.
    :param start: starts its process, whose id it returns, and kills it and its children at the end.
    :param state: returns the bytes that it keeps in addition to the tables.
    """

    name: str
    source: str
    target: str
    table: str
    copy: Callable[[], None]
    start: Callable[[], AbstractContextManager[int]]
    state: Callable[[], int]


@contextmanager
def databases(lab: Lab, name: str, orders: int) -> Iterator[tuple[str, str]]:
    """Create a full database and an empty one, and drop them afterwards."""
    servers = (lab.source, lab.target)
    for server in servers:
        create_database(server, name)
    source, target = (server.dsn(name) for server in servers)
    order, customer, product = _marked(orders)
    execute(
        source,
        *TABLES,
        *fill(orders),
        f"INSERT INTO public.customers VALUES ({customer}, 'marker')",
        f"INSERT INTO public.products VALUES ({product})",
        f"INSERT INTO public.orders VALUES ({order}, {customer}, {product}, 1, 9.99)",
        *_mark(orders, _COPIED),
    )
    yield source, target
    for server in servers:
        drop_database(server, name)


def _marked(orders: int) -> tuple[int, int, int]:
    """Return the keys of an order, a customer and a product that no unit changes."""
    return orders + 1, customers_of(orders) + 1, products_of(orders) + 1


def _mark(orders: int, text: str) -> list[str]:
    """Return statements that write a text into the last rows, to end a backlog."""
    columns = (("orders", "status"), ("customers", "city"), ("products", "title"))
    return [
        f"UPDATE public.{table} SET {column} = '{text}' WHERE id = {key}"
        for (table, column), key in zip(columns, _marked(orders), strict=True)
    ]


def follow(lab: Lab, way: Way, orders: int) -> Followed:
    """Copy, drain a backlog, and drain another one after a kill."""
    changes = UNITS * Unit.of(orders).changes
    right = _sums(way.source, f"({KEYED})", orders)
    lab.settle()
    began = time.monotonic()
    way.copy()
    with way.start() as process:
        copied = _await_equal(way, orders, process, _COPIED, right) - began
        tell(f"{way.name}: copied", orders, copied)
        state = way.state()
        with _paused(way, process):
            right = _write(way, orders, 0)
            execute(way.source, *_mark(orders, _DRAINED))
        began = time.monotonic()
        drained = _await_equal(way, orders, process, _DRAINED, right) - began
        tell(f"{way.name}: drained", changes, drained)
        with _paused(way, process):
            right = _write(way, orders, UNITS)
        time.sleep(drained / 2)
        killed = time.time()
    execute(way.source, *_mark(orders, _RECOVERED))  # so that there is something left to do in any case
    with way.start() as process:
        recovered, wrong = _await_recovery(way, orders, process, right, killed)
        connected = _connected(way.source, killed) or recovered
    tell(f"{way.name}: recovered, {wrong:,} rows wrong", changes, recovered - killed)
    return Followed(copied, drained, recovered - killed, connected - killed, state, wrong)


@contextmanager
def _paused(way: Way, process: int) -> Iterator[None]:
    """Pause a process and its children, with the target as if it had been idle for long."""
    execute(way.target, "VACUUM ANALYZE")
    parent = psutil.Process(process)
    family = [parent, *parent.children(recursive=True)]
    for each in family:
        each.suspend()
    yield
    for each in family:
        each.resume()


def _write(way: Way, orders: int, first: int) -> tuple[object, ...]:
    """Write the units of a backlog; return the sums of the wide table."""
    for number in range(first, first + UNITS):
        execute(way.source, "; ".join(Unit.of(orders).statements(number, orders)))
    return _sums(way.source, f"({KEYED})", orders)


def _await_equal(way: Way, orders: int, process: int, marker: str, right: tuple[object, ...]) -> float:
    """Wait until the wide table is right; return when the comparison began that found it so.

    :raises WrongResult: if the process ends, or if the table is not right in time.
    """
    deadline = time.monotonic() + SECONDS
    with psycopg.connect(way.target, autocommit=True) as here:
        found = await_condition(lambda: _is_marked(way, here, orders, process, marker), SECONDS, _POLL_SECONDS)
    check(True, found, f"{way.name}: the end of a backlog")
    while time.monotonic() < deadline:
        began = time.monotonic()
        if _sums(way.target, way.table, orders) == right:
            return began
        time.sleep(_RESTS * (time.monotonic() - began))
    raise WrongResult(f"{way.name}: the wide table differs from its SELECT")


def _await_recovery(way: Way, orders: int, process: int, right: tuple[object, ...], killed: float) -> tuple[float, int]:
    """Wait until the wide table is right or no longer changes; return when, and the number of rows that are wrong."""
    last, changed, compared = None, killed, killed
    with psycopg.connect(way.target, autocommit=True) as here:
        while True:
            marked, now = _is_marked(way, here, orders, process, _RECOVERED), time.time()
            if marked or now - compared > _STILL_SECONDS / 10:
                compared, found = now, (marked, *_sums(way.target, way.table, orders))
                if found == (True, *right):
                    return now, 0
                if found != last:
                    last, changed = found, now
                elif now - max(changed, _connected(way.source, killed) or now) > _STILL_SECONDS:
                    return changed, _wrong(way)
                time.sleep(_RESTS * (time.time() - now))
            time.sleep(_POLL_SECONDS)


def _is_marked(way: Way, target: psycopg.Connection[Any], orders: int, process: int, marker: str) -> bool:
    """Return whether the last row holds a text.

    :raises WrongResult: if the process has ended.
    """
    if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
        raise WrongResult(f"{way.name}: its process ended")
    text = f"SELECT status, city, title FROM {way.table} WHERE id = {_marked(orders)[0]}"
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # a view that is being built
        return target.execute(text.encode()).fetchone() == (marker,) * 3
    return False


def _wrong(way: Way) -> int:
    """Return the number of rows that are missing in the wide table."""
    hashes = f"SELECT hashtextextended(t::text, 0) FROM (SELECT {COLUMNS} FROM {{}} AS wide) AS t"
    with psycopg.connect(way.source) as there, psycopg.connect(way.target) as here:
        right = set(there.execute(hashes.format(f"({KEYED})").encode()).fetchall())
        return len(right - set(here.execute(hashes.format(way.table).encode()).fetchall()))


def _sums(dsn: str, table: str, orders: int) -> tuple[object, ...]:
    """Return the number of rows of a wide table, without the last one, and a sum of hashes over all their values."""
    rows = f"SELECT {COLUMNS} FROM {table} AS wide WHERE id <= {orders}"
    return query(dsn, f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM ({rows}) AS t")


def _connected(source: str, after: float) -> float | None:
    """Return when the first walsender started after a time, if one did."""
    text = (
        "SELECT extract(epoch FROM min(backend_start))::float8 FROM pg_stat_activity"
        " WHERE backend_type = 'walsender' AND datname = current_database() AND backend_start > to_timestamp(%s)"
    )
    (found,) = query(source, text, after)
    return None if found is None else float(str(found))
