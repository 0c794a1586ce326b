"""Backlogs: changes that wait in the log of a database, which every run reads from its own slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import count

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker, read_slot
from benchmarks.lab import Lab, execute, query
from benchmarks.report import WrongResult, check
from benchmarks.shapes import Shape

PUBLICATION = "bench"
_BASE_SLOT = "bench_base"
_RELEASE_SECONDS = 30.0
_copies = count()

Sums = tuple[Decimal, ...]
"""Sums over rows or changes of all tables: their number, their keys, updated columns; more columns for a mirror."""


@dataclass(frozen=True)
class Backlog:
    """Changes that wait in the log.

    :param changes: number of changes.
    :param half: number of rows in each table before the first insert.
    :param steps: see :meth:`.Shape.steps`.
    :param start: LSN at which reading starts.
    :param end: LSN of a marker after the last change.
    :param keys: sum of the keys of all changes.
    :param logged: sums over a log of all changes that follows the rows of the snapshot.
    :param last: table and key of the row that is changed last.
    """

    lab: Lab
    database: str
    shape: Shape
    changes: int
    half: int
    steps: int
    start: int
    end: int
    keys: int
    logged: Sums
    last: tuple[str, int]

    @property
    def dsn(self) -> str:
        """Return the URI of the source database."""
        return self.lab.source.dsn(self.database)

    @contextmanager
    def slot(self) -> Iterator[str]:
        """Create a slot at the start of the backlog, and drop it afterwards."""
        name = f"bench_{next(_copies)}"
        copied = query(self.dsn, "SELECT lsn::text FROM pg_copy_logical_replication_slot(%s, %s)", _BASE_SLOT, name)
        check(self.start, parse_lsn(str(copied[0])), "position of a copied slot")
        try:
            yield name
        finally:
            drop_slot(self.dsn, name)

    def discard(self) -> None:
        """Drop the slot that keeps the backlog on the server."""
        drop_slot(self.dsn, _BASE_SLOT)


def make_backlog(lab: Lab, database: str, shape: Shape, changes: int) -> Backlog:
    """Write changes that no process reads yet to tables that :meth:`.Shape.fill` has filled.

    :param changes: approximate number of changes.
    """
    dsn, half, steps = lab.source.dsn(database), shape.half(changes), shape.steps(changes)
    before = sums(dsn, shape)
    with connected(dsn) as source:
        execute(dsn, f"SELECT pg_create_logical_replication_slot('{_BASE_SLOT}', 'pgoutput')")
        state = read_slot(source, _BASE_SLOT)
        assert state is not None
        execute(dsn, "SET synchronous_commit = off", shape.write(steps, half))
        end = emit_marker(source, "end")
        emit_marker(source, "after the end")  # readers that stop at an LSN need a message after it
    after = sums(dsn, shape)
    rounds = shape.rounds(steps)
    # The second half of a step's changes leaves rows in their final state. In the last step of a table, so does the
    # first half; in other steps, the next step updates each of its rows once more.
    first = _sums_between(dsn, shape, [(half, half * (n + 1)) for n in rounds])
    second = _sums_between(dsn, shape, [(0, half * n) for n in rounds])
    updated_later = sum(half * max(0, n - 1) for n in rounds)
    keys = int(first[1] + second[1])
    logged = tuple(sum(each) for each in zip(before, first, second, strict=True))
    logged = (logged[0], logged[1], logged[2] - updated_later)
    last = (steps - 1) % shape.tables
    done = 2 * half * steps
    check(Decimal(done), first[0] + second[0], "changes written")
    check(Decimal(0 if shape.updates else done // 2), after[0] - before[0], "rows inserted")
    return Backlog(
        lab, database, shape, done, half, steps, state.confirmed_flush_lsn, end, keys, logged,
        (shape.names[last], half * rounds[last]),
    )  # fmt: skip


def sums(dsn: str, shape: Shape, *, mirror: bool = False) -> Sums:
    """Return sums over the rows of a database's tables.

    :param mirror: whether to include all columns by which a mirror is compared.
    """
    wanted = ", ".join(shape.row.sums if mirror else shape.row.sums[:3])
    return total(query(dsn, f"SELECT {wanted} FROM public.{name}") for name in shape.names)


def total(found: Iterator[tuple[object, ...]]) -> Sums:
    """Return the sums over all tables."""
    return tuple(sum((Decimal(str(each or 0)) for each in column), Decimal()) for column in zip(*found, strict=True))


def _sums_between(dsn: str, shape: Shape, keys: list[tuple[int, int]]) -> Sums:
    """Return sums over the rows whose keys lie in the range (low, high] of their table."""
    wanted, named = ", ".join(shape.row.sums[:3]), zip(shape.names, keys, strict=True)
    queries = (f"SELECT {wanted} FROM public.{name} WHERE id > {low} AND id <= {high}" for name, (low, high) in named)
    return total(query(dsn, text) for text in queries)


def walsender_start(dsn: str, slot: str) -> float:
    """Return the time at which the slot's walsender started, in seconds since the epoch."""
    text = (
        "SELECT extract(epoch FROM backend_start)::float8 FROM pg_stat_activity"
        " WHERE pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s)"
    )
    (started,) = query(dsn, text, slot)
    assert isinstance(started, float)
    return started


def drop_slot(dsn: str, slot: str) -> None:
    """Remove a slot, and disconnect its readers first.

    :raises WrongResult: if it stays in use.
    """
    end = "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots WHERE slot_name = %s AND active"
    if not await_condition(lambda: query(dsn, end, slot) == (0,), _RELEASE_SECONDS):
        raise WrongResult(f"slot {slot} is still in use after {_RELEASE_SECONDS:g} s")
    query(dsn, "SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots WHERE slot_name = %s", slot)
