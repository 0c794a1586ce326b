"""The collapse, alone and after the chunk filter, compared with models that apply one change after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.collapse import Collapsed, collapse
from airflow_cdc_provider.engine.changes.key_halves import split
from airflow_cdc_provider.engine.changes.snapshot_filter import Visibility, keep, truncate_visibility
from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from tests.support.change_events import COLUMNS, NEAR_WRAP, Event, Row, changes_of, never

Key = tuple[str | None, ...]


Rows = dict[Key, Row]


TOASTED = (2, 4)


# The components of composite keys are chosen so that plain concatenation would confuse them.
KEYS: dict[tuple[int, ...], list[Key]] = {
    (1,): [(str(n),) for n in range(9)],
    (3, 1): [*product(("a", "ab", ""), ("bc", "c", "a"))],
}


@dataclass(frozen=True)
class Dice:
    """The choices of one step of a random history; every number is taken modulo the number of options."""

    action: int
    slot: int
    first: int
    second: int
    bits: int


def rolled(seed: int, steps: int) -> list[Dice]:
    """Return a history from a seed: Hypothesis's own lists are too short, and contain too many zeros."""
    chance = Random(seed)
    return [Dice(*(chance.randint(0, top) for top in (31, 3, 31, 31, (1 << 13) - 1))) for _ in range(steps)]


STEPS = st.builds(rolled, st.integers(0, 1 << 32), st.integers(20, 300))


@dataclass(frozen=True)
class Table:
    key: tuple[int, ...]
    full: bool
    fresh: Iterator[int] = field(default_factory=count)

    def key_of(self, row: Row) -> Key:
        return tuple(row[c] for c in self.key)

    def row(self, key: Key, bits: int, before: Row | None = None) -> Row:
        """Return a row at a key: each other column has a new value, or NULL, or the same value as in a previous row."""
        values: list[str | None] = []
        for column in range(len(COLUMNS)):
            roll = bits >> column & 3
            new = f"v{next(self.fresh)}" if roll else None
            values.append(before[column] if before and roll & 1 else new)
        for column, value in zip(self.key, key, strict=True):
            values[column] = value
        return tuple(values)

    def old(self, row: Row) -> tuple[Row, str]:
        return (row, "O") if self.full else (tuple(v if c in self.key else None for c, v in enumerate(row)), "K")

    def delete(self, rows: Rows, key: Key) -> Event:
        return Event("d", None, frozenset(), *self.old(rows.pop(key)))

    def update(self, rows: Rows, key: Key, to: Key, bits: int) -> Event:
        before = rows.pop(key)
        after = self.row(to, bits, before)
        assert to not in rows
        rows[to] = after
        toasted = (*TOASTED, *(self.key if bits & 1024 else ()))
        unchanged = frozenset(
            c for c in toasted if after[c] is not None and after[c] == before[c] and bits >> (c + 5) & 3
        )
        # Postgres also sends an unchanged old key if it is itself stored out of line.
        told = self.full or key != to or not unchanged.isdisjoint(self.key)
        return Event("u", after, unchanged, *(self.old(before) if told else (None, "")))

    def step(self, rows: Rows, usable: Sequence[Key], dice: Dice) -> list[Event]:
        """Change rows in place, only at usable keys."""
        taken, free = [k for k in usable if k in rows], [k for k in usable if k not in rows]
        action = dice.action % 8
        source = taken[dice.first % len(taken)] if taken else None
        target = free[dice.second % len(free)] if free else None
        if (action == 0 or source is None) and target is not None:
            rows[target] = self.row(target, dice.bits)
            return [Event("i", rows[target])]
        if source is not None and action == 1:
            return [self.delete(rows, source)]
        other = taken[dice.second % len(taken)] if taken else None
        if source is not None and target is not None and action >= 5:
            if action > 5 or other is None or other == source:
                return [self.update(rows, source, target, dice.bits)]
            swap = [(source, target), (other, source), (target, other)]
            return [self.update(rows, a, b, dice.bits ^ n << 6) for n, (a, b) in enumerate(swap)]
        return [self.update(rows, source, source, dice.bits)] if source is not None else []


def apply(sink: Rows, net: Collapsed, key: tuple[int, ...], read_again: Callable[[Key], Row | None]) -> None:
    """Apply an effect like a sink: read missing values from the origins, then erase, then write."""
    before = dict(sink)
    rows = list(zip(*(column.to_pylist() for column in net.rows.columns), strict=True))
    origins = list(zip(*(column.to_pylist() for column in net.origin), strict=True))
    keys = [tuple(row[c] for c in key) for row in rows]
    assert len(set(keys)) == len(keys)
    for at in keys:
        sink.pop(at, None)
    for i, (at, row, origin) in enumerate(zip(keys, rows, origins, strict=True)):
        assert not net.fresh[i] or at not in before
        missing = [column for column, flags in net.missing.items() if flags[i]]
        assert all(row[column] is None for column in missing)
        final: Row | None = row
        if net.erased[i]:
            assert not missing
            assert all(v is None for c, v in enumerate(row) if c not in key)
            final = None
        elif missing and None in origin:
            final = read_again(at)
        elif missing:
            final = tuple(before[origin][c] if c in missing else v for c, v in enumerate(row))
        else:
            assert origin == (None,) * len(key)
        if final is not None:
            sink[at] = final


def pieces(events: Sequence[Event], size: int) -> list[Sequence[Event]]:
    return [events[start : start + size] for start in range(0, len(events), size)]


def unknown(key: Key) -> Row:
    raise AssertionError(f"the origin of {key} should be known")


@pytest.mark.lengthy
@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(sorted(KEYS)),
    full=st.sampled_from([False, False, True]),
    initial=st.sets(st.integers(0, 8), min_size=2),
    steps=STEPS,
    size=st.integers(1, 60),
)
def test_collapsed_pieces_do_what_the_changes_did(
    key: tuple[int, ...], full: bool, initial: set[int], steps: list[Dice], size: int
) -> None:
    table = Table(key, full)
    source = {KEYS[key][n]: table.row(KEYS[key][n], 0b111111) for n in initial}
    sink = dict(source)
    events: list[Event] = []
    for dice in steps:
        if dice.action == 31 and dice.slot == 0:
            source.clear()
            events.append(Event("t"))
        else:
            events += table.step(source, KEYS[key], dice)
    for piece in pieces(events, size):
        changes = changes_of(piece)
        halves = split(changes, key)
        kept = keep(halves, changes.xid, never, [])
        assert kept.all()
        truncated_at = max((n for n, e in enumerate(piece) if e.op == "t"), default=-1)
        if truncated_at >= 0:
            sink.clear()
        net = collapse(changes, halves, kept, key, truncated_at)
        touched = zip(*(net.rows.column(column).to_pylist() for column in key), strict=True)
        assert net.fresh.tolist() == [at not in sink for at in touched]
        apply(sink, net, key, unknown)
    assert sink == source


def net_of(*events: Event) -> tuple[Collapsed, dict[str, int]]:
    changes = changes_of(events)
    halves = split(changes, (1,))
    net = collapse(changes, halves, np.ones(len(halves.row), dtype=np.bool_), (1,))
    return net, {key: n for n, key in enumerate(net.rows.column(1).to_pylist())}


def move(before: str, after: str) -> Event:
    return Event("u", ("n", after, "?", "m", "w"), frozenset({2}), (None, before, None, None, None), "K")


def test_a_swap_takes_what_is_missing_from_the_other_row() -> None:
    net, at = net_of(move("a", "tmp"), move("b", "a"), move("tmp", "b"))
    assert sorted(at) == ["a", "b", "tmp"]
    origin = net.origin[0].to_pylist()
    assert (origin[at["a"]], origin[at["b"]], origin[at["tmp"]]) == ("b", "a", None)
    assert {name: bool(net.erased[n]) for name, n in at.items()} == {"a": False, "b": False, "tmp": True}
    assert {c: flags.tolist() for c, flags in net.missing.items()} == {2: (~net.erased).tolist()}


def test_values_sent_on_the_way_travel_along() -> None:
    sent = Event("u", ("n", "2", "sent", "m", "w"))
    net, at = net_of(move("1", "2"), sent, move("2", "3"), move("3", "4"))
    assert net.rows.column(2)[at["4"]].as_py() == "sent"
    assert not net.missing
    assert net.erased[[at["1"], at["2"], at["3"]]].all()


def test_a_reinserted_row_does_not_inherit() -> None:
    gone = Event("d", None, frozenset(), (None, "1", None, None, None), "K")
    back, later = Event("i", ("n", "1", None, "m", "w")), Event("u", ("o", "1", "?", "m", "w"), frozenset({2}))
    net, at = net_of(gone, back, later)
    assert net.rows.to_pylist()[at["1"]] == {"note": "o", "k1": "1", "big": None, "k2": "m", "huge": "w"}
    assert not net.missing
    assert not net.erased[at["1"]]


def test_a_row_out_of_nothing_has_no_origin() -> None:
    """Only a mistake, not a chunk's filter, would drop the insert between the delete and the update."""
    gone = Event("d", None, frozenset(), (None, "1", None, None, None), "K")
    changes = changes_of([gone, Event("u", ("n", "1", "?", "m", "w"), frozenset({2})), Event("t")])
    halves = split(changes, (1,))
    for kept, truncated_at in (([True, True], -1), ([False, True], 0)):
        net = collapse(changes, halves, np.array(kept), (1,), truncated_at)
        assert net.missing[2].tolist() == [True]
        assert net.origin[0].to_pylist() == [None]
    assert collapse(changes, halves, np.array([True, True]), (1,), 2).rows.num_rows == 0


def test_no_changes_collapse_to_no_rows() -> None:
    net, _ = net_of()
    assert net.rows.num_rows == 0
    assert net.rows.schema.names == list(COLUMNS)


@pytest.mark.parametrize("event", [Event("d"), Event("u", ("n", "?", "b", "m", "w"), frozenset({1}))])
def test_a_change_that_does_not_tell_its_key_is_an_error(event: Event) -> None:
    with pytest.raises(ProtocolError, match=r"public\.t does not carry its key"):
        split(changes_of([event]), (1,))


@dataclass
class Transaction:
    xid: int
    writes: dict[Key, Row | None] = field(default_factory=dict)  # the rows that it locks
    events: list[Event] = field(default_factory=list)
    truncated: bool = False
    committed: bool = False


class History:
    """A source whose transactions reach the stream at commit, and become visible to other transactions later."""

    def __init__(self, table: Table, base: int, rows: Rows, bounds: Sequence[int]) -> None:
        self.table, self.rows, self.bounds = table, rows, sorted(bounds)
        self.next_xid, self.xmax = base, base
        self.running: dict[int, Transaction] = {}
        self.stream: list[Event] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.sink: Rows = {}

    def chunk(self, key: Key) -> int:
        return int(np.searchsorted(self.bounds, int(key[0] or 0), "right"))

    def snapshot(self) -> Snapshot:
        xip = frozenset(t.xid for t in self.running.values() if t.xid < self.xmax)
        return Snapshot(min(xip, default=self.xmax), self.xmax, xip)

    def write(self, dice: Dice) -> None:
        mine = self.running.setdefault(dice.slot, Transaction(self.next_xid))
        self.next_xid = max(self.next_xid, mine.xid + 1)
        if dice.bits % 64 == 0:  # a truncate waits for all others
            for slot in set(self.running) - {dice.slot}:
                self.commit(slot)
                self.end(slot)
        others = [t for t in self.running.values() if t is not mine]
        if mine.committed or any(t.truncated for t in others):
            return
        if dice.bits % 64 == 0:
            mine.writes = dict.fromkeys(KEYS[self.table.key])
            mine.truncated = True
            mine.events.append(Event("t"))
            return
        seen = {k: r for k, r in {**self.rows, **mine.writes}.items() if r is not None}
        usable = [k for k in KEYS[self.table.key] if not any(k in t.writes for t in others)]
        after = dict(seen)
        mine.events += self.table.step(after, usable, dice)
        touched = {k for k in usable if seen.get(k) != after.get(k)}
        touched |= {self.table.key_of(row) for e in mine.events for row in (e.new, e.old) if row}
        mine.writes.update({k: after.get(k) for k in touched})

    def commit(self, slot: int) -> None:
        mine = self.running.get(slot)
        if mine and not mine.committed:
            mine.committed = True
            self.stream += [Event(e.op, e.new, e.unchanged, e.old, e.old_kind, mine.xid) for e in mine.events]

    def end(self, slot: int, abort: bool = False) -> None:
        """Make a committed transaction visible, or abort one."""
        mine = self.running.get(slot)
        if mine and (mine.committed or abort):
            del self.running[slot]
            self.xmax = max(self.xmax, mine.xid + 1)
            merged = {**self.rows, **(mine.writes if mine.committed else {})}
            self.rows = {k: r for k, r in merged.items() if r is not None}

    def read_chunk(self, chunk: int) -> None:
        if chunk not in self.snapshots and not any(t.truncated for t in self.running.values()):
            self.snapshots[chunk] = self.snapshot()
            self.sink.update({k: r for k, r in self.rows.items() if self.chunk(k) == chunk})

    def step(self, dice: Dice) -> None:
        if dice.action < 18:
            self.write(dice)
        elif dice.action < 23:
            self.commit(dice.slot)
        elif dice.action < 29:
            self.end(dice.slot, abort=dice.bits % 8 == 0)
        elif dice.action < 31:
            self.read_chunk(dice.first % (len(self.bounds) + 1))
        else:
            self.next_xid += 1

    def finish(self) -> None:
        for slot in sorted(self.running):
            self.commit(slot)
            self.end(slot)
        for chunk in range(len(self.bounds) + 1):
            self.read_chunk(chunk)


@pytest.mark.lengthy
@settings(max_examples=300, deadline=None)
@given(
    full=st.sampled_from([False, False, True]),
    base=NEAR_WRAP,
    initial=st.sets(st.integers(0, 8), min_size=2),
    bounds=st.lists(st.integers(1, 8), unique=True, min_size=1, max_size=3),
    steps=STEPS,
    size=st.integers(1, 40),
)
def test_chunks_and_stream_make_the_source(
    full: bool, base: int, initial: set[int], bounds: list[int], steps: list[Dice], size: int
) -> None:
    key = (1,)
    table = Table(key, full)
    history = History(table, base, {(str(n),): table.row((str(n),), 0b111111) for n in initial}, bounds)
    for dice in steps:
        history.step(dice)
    history.finish()

    # Re-read rows are a chunk from then on, with its own snapshot: the stream may still be behind it.
    sink, snapshots = history.sink, [history.snapshots[c] for c in range(len(bounds) + 1)]
    now = history.snapshot()
    again: set[Key] = set()

    def read_again(at: Key) -> Row | None:
        again.add(at)
        return history.rows.get(at)

    def chunk_of(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
        keys = [(k,) for k in columns[0].to_pylist()]
        return np.array([len(bounds) + 1 if k in again else history.chunk(k) for k in keys])

    for piece in pieces(history.stream, size):
        changes = changes_of(piece)
        truncated_at = -1
        for row in np.flatnonzero(changes.op == ord("t")):
            meaning = truncate_visibility(int(changes.xid[row]), snapshots)
            if meaning is Visibility.SOME:
                sink, snapshots = dict(history.rows), [now] * (len(bounds) + 2)
                truncated_at = -1
            elif meaning is Visibility.NONE:
                sink.clear()
                truncated_at = int(row)
        halves = split(changes, key)
        kept = keep(halves, changes.xid, chunk_of, snapshots)
        apply(sink, collapse(changes, halves, kept, key, truncated_at), key, read_again)
        if again and len(snapshots) == len(bounds) + 1:
            snapshots.append(now)
    assert sink == history.rows
