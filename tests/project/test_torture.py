"""Fixed seeds of the torture tests, and proof that their checks can fail: a manipulated history."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torture.checks import Versions, acknowledged_early, violations
from tests.torture.history import Change, Entry, Gap, History, Reading, Sight, Transaction
from tests.torture.nemesis import ACTIONS, schedule
from tests.torture.ordeal import torture
from tests.torture.schema import tables
from tests.torture.writers import Writer

T = "public.t"
TOTAL = 100


def change(op: str, old: int | None, new: int | None, digest: int | None = None) -> Change:
    keys = [None if n is None else f"k{n}" for n in (old, new)]
    return Change(T, op, keys[0], keys[1], old, new, digest, digest)


TRANSACTIONS = [
    Transaction(7, 100, 110, (change("i", None, 1, 11), change("i", None, 2, 12))),
    Transaction(8, 200, 210, (change("u", 1, 1, 21), change("u", 2, 3, 22))),
    Transaction(9, 300, 310, (change("d", 1, None),)),
    Transaction(10, 400, 410, (change("t", None, None), change("i", None, 5, 41))),
]
MIRROR = History(
    TRANSACTIONS,
    [],
    [],
    [
        Sight(150, True, {T: (2, 23)}, TOTAL),
        Sight(205, False, {T: (9, 99)}, 1),
        Sight(210, True, {T: (2, 43)}, TOTAL),
        Sight(500, True, {T: (1, 41)}, TOTAL),
    ],
)
# Two chunks: the first has seen transaction 8, the second has not; both come after transaction 7.
CHANGELOG = History(
    TRANSACTIONS,
    [Reading(T, 150, 1, "9:9:", numbers=frozenset({1})), Reading(T, 150, 1, "8:8:", numbers=frozenset({2, 3, 5}))],
    [],
    [Sight(250, True, {T: (1, 0)}, None), Sight(500, True, {T: (4, 0)}, None)],
    [
        Entry(T, 8, 200, 1, "u", "k3", 22),
        Entry(T, 9, 300, 1, "d", "k1"),
        Entry(T, 10, 400, 1, "t", None),
        Entry(T, 10, 400, 2, "i", "k5", 41),
    ],
    {T: 2},
)


def test_true_histories_are_accepted() -> None:
    assert violations(MIRROR, "mirror", TOTAL) == []
    assert violations(CHANGELOG, "changelog", TOTAL) == []


def without(index: int) -> Callable[[History], None]:
    def tamper(history: History) -> None:
        del history.entries[index]

    return tamper


def entry(index: int, **fields: object) -> Callable[[History], None]:
    def tamper(history: History) -> None:
        history.entries[index] = dataclasses.replace(history.entries[index], **fields)  # type: ignore[arg-type]

    return tamper


def sight(index: int, **fields: object) -> Callable[[History], None]:
    def tamper(history: History) -> None:
        history.sights[index] = dataclasses.replace(history.sights[index], **fields)  # type: ignore[arg-type]

    return tamper


def both(*tampers: Callable[[History], None]) -> Callable[[History], None]:
    def tamper(history: History) -> None:
        for each in tampers:
            each(history)

    return tamper


TAMPERED: dict[str, tuple[History, Callable[[History], None], str]] = {
    "half a transfer": (MIRROR, sight(0, total=TOTAL - 5), "accounts of 95"),
    "a row that is missing": (MIRROR, sight(2, tables={T: (1, 21)}), "a reader saw"),
    "a state between two transactions": (MIRROR, sight(2, tables={T: (2, 33)}), "a reader saw"),
    "a value of another version": (MIRROR, sight(3, tables={T: (1, 42)}), "a reader saw"),
    "a change that is lost": (CHANGELOG, without(1), "lost from the changelog"),
    "a change twice": (CHANGELOG, lambda h: h.entries.append(h.entries[0]), "surplus"),
    "a change that a chunk contains": (
        CHANGELOG,
        lambda h: h.entries.append(Entry(T, 8, 200, 2, "u", "k1")),
        "surplus",
    ),
    "a change with the values of another": (CHANGELOG, entry(0, version=21), "lost from the changelog"),
    "two changes in the wrong order": (
        CHANGELOG,
        both(entry(2, seq=2), entry(3, seq=1)),
        "out of order",
    ),
    "a change in another transaction": (CHANGELOG, entry(1, commit=200), "share"),
    "a change that is seen late": (CHANGELOG, sight(1, tables={T: (3, 0)}), "a reader saw 3 changes"),
    "a gap where there was none": (CHANGELOG, lambda h: h.gaps.append(Gap(210, 310)), "surplus"),
    "a row that is copied twice": (CHANGELOG, lambda h: h.snapshot_rows.update({T: 3}), "as read"),
}


@pytest.mark.parametrize(("history", "tamper", "said"), TAMPERED.values(), ids=TAMPERED.keys())
def test_a_tampered_history_is_not(history: History, tamper: Callable[[History], None], said: str) -> None:
    copy = History(
        *(type(value)(value) for value in (getattr(history, field.name) for field in dataclasses.fields(History)))
    )
    tamper(copy)
    wrong = violations(copy, "mirror" if history is MIRROR else "changelog", TOTAL)
    assert any(said in text for text in wrong), wrong


def test_versions_only_grow() -> None:
    versions = Versions()
    assert versions.see(T, {1: 5, 2: 6}) == []
    assert versions.see(T, {1: 7}) == []
    assert versions.see(T, {1: 7, 2: 8}) == []
    assert versions.see(T, {1: 6, 2: 8}) == [f"row 1 of {T} went back from version 7 to 6"]
    assert versions.see(T, {}) == []
    assert versions.see(T, {2: 8}) == [f"row 2 of {T} came back at version 8 after it was gone"]


def test_the_slot_must_not_be_ahead() -> None:
    assert acknowledged_early(100, 100) == []
    assert acknowledged_early(101, 100) == ["the slot is at 0/65, the sink has applied only 0/64"]


def test_a_seed_determines_tables_and_schedule() -> None:
    assert tables(5) == tables(5)
    assert [next(steps) for steps in (schedule(5), schedule(5))] == [next(schedule(5))] * 2
    assert tables(5) != tables(6)
    assert next(schedule(5)) != next(schedule(6))


def test_no_action_returns_before_each_has_been() -> None:
    actions = [step.action for step in itertools.islice(schedule(5), 2000)]
    assert sorted(actions[: len(ACTIONS)]) == sorted(ACTIONS)
    assert set(actions[len(ACTIONS) :]) == set(ACTIONS)


def test_transaction_ids_of_a_timeline_that_was_left_are_given_out_again() -> None:
    reading = Reading(T, 150, 1, "9:9:")
    assert [reading.sees(transaction) for transaction in TRANSACTIONS] == [True, True, False, False]
    left = dataclasses.replace(reading, left=205)
    assert [left.sees(transaction) for transaction in TRANSACTIONS] == [True, False, False, False]


class Recorder:
    """Records what a writer executes, in place of a session."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def execute(self, statement: object, *_: object) -> Recorder:
        self.said.append(str(statement))
        return self

    def transaction(self, force_rollback: bool = False) -> Recorder:
        return self.execute(f"rollback: {force_rollback}")

    copy = execute

    def cursor(self) -> Recorder:
        return self

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("end")

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def write(self, data: bytes) -> None:
        assert data == b""

    def fetchone(self) -> None:
        return None


def transactions(seed: int, lane: int) -> list[str]:
    """Return what a writer of a seed executes in its first transactions."""
    writer, recorder = Writer("", seed, lane, tables(seed), 1.0), Recorder()
    writer._connection = recorder  # type: ignore[assignment]
    writer._halt.set()  # it waits for nothing
    for _ in range(1000):
        writer._transaction()
    return recorder.said


def test_a_seed_determines_transactions() -> None:
    said = transactions(5, 0)
    assert said == transactions(5, 0)
    assert said != transactions(5, 1)
    assert said != transactions(6, 0)
    for part in ("COPY", "TRUNCATE", "DELETE", "PREPARE TRANSACTION", "ADD COLUMN", "rollback: True", "account_a"):
        assert any(part in statement for statement in said), part


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_a_seed(server_directory: Path) -> None:
    """Its first steps are few, among the most severe, and wait for progress; the nemesis has the time for all of them.

    Its writers are the slowest, because otherwise they would take most of the time.
    """
    seed, mode = 162062, "mirror"
    assert [step.marks for step in itertools.islice(schedule(seed), 3)] == [1, 1, 1]
    lines: list[str] = []
    directory = server_directory / f"torture-{seed}"
    directory.mkdir()
    directory.chmod(0o755)
    report = torture(seed, 20, mode, directory, lines.append, steps=3)
    assert report.wrong == [], "\n".join([*lines, *report.wrong])
    assert {"take over", "fail over to a standby", "start over"} <= report.counts["those steps"].keys()
    # What has not been seen proves nothing.
    for seen in ("changes", "different consistent states seen", "steps of the nemesis"):
        assert report.counts[seen] > 0, (seen, report.counts)
