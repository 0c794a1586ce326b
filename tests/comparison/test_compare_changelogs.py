"""The comparison of a source with the folded changelog of it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from airflow_cdc_provider.engine.comparison import compare as comparison
from airflow_cdc_provider.engine.comparison.compare import TableResult
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.postgres.connection import rows
from airflow_cdc_provider.engine.sinks.postgres.compared import changelog_sides
from tests.comparison.two_sides import Scripted, session
from tests.support.damages import Session, compare, found

__all__ = ["session"]

LOG_DDL = """
CREATE TABLE public.t (
    id int, part text, v text, big text, _op "char", _commit_lsn pg_lsn, _seq bigint, _xid bigint,
    _commit_ts timestamptz, _before jsonb, _unchanged text[]
)
"""


@dataclass
class Log:
    """Writes the source's table and the changelog of it."""

    session: Session
    lsn: int = 100

    def __post_init__(self) -> None:
        columns = 'id int, part text COLLATE "C", v text, big text COLLATE "POSIX", PRIMARY KEY (id, part)'
        rows(self.session.source, f"CREATE TABLE public.t ({columns})")
        rows(self.session.target, LOG_DDL)

    def hold(self, *values: tuple[int, str, str | None, str | None]) -> None:
        for row in values:
            rows(self.session.source, "INSERT INTO public.t VALUES (%s, %s, %s, %s)", row)

    def event(
        self,
        op: str,
        row: tuple[int | None, str | None, str | None, str | None],
        before: Mapping[str, str | None] | None = None,
        unchanged: list[str] | None = None,
        seq: int | None = 1,
        step: int = 1,
    ) -> None:
        self.lsn += step
        rows(
            self.session.target,
            "INSERT INTO public.t VALUES (%s, %s, %s, %s, %s, %s, %s, 1, now(), %s, %s)",
            (*row, op, format_lsn(self.lsn), seq, None if before is None else json.dumps(before), unchanged),
        )

    def compare(self, live: comparison.Live | None = None) -> TableResult:
        (result,) = compare(
            self.session.source, self.session.target, [self.session.pair()], live, sides=changelog_sides
        )
        return result


@pytest.fixture
def log(session: Session) -> Log:
    return Log(session)


def test_a_changelog_is_folded(log: Log) -> None:
    log.event("r", (0, "a", "before the truncate", "b"), seq=None)
    log.event("t", (None, None, None, None))
    log.event("i", (1, "a", "x", "long"))
    log.event("u", (1, "a", "y", None), unchanged=["big"])
    log.event("u", (1, "a", None, None), unchanged=["big"], seq=2, step=0)
    log.event("i", (2, "a", "gone", "b"))
    log.event("d", (2, "a", None, None), before={"id": "2", "part": "a"})
    log.event("u", (3, "b", "moved", "b"), before={"id": "4", "part": "b"})
    log.event("u", (5, "c", "stays", ""), before={"id": "5", "part": "c", "v": "old", "big": None})
    log.event("i", (6, "d", "older", "b"))
    log.event("r", (6, "d", "newer", "b"), seq=None, step=0)
    log.hold((1, "a", None, "long"), (3, "b", "moved", "b"), (5, "c", "stays", ""), (6, "d", "newer", "b"))
    assert log.compare() == TableResult("public.t", 4, 4, True, (), 0)

    log.event("i", (7, "e", None, None))
    log.event("u", (3, "b", "other", None), unchanged=["big"])
    log.event("d", (5, "c", None, None), before={"id": "5", "part": "c", "v": "stays", "big": ""})
    result = log.compare()
    assert found(result) == {("extra", "7", "e"), ("different", "3", "b"), ("missing", "5", "c")}
    assert (result.source_rows, result.target_rows) == (4, 4)
    assert found(log.compare(Scripted(lambda: None))) == found(result)


def test_values_of_an_earlier_life_are_not_the_rows(log: Log) -> None:
    log.event("i", (1, "a", "x", "another row's"))
    log.event("d", (1, "a", None, None), before={"id": "1", "part": "a"})
    log.event("u", (1, "a", "x", None), before={"id": "2", "part": "a"}, unchanged=["big"])
    log.hold((1, "a", "x", "whatever"))
    assert log.compare().equal
    assert log.compare(Scripted(lambda: None)).equal
    log.event("u", (1, "a", "z", None), unchanged=["big"])
    assert found(log.compare()) == {("different", "1", "a")}
    assert found(log.compare(Scripted(lambda: None))) == {("different", "1", "a")}


def test_a_lagging_changelog_settles(log: Log) -> None:
    log.event("r", (1, "a", "x", "b"))
    log.hold((1, "a", "y", "b"))
    assert found(log.compare()) == {("different", "1", "a")}
    live = Scripted(lambda: None)

    def apply_late() -> None:
        if len(live.asked) == 3:
            log.event("u", (1, "a", "y", None), unchanged=["big"])

    live.step = apply_late
    assert log.compare(live).equal
    assert len(live.asked) == 3


@pytest.mark.parametrize("seed", range(3))
def test_random_changelogs(log: Log, seed: int) -> None:
    """In every history, the folded log equals the table, and a tampered value is found wherever it is known."""
    draw = random.Random(seed)
    table: dict[tuple[int, str], tuple[str, str]] = {}
    unknown: set[tuple[int, str]] = set()
    for step in range(500):
        key = (draw.randint(1, 15), draw.choice(["a", '"', "moved"]))
        op = "t" if step == 200 else draw.choice("iiiiuuuuumd")
        seq = draw.choice([0, 1, 2, None])
        value, big = str(draw.random()), str(draw.random())
        texts = {"id": str(key[0]), "part": key[1]}
        if op == "t":
            log.event("t", (None, None, None, None), seq=1)
            table.clear()
            unknown.clear()
        elif op == "i" and key not in table:
            log.event(draw.choice("ri"), (*key, value, big), seq=seq)
            table[key] = (value, big)
        elif op == "u" and key in table:
            sent = draw.random() < 0.5
            unchanged = None if sent else ["big"]
            log.event("u", (*key, value, big if sent else None), unchanged=unchanged, seq=seq)
            table[key] = (value, big if sent else table[key][1])
            if sent:
                unknown.discard(key)
        elif op == "m" and key in table:
            new = (draw.randint(1, 15), "moved")
            if new in table:
                continue
            log.event("u", (*new, value, None), before=texts, unchanged=["big"], seq=seq)
            table[new] = (value, table.pop(key)[1])
            unknown.discard(key)
            unknown.add(new)
        elif op == "d" and key in table:
            log.event("d", (*key, None, None), before=texts, seq=seq)
            del table[key]
            unknown.discard(key)
    log.hold(*((*key, *values) for key, values in table.items()))
    assert len(table) > 5
    result = log.compare()
    assert result.differences == ()
    assert (result.source_rows, result.target_rows) == (len(table), len(table))
    rows(log.session.source, "UPDATE public.t SET big = ''")
    expected = {("different", str(number), part) for number, part in table.keys() - unknown}
    assert found(log.compare()) == expected
