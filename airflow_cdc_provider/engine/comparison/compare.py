"""Compares source tables with their copies, and finds the keys that differ.

Each side divides its keys into the same *buckets*, by a hash of the key's text. For each bucket it returns the number
of rows and the sums of two hashes of them. Only buckets that disagree are opened: their keys and row hashes are fetched
and merged. Ranges of keys are not suitable, because two servers need not sort text in the same order.

If no stream runs, the two sides do not change, and every difference counts. While a stream runs, snapshots of source
and target never show the same moment, so a key that differs is only a *candidate*. A candidate is read three times:
from the source, from the target after it has applied everything that the first read saw, and from the source again.

* It is equal if the target has either of the source's rows.
* It differs if in two successive rounds the source's row has the same *version* both times and the target's row is
  another. The version shows that the row was not changed back and forth in between. Two rounds are needed because
  logical decoding delivers a commit shortly before the source's own snapshots see it.
* Otherwise the row was changed in the meantime, and is read again. A key that keeps changing is *unsettled*, which is
  not a difference.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from airflow_cdc_provider.engine.comparison.side import UNKNOWN, HashedRow, RowKey, Side, Sides
from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, scalar

NAMED = 1000  # differences named for each table; more are only counted
ROUNDS = 20
PASS_TIMEOUT = 600.0
_BREAK_OFF_SECONDS = 0.1

T = TypeVar("T")
DifferenceKind = Literal["missing", "extra", "different"]
OpenSides = Callable[[Connection, Target], AbstractContextManager[Sides]]
ReportTableProgress = Callable[[str, int, int], None]
RowState = tuple[tuple[tuple[str | None, ...], str | None], ...]  # the rows at a key, normally one: cells and version


class Live(Protocol):
    """A running stream."""

    def passed(self, lsn: LogPosition, timeout: float) -> bool:
        """Wait until the sink's applied LSN is at least ``lsn``.

        :param timeout: seconds.
        :returns: whether it was reached in time.
        """


class Countable(Protocol):
    """The contents of a store within a range of the numbers that it assigns."""

    def as_dict(self) -> dict[str, Any]:
        """Return the range as JSON values."""


@runtime_checkable
class Numbered(Protocol):
    """A sink whose store numbers its entries, as Kafka does."""

    def ranges(self, target: Target) -> Sequence[Countable]:
        """Return the ranges of numbers of a target's entries that the pipeline wrote and that readers can see."""


@dataclass(frozen=True)
class Difference:
    """A key at which the two sides differ: it is ``missing`` in the target, ``extra`` in it, or has other values.

    In a table without a key it is a row with all its columns, and ``different`` means that the two sides have
    different numbers of copies of it.
    """

    key: dict[str, str | None]
    kind: DifferenceKind


@dataclass(frozen=True)
class TableResult:
    """The result of the comparison of a table.

    :param table: the source table's label.
    :param source_rows: number of rows in the source's snapshot.
    :param target_rows: number of rows in the target. While a stream runs, the two scans show different moments; then it
        is the number of rows that the target would have at the source's snapshot: ``source_rows`` minus missing rows
        plus extra rows.
    :param differences: the first :data:`NAMED` differences.
    :param unsettled: number of keys that kept changing during the comparison; they do not count as different.
    :param difference_count: number of all keys that differ, named or not.
    """

    table: str
    source_rows: int
    target_rows: int
    equal: bool
    differences: tuple[Difference, ...]
    unsettled: int
    difference_count: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the table's object in the ``--json`` output of ``verify``, without :func:`ranges_in`."""
        return asdict(self) | {"differences": [asdict(difference) for difference in self.differences]}


def ranges_in(sink: object, target: Target) -> dict[str, Any]:
    """Return the ranges of a target for the table's object, if the sink numbers its entries."""
    return {"ranges": [each.as_dict() for each in sink.ranges(target)]} if isinstance(sink, Numbered) else {}


def compare(
    source: Connection,
    targets: Sequence[Target],
    open_sides: OpenSides,
    live: Live | None,
    report: ReportTableProgress = lambda table, done, total: None,
) -> list[TableResult]:
    """Compare tables with their mirrors, or tables that have a key with the rows that their changelogs add up to.

    :param source: an autocommit connection to the primary.
    :param open_sides: see :meth:`.sinks.contract.Sink.compared`.
    :param live: the stream that keeps the copies up to date; ``None`` if none runs.
    :param report: called with a table's label, the number of finished buckets and the number of all buckets.
    :raises StreamFailed: if the live stream does not pass a position in time.
    :raises UnknownTable: if a target table or one of its columns does not exist.
    """
    catch_up = None if live is None else partial(_catch_up, source, live)
    return compare_sides(targets, partial(open_sides, source), catch_up, report)


def compare_sides(
    targets: Sequence[Target],
    opened: Callable[[Target], AbstractContextManager[Sides]],
    catch_up: Callable[[], None] | None,
    report: ReportTableProgress,
) -> list[TableResult]:
    """Compare the two sides of targets of any kind.

    :param catch_up: waits until the target has everything that the source has shown before; ``None`` if no stream runs.
    :param report: see :func:`compare`.
    """
    comparison = _Comparison(catch_up, report)
    if catch_up is not None:
        catch_up()  # otherwise, every change that the target lacks becomes a candidate
    results = []
    for target in targets:
        with opened(target) as sides:
            results.append(comparison.table(sides))
    return results


def _catch_up(source: Connection, live: Live) -> None:
    """Wait until the sink has applied everything that earlier snapshots of the source could see."""
    # The marker's commit also flushes everything before it; "local" means without waiting for a standby.
    marker = "SELECT pg_logical_emit_message(true, 'airflow_cdc', 'verify') FROM set_config(%s, %s, true)"
    lsn = parse_lsn(scalar(source, marker, ("synchronous_commit", "local")))
    if not live.passed(lsn, PASS_TIMEOUT):
        raise not_reached(format_lsn(lsn))


def not_reached(position: str) -> StreamFailed:
    """Return the error for a live stream that does not pass a position in time."""
    return StreamFailed(
        f"the sink did not reach {position} within {PASS_TIMEOUT:.0f} s, so differences cannot be distinguished from"
        " changes in progress",
        "Check with `airflow-cdc status` whether the stream runs and how far it lags. Verify again when it has caught"
        " up, or after `airflow-cdc stop`.",
    )


@dataclass
class _Tally:
    """A counter of a table's differences.

    :param surplus: number of rows that the target has more than the source.
    """

    names: Sequence[str]
    named: list[Difference] = field(default_factory=list)
    count: int = 0
    surplus: int = 0

    def add(self, key: RowKey, ours: RowState, theirs: RowState) -> None:
        self.count += 1
        self.surplus += len(theirs) - len(ours)
        if len(self.named) < NAMED:
            kind: DifferenceKind = "missing" if not theirs else "extra" if not ours else "different"
            self.named.append(Difference(dict(zip(self.names, key, strict=True)), kind))


@dataclass(frozen=True)
class _Comparison:
    catch_up: Callable[[], None] | None
    report: ReportTableProgress

    def table(self, sides: Sides) -> TableResult:
        table, tally = sides.table, _Tally(sides.table.key or [column.name for column in sides.table.columns])
        buckets = sides.buckets
        self.report(table.label, 0, buckets)
        with sides.source.reading(), sides.target.reading():
            ours, theirs = _both(sides, lambda side: side.scan(buckets))
            source_rows, target_rows = (sum(count for count, *_ in side.values()) for side in (ours, theirs))
            differing = [bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket)]
            self.report(table.label, buckets - len(differing), buckets)
            candidates: list[RowKey] = []
            for key, our_state, their_state in self._open(sides, buckets, differing):
                if self.catch_up is None:
                    tally.add(key, our_state, their_state)
                else:
                    candidates.append(key)
        unsettled = 0
        if self.catch_up is not None:
            unsettled = self._settle(self.catch_up, sides, candidates, tally)
            target_rows = source_rows + tally.surplus
        self.report(table.label, buckets, buckets)
        named = tuple(tally.named)
        return TableResult(table.label, source_rows, target_rows, not tally.count, named, unsettled, tally.count)

    def _open(self, sides: Sides, buckets: int, opened: Sequence[int]) -> Iterator[tuple[RowKey, RowState, RowState]]:
        """Merge the rows of some buckets, and yield the keys at which they differ."""
        if not opened:
            return
        first = _both(sides, lambda side: side.open(buckets, opened))
        entries = [_entries(side, opened) for side, opened in enumerate(first)]
        for _, group in groupby(heapq.merge(*entries, key=_position), key=_position):
            found: tuple[list[Any], list[Any]] = ([], [])
            for side, (_, _, texts, cells, version) in group:
                key = tuple(texts)
                found[side].append((tuple(cells), version))
            ours, theirs = (_state(entries) for entries in found)
            if not _same(ours, theirs):
                yield key, ours, theirs

    def _settle(self, catch_up: Callable[[], None], sides: Sides, candidates: Sequence[RowKey], tally: _Tally) -> int:
        """Count the candidates that really differ, and return the number of those that kept changing."""
        suspects: set[RowKey] = set()
        for _ in range(ROUNDS):
            if not candidates:
                break
            before = _read(sides.source, candidates)
            catch_up()
            copies = _read(sides.target, candidates)
            after = _read(sides.source, candidates)
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


def _both(sides: Sides, ask: Callable[[Side], T]) -> list[T]:
    """Ask both sides at the same time."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(ask, side) for side in (sides.source, sides.target)]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            # The other side may still scan for a long time. It is canceled repeatedly, because there is nothing to
            # cancel if it has not begun yet.
            while wait(futures, _BREAK_OFF_SECONDS).not_done:
                for side in (sides.source, sides.target):
                    side.cancel()
            raise
        return [future.result() for future in futures]


def _entries(side: int, entries: Iterable[HashedRow]) -> Iterator[tuple[int, HashedRow]]:
    return ((side, entry) for entry in entries)


def _position(entry: tuple[int, HashedRow]) -> tuple[int, str]:
    return entry[1][:2]


def _read(side: Side, keys: Sequence[RowKey]) -> dict[RowKey, RowState]:
    found: dict[RowKey, list[Any]] = {}
    with side.reading():
        for key, cells, version in side.read(keys):
            found.setdefault(tuple(key), []).append((tuple(cells), version))
    return {key: _state(entries) for key, entries in found.items()}


def _state(entries: list[Any]) -> RowState:
    return tuple(sorted(entries, key=repr))


def _same(ours: RowState, theirs: RowState) -> bool:
    return len(ours) == len(theirs) and all(
        copy in (cell, UNKNOWN) or cell == UNKNOWN
        for (cells, _), (copies, _) in zip(ours, theirs, strict=True)
        for cell, copy in zip(cells, copies, strict=True)
    )
