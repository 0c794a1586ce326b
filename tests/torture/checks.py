"""Invariants as functions of a history: each returns the violations, or nothing if there are none."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from airflow_cdc_provider.engine.core.lsn import format_lsn
from tests.torture.history import Change, Entry, Gap, History, Reading, Sight, Transaction

_SHOWN = 5


def violations(history: History, mode: str, total: int) -> list[str]:
    """Return all violations of a finished run.

    :param mode: ``mirror`` or ``changelog``.
    :param total: the sum over all accounts, which never changes.
    """
    if mode == "mirror":
        return [*totals(history.sights, total), *prefixes(history.transactions, history.sights)]
    return [
        *exactly_once(history.transactions, history.readings, history.gaps, history.entries),
        *whole_transactions(history.entries),
        *growing(history.entries, history.sights),
        *copied_once(history.readings, history.snapshot_rows),
    ]


def totals(sights: Iterable[Sight], total: int) -> list[str]:
    """Return violations of the constant total: readers of a consistent mirror see whole transfers or nothing."""
    wrong = [s for s in sights if s.consistent and s.total != total]
    return [
        f"at applied {format_lsn(s.applied)} a reader saw accounts of {s.total}, not {total}" for s in wrong[:_SHOWN]
    ]


class Replay:
    """The source's state after each transaction, as the number of rows and the sum of their digests."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, int]] = {}
        self._sums = Counter[str]()

    def apply(self, change: Change) -> None:
        rows = self._rows.setdefault(change.table, {})
        if change.op == "t":
            rows.clear()
            self._sums[change.table] = 0
            return
        if change.old_key is not None:
            self._sums[change.table] -= rows.pop(change.old_key)
        if change.new_key is not None:
            assert change.digest is not None
            rows[change.new_key] = change.digest
            self._sums[change.table] += change.digest

    def state(self, table: str) -> tuple[int, int]:
        return len(self._rows.get(table, ())), self._sums[table]


def prefixes(transactions: Sequence[Transaction], sights: Iterable[Sight]) -> list[str]:
    """Return violations of prefixes: readers of a consistent mirror see the source as of the applied LSN."""
    wrong, replay, following = [], Replay(), iter(transactions)
    upcoming = next(following, None)
    for sight in sorted((s for s in sights if s.consistent), key=lambda s: s.applied):
        while upcoming is not None and upcoming.end <= sight.applied:
            for change in upcoming.changes:
                replay.apply(change)
            upcoming = next(following, None)
        for table, seen in sight.tables.items():
            if seen != replay.state(table):
                wrong.append(
                    f"at applied {format_lsn(sight.applied)} a reader saw {table} with {seen[0]} rows, sum {seen[1]};"
                    f" the source had {replay.state(table)[0]} rows, sum {replay.state(table)[1]} there"
                )
    return wrong[:_SHOWN]


class Versions:
    """The highest version of each row that a reader has seen, and the rows that have disappeared since."""

    def __init__(self) -> None:
        self._highest: dict[str, dict[int, int]] = {}
        self._gone: dict[str, set[int]] = {}

    def see(self, table: str, rows: Mapping[int, int]) -> list[str]:
        """Compare the rows that a reader sees now, by version, with everything that it has seen before."""
        highest, gone = self._highest.setdefault(table, {}), self._gone.setdefault(table, set())
        wrong = []
        for n, version in rows.items():
            before = highest.get(n, -1)
            if version < before:
                wrong.append(f"row {n} of {table} went back from version {before} to {version}")
            elif version == before and n in gone:
                wrong.append(f"row {n} of {table} came back at version {version} after it was gone")
            highest[n] = max(before, version)
            gone.discard(n)
        gone.update(highest.keys() - rows.keys())
        return wrong[:_SHOWN]


def acknowledged_early(slot: int, applied: int) -> list[str]:
    """Return a violation if the slot, read first, is acknowledged beyond the sink's applied LSN."""
    if slot <= applied:
        return []
    return [f"the slot is at {format_lsn(slot)}, the sink has applied only {format_lsn(applied)}"]


# -- changelogs ----------------------------------------------------------------------------------------


def expected_entries(
    transactions: Sequence[Transaction], readings: Sequence[Reading], gaps: Sequence[Gap]
) -> list[tuple[object, ...]]:
    """Return the entries that a changelog must hold in addition to read rows: changes in no read, in order."""
    by_table: dict[str, list[Reading]] = {}
    for reading in readings:
        by_table.setdefault(reading.table, []).append(reading)
    expected: list[tuple[object, ...]] = []
    slot = min((reading.applied for reading in readings), default=0)
    for transaction in transactions:
        if transaction.end <= slot or any(gap.start < transaction.end <= gap.end for gap in gaps):
            continue  # before the slot, or before it was recreated: never streamed, and contained in every read since
        # A read after the transaction was applied also contains it, but finds it in the changelog.
        seeing = {
            table: [r for r in of_table if r.applied < transaction.end and r.sees(transaction)]
            for table, of_table in by_table.items()
        }
        for change in transaction.changes:
            readers = seeing.get(change.table, [])
            if change.op == "t":
                if not readers:
                    expected.append((transaction.xid & 0xFFFFFFFF, transaction.commit, change.table, "t", None, None))
                continue
            erased = change.old_key is not None and not any(r.covers(change.old_key, change.old_n) for r in readers)
            written = change.new_key is not None and not any(r.covers(change.new_key, change.new_n) for r in readers)
            op = change.op
            if op == "u" and not (erased and written):
                op = "d" if erased else "i"
            if erased or written:
                key, version = (change.new_key, change.version) if written else (change.old_key, None)
                expected.append((transaction.xid & 0xFFFFFFFF, transaction.commit, change.table, op, key, version))
    return expected


def exactly_once(
    transactions: Sequence[Transaction], readings: Sequence[Reading], gaps: Sequence[Gap], entries: Sequence[Entry]
) -> list[str]:
    """Return violations of exactly once: each change occurs once, unchanged and in order, within its transaction."""
    expected = expected_entries(transactions, readings, gaps)
    found: list[tuple[object, ...]] = [
        (e.xid, e.commit, e.table, e.op, e.key, e.version) for e in sorted(entries, key=lambda e: (e.commit, e.seq))
    ]
    lost, surplus = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    wrong = [f"lost from the changelog: {change}" for change in list(lost.elements())[:_SHOWN]]
    wrong += [f"surplus in the changelog: {change}" for change in list(surplus.elements())[:_SHOWN]]
    if not wrong and expected != found:
        at = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        wrong.append(f"out of order in the changelog: {found[at]} where {expected[at]} was committed")
    return wrong


def whole_transactions(entries: Iterable[Entry]) -> list[str]:
    """Return violations of the rule that one commit LSN belongs to one transaction."""
    xids: dict[int, set[int]] = {}
    for entry in entries:
        xids.setdefault(entry.commit, set()).add(entry.xid)
    return [f"changes of transactions {sorted(x)} share {format_lsn(c)}" for c, x in xids.items() if len(x) > 1][
        :_SHOWN
    ]


def growing(entries: Iterable[Entry], sights: Iterable[Sight]) -> list[str]:
    """Return violations of growth: readers of a changelog see exactly the changes up to the applied LSN."""
    commits: dict[str, list[int]] = {}
    for entry in entries:
        commits.setdefault(entry.table, []).append(entry.commit)
    for of_table in commits.values():
        of_table.sort()
    wrong = []
    for sight in sights:
        for table, (count, _) in sight.tables.items():
            due = bisect_left(commits.get(table, []), sight.applied)
            if count != due:
                wrong.append(
                    f"at applied {format_lsn(sight.applied)} a reader saw {count} changes of {table}, not {due}"
                )
    return wrong[:_SHOWN]


def copied_once(readings: Iterable[Reading], snapshot_rows: Mapping[str, int]) -> list[str]:
    """Return violations of copies: rows that were read are in the changelog as often as they were read."""
    due = Counter[str]()
    for reading in readings:
        due[reading.table] += reading.rows
    return [
        f"{snapshot_rows.get(table, 0)} rows of {table} stand in the changelog as read, {count} were"
        for table, count in due.items()
        if snapshot_rows.get(table, 0) != count
    ]
