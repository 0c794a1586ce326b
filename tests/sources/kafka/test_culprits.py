"""The search for the messages of a unit that fail, without Spark: a condition decides whether a unit fails."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import CdcError, ConnectionFailed, ValueRefused
from airflow_cdc_provider.engine.sources.kafka.culprits import UnitMessages, culprits, first_failing_message
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip

UNIT = UnitMessages.between({"a": {"0": 5, "1": 7}}, {"a": {"0": 105, "1": 7, "2": 30}, "b": {"0": 70}})
PLACES = [(topic, p, n) for topic, p, begin, end in UNIT.ranges for n in range(begin, end)]


def members(part: UnitMessages) -> set[tuple[str, str, int]]:
    return {(topic, p, n) for topic, p, begin, end in part.ranges for n in range(begin, end)}


@given(st.sets(st.sampled_from(PLACES), max_size=20))
def test_all_that_fail_by_themselves_are_found(bad: set[tuple[str, str, int]]) -> None:
    tries = 0

    def attempt(part: UnitMessages) -> CdcError | None:
        nonlocal tries
        tries += 1
        assert all(end.get(p) for end in part.end.values() for p in end)
        return ValueRefused("no", "") if members(part) & bad else None

    found = list(culprits(UNIT, attempt))
    assert all(each.part.size == 1 for each in found)
    assert {place for each in found for place in members(each.part)} == bad
    assert tries <= 1 + 2 * len(bad) * (log2(UNIT.size) + 1)


@given(st.sets(st.integers(1, UNIT.size)))
def test_the_message_is_found_with_which_a_unit_begins_to_fail(failing: set[int]) -> None:
    """Later messages may compensate for it, or for others."""

    def attempt(part: UnitMessages) -> int | None:
        return part.size if part.size in failing else None

    assert first_failing_message(UNIT, lambda part: None) is None
    failing = {*failing, UNIT.size}
    found = first_failing_message(UNIT, attempt)
    assert found is not None
    message, size = found
    assert members(message) == {PLACES[size - 1]}
    assert members(UNIT.cut(size)[0]) == set(PLACES[:size])
    assert size in failing
    assert size - 1 not in failing


def test_what_fails_only_together_is_named_as_a_range() -> None:
    one, other = PLACES[3], PLACES[150]
    (found,) = culprits(UNIT, lambda part: ValueRefused("no", "") if {one, other} <= members(part) else None)
    assert {one, other} <= members(found.part)
    assert found.part.place == UNIT.place == "a[0] 5-104, a[2] 0-29, b[0] 0-69"


def test_nothing_is_looked_for_that_nobody_asks_for_and_an_outage_is_none() -> None:
    tried: list[UnitMessages] = []

    def refused(part: UnitMessages) -> CdcError | None:
        tried.append(part)
        return ValueRefused("no", "")

    assert next(culprits(UNIT, refused)).part.place == "a[0] 5-5"
    assert len(tried) <= log2(UNIT.size) + 2
    assert list(culprits(UNIT, lambda part: None)) == []

    def lost(part: UnitMessages) -> CdcError | None:
        raise ConnectionFailed("gone", "")

    with pytest.raises(ConnectionFailed):
        next(culprits(UNIT, lost))


def test_a_skip_knows_whether_it_stands_in_a_unit() -> None:
    skip = Skip("a", 0, 5, 9)
    assert skip.place == "a[0] 5-9"
    assert skip.within({"a": {"0": 9}}, {"a": {"0": 10}})
    assert not skip.within({"a": {"0": 10}}, {"a": {"0": 20}})
    assert not skip.within({}, {"a": {"0": 5}})
    assert skip.within({}, {"a": {"0": 6}})
