"""Whether source tables and their copies are equal, and which keys differ.

Rows stay where they are. Each side cuts its key space into the same *buckets*, by a hash of the key's text, and says
for each how many rows it holds and the sums of two hashes of them. Only buckets that disagree are opened: their keys
and row hashes are fetched and merged. Ranges of keys would not do, as two servers need not order text alike.

Without a stream the two sides stand still, and every difference counts. While one runs, no two snapshots of source
and target show the same moment, so a key that differs is only a *candidate*. It is read three times: from the
source, from the target once that has applied all that the first read saw, and from the source again. It is equal if
the target holds either of the source's rows. It differs if the source's row is the same *version* both times, so that
it was not changed there and back in between, and the target's is another, in two rounds running: logical decoding
delivers a commit shortly before the source's own snapshots see it. Anything else was changed meanwhile and is read
again; a key that never comes to rest is *unsettled*, which is not a difference.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.errors import StreamFailed
from airflow_cdc_provider.engine.fold import UNKNOWN, Key, Relation, Sides, changelog_sides, mirror_sides
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn

NAMED = 1000  # differences named a table; more are only counted
PAGE = 1000  # keys read by one query
ROUNDS = 20
PASS_TIMEOUT = 600.0

_FETCH = "FETCH 10000 FROM opened"

T = TypeVar("T")
Kind = Literal["missing", "extra", "different"]
MakeSides = Callable[[Connection, Connection, Table, tuple[str, str]], Sides]
Report = Callable[[str, int, int], None]
Row = tuple[Any, ...]
State = tuple[tuple[tuple[str | None, ...], str | None], ...]  # the rows at a key, normally one: cells and version


@dataclass(frozen=True)
class Pair:
    """A source table and where its copy stands."""

    table: Table
    target_schema: str
    target_table: str


class Live(Protocol):
    """A running stream."""

    def passed(self, lsn: int, timeout: float) -> bool:
        """Wait until the sink's applied LSN is at least ``lsn``; False when ``timeout`` seconds were too few."""


@dataclass(frozen=True)
class Difference:
    """A key at which the two sides differ: ``missing`` from the target, ``extra`` there, or of other values.

    In a table without a key it is a row, with all its columns, of which the two sides hold ``different`` numbers.
    """

    key: dict[str, str | None]
    kind: Kind


@dataclass(frozen=True)
class TableResult:
    """What the comparison of a table found.

    :param table: the source table's label.
    :param source_rows: rows in the source's snapshot.
    :param target_rows: rows in the target. With a live stream, whose two scans show different moments, the rows that
        it would hold at the source's snapshot: ``source_rows``, less those found missing, plus those found extra.
    :param differences: the first :data:`NAMED` of them.
    :param unsettled: keys that kept changing while they were compared; they do not count as different.
    :param difference_count: all keys that differ, named or not.
    """

    table: str
    source_rows: int
    target_rows: int
    equal: bool
    differences: tuple[Difference, ...]
    unsettled: int
    difference_count: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The table's object in the ``--json`` output of ``verify``."""
        return asdict(self) | {"differences": [asdict(difference) for difference in self.differences]}


def compare(
    source: Connection,
    sink: Connection,
    pairs: Sequence[Pair],
    live: Live | None,
    report: Report = lambda table, done, total: None,
) -> list[TableResult]:
    """Compare tables with their mirrors.

    :param source: autocommitting, to the primary.
    :param sink: autocommitting.
    :param live: the stream that keeps the copies up to date, ``None`` when none runs.
    :param report: called with a table's label, the buckets done and the buckets in all.
    :raises StreamFailed: when the live stream does not pass a position in time.
    :raises UnknownTable: when a target table or one of its columns does not exist.
    """
    return _Comparison(source, sink, live, report).tables(pairs, mirror_sides)


def compare_changelog(
    source: Connection,
    sink: Connection,
    pairs: Sequence[Pair],
    live: Live | None,
    report: Report = lambda table, done, total: None,
) -> list[TableResult]:
    """Compare tables that have a key with what their changelogs add up to; otherwise as :func:`compare`."""
    return _Comparison(source, sink, live, report).tables(pairs, changelog_sides)


@dataclass
class _Tally:
    """The differences of a table, counted; ``surplus`` are the rows that the target has too many."""

    names: Sequence[str]
    named: list[Difference] = field(default_factory=list)
    count: int = 0
    surplus: int = 0

    def add(self, key: Key, ours: State, theirs: State) -> None:
        self.count += 1
        self.surplus += len(theirs) - len(ours)
        if len(self.named) < NAMED:
            kind: Kind = "missing" if not theirs else "extra" if not ours else "different"
            self.named.append(Difference(dict(zip(self.names, key, strict=True)), kind))


@dataclass(frozen=True)
class _Comparison:
    source: Connection
    sink: Connection
    live: Live | None
    report: Report

    def tables(self, pairs: Sequence[Pair], sides: MakeSides) -> list[TableResult]:
        if self.live is not None:
            self._catch_up(self.live)  # or every change it lags behind becomes a candidate
        return [
            self._table(sides(self.source, self.sink, pair.table, (pair.target_schema, pair.target_table)))
            for pair in pairs
        ]

    def _table(self, sides: Sides) -> TableResult:
        table, tally = sides.table, _Tally(sides.table.key or [column.name for column in sides.table.columns])
        buckets = sides.bucket_count(self.source)
        self.report(table.label, 0, buckets)
        with sides.source.reading(self.source), sides.target.reading(self.sink):
            ours, theirs = self._both(_checksums, lambda side: side.scan(buckets), sides)
            source_rows, target_rows = (sum(count for count, *_ in side.values()) for side in (ours, theirs))
            differing = [bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket)]
            self.report(table.label, buckets - len(differing), buckets)
            candidates: list[Key] = []
            for key, our_state, their_state in self._open(sides, buckets, differing):
                if self.live is None:
                    tally.add(key, our_state, their_state)
                else:
                    candidates.append(key)
        unsettled = 0
        if self.live is not None:
            unsettled = self._settle(self.live, sides, candidates, tally)
            target_rows = source_rows + tally.surplus
        self.report(table.label, buckets, buckets)
        named = tuple(tally.named)
        return TableResult(table.label, source_rows, target_rows, not tally.count, named, unsettled, tally.count)

    def _open(self, sides: Sides, buckets: int, opened: Sequence[int]) -> Iterator[tuple[Key, State, State]]:
        """Merge the rows of some buckets; give the keys at which they differ."""
        if not opened:
            return
        first = self._both(_declare, lambda side: side.open(buckets, opened), sides)
        entries = [_entries(0, self.source, first[0]), _entries(1, self.sink, first[1])]
        for _, group in groupby(heapq.merge(*entries, key=_position), key=_position):
            found: tuple[list[Any], list[Any]] = ([], [])
            for side, (_, _, texts, cells, version) in group:
                key = tuple(texts)
                found[side].append((tuple(cells), version))
            ours, theirs = (_state(entries) for entries in found)
            if not _same(ours, theirs):
                yield key, ours, theirs

    def _settle(self, live: Live, sides: Sides, candidates: Sequence[Key], tally: _Tally) -> int:
        """Count the candidates that differ for good; return how many never came to rest."""
        suspects: set[Key] = set()
        for _ in range(ROUNDS):
            if not candidates:
                break
            before = _read(self.source, sides.source, candidates)
            self._catch_up(live)
            copies = _read(self.sink, sides.target, candidates)
            after = _read(self.source, sides.source, candidates)
            pending, resting = [], set()
            for key in candidates:
                first, copy, last = before.get(key, ()), copies.get(key, ()), after.get(key, ())
                if _same(first, copy) or _same(last, copy):
                    continue
                if first == last and key in suspects:
                    tally.add(key, last, copy)
                    continue
                pending.append(key)
                if first == last:
                    resting.add(key)
            candidates, suspects = pending, resting
        return len(candidates)

    def _catch_up(self, live: Live) -> None:
        """Wait until the sink has applied all that snapshots of the source taken before could see."""
        # Committed, the marker also flushes what it follows; "local" means without waiting for a standby.
        marker = "SELECT pg_logical_emit_message(true, 'airflow_cdc', 'verify') FROM set_config(%s, %s, true)"
        lsn = parse_lsn(scalar(self.source, marker, ("synchronous_commit", "local")))
        if not live.passed(lsn, PASS_TIMEOUT):
            raise StreamFailed(
                f"the sink did not reach {format_lsn(lsn)} within {PASS_TIMEOUT:.0f} s, so that differences cannot be"
                " told from changes under way",
                "See in `airflow-cdc status` whether the stream runs and how far it lags, and verify again when it has"
                " caught up, or after `airflow-cdc stop`.",
            )

    def _both(
        self, run: Callable[[Connection, sql.Composable], T], query: Callable[[Relation], sql.Composable], sides: Sides
    ) -> list[T]:
        """Run a query on both sides at the same time."""
        connections = (self.source, self.sink)
        with ThreadPoolExecutor(2) as pool:
            pairs = zip(connections, (sides.source, sides.target), strict=True)
            futures = [pool.submit(run, connection, query(side)) for connection, side in pairs]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                for connection in connections:  # the other side may scan for long
                    with contextlib.suppress(psycopg2.Error):
                        connection.cancel()
                raise
            return [future.result() for future in futures]


def _checksums(connection: Connection, query: sql.Composable) -> dict[int, list[Any]]:
    return {bucket: checksum for bucket, *checksum in rows(connection, query)}


def _declare(connection: Connection, query: sql.Composable) -> list[Row]:
    rows(connection, sql.SQL("DECLARE opened NO SCROLL CURSOR FOR {}").format(query))
    return rows(connection, _FETCH)


def _entries(side: int, connection: Connection, batch: list[Row]) -> Iterator[tuple[int, Row]]:
    while batch:
        yield from ((side, entry) for entry in batch)
        batch = rows(connection, _FETCH)


def _position(entry: tuple[int, Row]) -> Row:
    return entry[1][:2]


def _read(connection: Connection, side: Relation, keys: Sequence[Key]) -> dict[Key, State]:
    found: dict[Key, list[Any]] = {}
    with side.reading(connection):
        for start in range(0, len(keys), PAGE):
            for key, cells, version in rows(connection, side.read(keys[start : start + PAGE])):
                found.setdefault(tuple(key), []).append((tuple(cells), version))
    return {key: _state(entries) for key, entries in found.items()}


def _state(entries: list[Any]) -> State:
    return tuple(sorted(entries, key=repr))


def _same(ours: State, theirs: State) -> bool:
    return len(ours) == len(theirs) and all(
        copy in (cell, UNKNOWN)
        for (cells, _), (copies, _) in zip(ours, theirs, strict=True)
        for cell, copy in zip(cells, copies, strict=True)
    )
