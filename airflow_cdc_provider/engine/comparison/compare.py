"""Whether source tables and their copies are equal, and which keys differ.

Each side cuts its key space into the same *buckets*, by a hash of the key's text, and says
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

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from airflow_cdc_provider.engine.comparison.side import UNKNOWN, Entry, Key, Side, Sides
from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, scalar

NAMED = 1000  # differences named a table; more are only counted
ROUNDS = 20
PASS_TIMEOUT = 600.0
_BREAK_OFF_SECONDS = 0.1

T = TypeVar("T")
Kind = Literal["missing", "extra", "different"]
OpenSides = Callable[[Connection, Target], AbstractContextManager[Sides]]
Report = Callable[[str, int, int], None]
State = tuple[tuple[tuple[str | None, ...], str | None], ...]  # the rows at a key, normally one: cells and version


class Live(Protocol):
    """A running stream."""

    def passed(self, lsn: LogPosition, timeout: float) -> bool:
        """Wait until the sink's applied LSN is at least ``lsn``; False when ``timeout`` seconds were too few."""


class Countable(Protocol):
    """What a store holds between two of the numbers that it gives."""

    def as_dict(self) -> dict[str, Any]:
        """The range as JSON values."""


@runtime_checkable
class Numbered(Protocol):
    """A sink whose store numbers what it holds, as Kafka does."""

    def ranges(self, target: Target) -> Sequence[Countable]:
        """What of a target is ours and visible to readers, in the ranges of its numbers."""


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
        """The table's object in the ``--json`` output of ``verify``, but for :func:`ranges_in`."""
        return asdict(self) | {"differences": [asdict(difference) for difference in self.differences]}


def ranges_in(sink: object, target: Target) -> dict[str, Any]:
    """What a sink that numbers what it holds has of a target, for the table's object."""
    return {"ranges": [each.as_dict() for each in sink.ranges(target)]} if isinstance(sink, Numbered) else {}


def compare(
    source: Connection,
    targets: Sequence[Target],
    open_sides: OpenSides,
    live: Live | None,
    report: Report = lambda table, done, total: None,
) -> list[TableResult]:
    """Compare tables with their mirrors, or tables that have a key with what their changelogs add up to.

    :param source: autocommitting, to the primary.
    :param open_sides: see :meth:`.sinks.contract.Sink.compared`.
    :param live: the stream that keeps the copies up to date, ``None`` when none runs.
    :param report: called with a table's label, the buckets done and the buckets in all.
    :raises StreamFailed: when the live stream does not pass a position in time.
    :raises UnknownTable: when a target table or one of its columns does not exist.
    """
    catch_up = None if live is None else partial(_catch_up, source, live)
    return compare_sides(targets, partial(open_sides, source), catch_up, report)


def compare_sides(
    targets: Sequence[Target],
    opened: Callable[[Target], AbstractContextManager[Sides]],
    catch_up: Callable[[], None] | None,
    report: Report,
) -> list[TableResult]:
    """Compare the two sides of some targets, whatever they are.

    :param catch_up: waits until the target has all that the source has shown before; ``None`` when no stream runs.
    :param report: see :func:`compare`.
    """
    comparison = _Comparison(catch_up, report)
    if catch_up is not None:
        catch_up()  # or every change that the target lags behind becomes a candidate
    results = []
    for target in targets:
        with opened(target) as sides:
            results.append(comparison.table(sides))
    return results


def _catch_up(source: Connection, live: Live) -> None:
    """Wait until the sink has applied all that snapshots of the source taken before could see."""
    # Committed, the marker also flushes what it follows; "local" means without waiting for a standby.
    marker = "SELECT pg_logical_emit_message(true, 'airflow_cdc', 'verify') FROM set_config(%s, %s, true)"
    lsn = parse_lsn(scalar(source, marker, ("synchronous_commit", "local")))
    if not live.passed(lsn, PASS_TIMEOUT):
        raise not_reached(format_lsn(lsn))


def not_reached(position: str) -> StreamFailed:
    """What is raised when a live stream does not pass a position in time."""
    return StreamFailed(
        f"the sink did not reach {position} within {PASS_TIMEOUT:.0f} s, so that differences cannot be told from"
        " changes under way",
        "See in `airflow-cdc status` whether the stream runs and how far it lags, and verify again when it has caught"
        " up, or after `airflow-cdc stop`.",
    )


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
    catch_up: Callable[[], None] | None
    report: Report

    def table(self, sides: Sides) -> TableResult:
        table, tally = sides.table, _Tally(sides.table.key or [column.name for column in sides.table.columns])
        buckets = sides.buckets
        self.report(table.label, 0, buckets)
        with sides.source.reading(), sides.target.reading():
            ours, theirs = _both(sides, lambda side: side.scan(buckets))
            source_rows, target_rows = (sum(count for count, *_ in side.values()) for side in (ours, theirs))
            differing = [bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket)]
            self.report(table.label, buckets - len(differing), buckets)
            candidates: list[Key] = []
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

    def _open(self, sides: Sides, buckets: int, opened: Sequence[int]) -> Iterator[tuple[Key, State, State]]:
        """Merge the rows of some buckets; give the keys at which they differ."""
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

    def _settle(self, catch_up: Callable[[], None], sides: Sides, candidates: Sequence[Key], tally: _Tally) -> int:
        """Count the candidates that differ for good; return how many never came to rest."""
        suspects: set[Key] = set()
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
            # The other may scan for long. One that has not begun to has nothing to break off yet, so it is told again.
            while wait(futures, _BREAK_OFF_SECONDS).not_done:
                for side in (sides.source, sides.target):
                    side.cancel()
            raise
        return [future.result() for future in futures]


def _entries(side: int, entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    return ((side, entry) for entry in entries)


def _position(entry: tuple[int, Entry]) -> tuple[int, str]:
    return entry[1][:2]


def _read(side: Side, keys: Sequence[Key]) -> dict[Key, State]:
    found: dict[Key, list[Any]] = {}
    with side.reading():
        for key, cells, version in side.read(keys):
            found.setdefault(tuple(key), []).append((tuple(cells), version))
    return {key: _state(entries) for key, entries in found.items()}


def _state(entries: list[Any]) -> State:
    return tuple(sorted(entries, key=repr))


def _same(ours: State, theirs: State) -> bool:
    return len(ours) == len(theirs) and all(
        copy in (cell, UNKNOWN) or cell == UNKNOWN
        for (cells, _), (copies, _) in zip(ours, theirs, strict=True)
        for cell, copy in zip(cells, copies, strict=True)
    )
