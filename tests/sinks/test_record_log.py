"""The commit record of stores without transactions: who may append, the remains of crashes, and halted processes."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.sinks.lake import log as log_module
from airflow_cdc_provider.engine.sinks.lake.log import SPAN, Head, Log
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from tests.sinks.log_places import place, processes

__all__ = ["place"]


def begun(log: Log) -> Head:
    head = log.begin(Change({"head": {"epoch": 1}}), "begun")
    assert head is not None
    return head


def counted(log: Log, who: str) -> Change:
    """Return a change that adds one to a count, based on the head."""
    head = log.head()
    assert head is not None
    return Change({"counts": {who: head.contents.get("counts", {}).get(who, 0) + 1}})


def forget_heads() -> None:
    """Act as a process that has not seen the log yet."""
    log_module._heads.clear()


def test_of_all_who_have_read_the_same_head_one_appends(place: Storage) -> None:
    log = Log(place)
    head = begun(log)
    appended = [log.append(head, Change({"a": {str(i): i}}), "an entry") for i in range(3)]
    assert [found is not None for found in appended] == [True, False, False]
    assert log.head() == appended[0]


def test_a_log_begins_once(place: Storage) -> None:
    begun(Log(place))
    assert Log(place).begin(Change(), "begun again") is None


def test_of_many_threads_that_begin_at_once_one_does(place: Storage) -> None:
    together = threading.Barrier(8)
    found: list[Head | None] = []

    def begin() -> None:
        together.wait()
        found.append(Log(place).begin(Change({"head": {"by": threading.get_ident()}}), "begun"))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [head for head in found if head is not None]
    forget_heads()
    assert Log(place).head() == winner


def test_the_log_is_the_same_read_from_its_beginning_and_from_where_it_carries_its_contents(place: Storage) -> None:
    log = Log(place)
    head: Head | None = begun(log)
    for i in range(3 * SPAN):
        assert head is not None
        head = log.append(head, Change({"n": {str(i % 7): i}}, {"n": [str(i % 5)]}), f"entry {i}")
    forget_heads()
    assert Log(place).head() == head
    entries = list(log.entries())
    assert len(entries) <= 2 * SPAN, "old entries are removed"
    assert [e.number for e in entries] == list(range(entries[0].number, entries[-1].number + 1))


@pytest.mark.lengthy
@pytest.mark.parametrize("hint", [None, b"", b"rubbish", b"7", b"00000000000000000000", "old"])
def test_the_hint_is_no_more_than_that(place: Storage, hint: bytes | str | None) -> None:
    log = Log(place)
    head: Head | None = begun(log)
    first = head.number if head else 0
    for i in range(2 * SPAN + 3):
        assert head is not None
        head = log.append(head, Change({"n": {"i": i}}), "an entry")
    place.remove("_last")
    if hint is not None:
        place.replace("_last", hint if isinstance(hint, bytes) else str(first).encode())
    forget_heads()
    assert Log(place).head() == head


def test_a_sleeper_cannot_append_where_entries_have_been_removed(place: Storage) -> None:
    log = Log(place)
    old = begun(log)
    head: Head | None = old
    for i in range(3 * SPAN):
        assert head is not None
        head = log.append(head, Change({"n": {"i": i}}), "an entry")
    assert log.append(old, Change({"n": {"i": -1}}), "a sleeper's") is None
    forget_heads()
    assert Log(place).head() == head


def test_a_sleeper_cannot_append_to_a_log_that_is_gone_nor_to_the_next(place: Storage) -> None:
    log = Log(place)
    old = begun(log)
    assert log.drop(old)
    assert log.append(old, Change({"n": {"i": -1}}), "a sleeper's") is None
    assert log.head() is None
    anew = begun(log)
    assert log.append(old, Change({"n": {"i": -1}}), "a sleeper's") is None
    forget_heads()
    assert Log(place).head() == anew
    assert anew.number > old.number


def test_who_has_read_the_head_before_the_log_was_dropped_drops_no_other(place: Storage) -> None:
    log = Log(place)
    old = begun(log)
    assert log.append(old, Change(), "an entry") is not None
    assert not log.drop(old)
    assert log.head() is not None


def test_a_log_that_lacks_entries_is_not_taken_for_another(place: Storage) -> None:
    log = Log(place)
    head: Head | None = begun(log)
    for i in range(5):
        assert head is not None
        head = log.append(head, Change({"n": {"i": i}}), "an entry")
    names = [name for name in place.names() if name.endswith(".json")]
    forget_heads()
    kept = place.read(names[0])
    assert kept is not None
    place.remove(names[0])
    with pytest.raises(GateClosed, match="is incomplete"):
        log.head()
    place.replace(names[0], kept)
    place.replace(names[2], place.read(names[3]) or b"")
    with pytest.raises(GateClosed, match="does not follow"):
        log.head()


def _hammer(url: str, who: str, times: int) -> None:
    log = Log(Storage(url))
    for _ in range(times):
        while True:
            head = log.head()
            assert head is not None
            count = head.contents.get("counts", {}).get(who, 0) + 1
            total = head.contents.get("counts", {}).get("all", 0) + 1
            if log.append(head, Change({"counts": {who: count, "all": total}}), f"{who} {count}") is not None:
                break


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    place = Storage(str(tmp_path))
    begun(Log(place))
    hammers = [processes.Process(target=_hammer, args=(place.url, f"p{i}", 120)) for i in range(2)]
    for process in hammers:
        process.start()
    for process in hammers:
        process.join()
    assert [process.exitcode for process in hammers] == [0, 0]
    head = Log(place).head()
    assert head is not None
    assert head.contents["counts"] == {"p0": 120, "p1": 120, "all": 240}


@pytest.mark.lengthy
def test_threads_that_append_at_once_lose_nothing(place: Storage) -> None:
    begun(Log(place))
    threads = [threading.Thread(target=_hammer, args=(place.url, f"t{i}", 40)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head = Log(place).head()
    assert head is not None
    assert head.contents["counts"] == {**{f"t{i}": 40 for i in range(4)}, "all": 160}


def _append_with(url: str, armed: str) -> None:
    os.environ[VARIABLE] = armed
    log = Log(Storage(url))
    head = log.head()
    assert head is not None
    log.append(head, Change({"a": {"b": 1}}), "an entry")


@pytest.mark.parametrize(
    ("armed", "appended"), [("before-entry", 0), ("before-link", 0), ("after-link", 1), ("after-entry", 1)]
)
def test_an_entry_is_there_whole_or_not_at_all(tmp_path: Path, armed: str, appended: int) -> None:
    place = Storage(str(tmp_path))
    begun(Log(place))
    process = processes.Process(target=_append_with, args=(place.url, f"{armed}:kill"))
    process.start()
    process.join()
    assert process.exitcode == -9
    head = Log(place).head()
    assert head is not None
    assert len(head.contents.get("a", {})) == appended
    assert Log(place).append(head, Change(), "the next") is not None
    assert len(list(Log(place).entries())) == 2 + appended


SECTIONS, KEYS = st.sampled_from(["head", "tables", "chunks"]), st.sampled_from(list("abcd"))


CHANGES = st.builds(
    Change,
    set=st.dictionaries(SECTIONS, st.dictionaries(KEYS, st.integers() | st.none(), min_size=1)),
    removed=st.dictionaries(SECTIONS, st.lists(KEYS)),
    emptied=st.lists(SECTIONS, max_size=1),
)


@given(CHANGES, CHANGES, CHANGES)
def test_changes_add_up(before: Change, one: Change, other: Change) -> None:
    contents = before.apply({})
    try:
        both = one + other
    except ValueError:
        return
    assert both.apply(contents) == other.apply(one.apply(contents))
    assert Change.from_dict(both.to_dict()).apply(contents) == both.apply(contents)


def test_a_change_of_much_looks_at_what_goes_once() -> None:
    looks = []

    class Looked(list[str]):
        def __iter__(self) -> Iterator[str]:
            looks.append(1)
            return super().__iter__()

    names = [str(n) for n in range(100)]
    assert Change(removed={"files": Looked(names)}).apply({"files": dict.fromkeys(names, 1)}) == {}
    assert len(looks) == 1


# A log shows all that it does within three spans, and to make up the changes of long spans takes minutes.
SHORT = 5


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CHANGES, min_size=SHORT, max_size=3 * SHORT), st.lists(st.booleans(), min_size=5))
def test_the_contents_are_the_changes_of_all_entries(made: list[Change], fresh: list[bool]) -> None:
    with patch.object(log_module, "SPAN", SHORT):
        _follow(made, fresh)


def _follow(made: list[Change], fresh: list[bool]) -> None:
    """Append changes to a log, which is read before each, by the process that wrote it or by one that is new."""
    log = Log(Storage(f"memory://{uuid.uuid4().hex}"))
    head = begun(log)
    expected: Contents = {"head": {"epoch": 1}}
    for change, forgets in zip(made, itertools.cycle(fresh)):
        if forgets:
            forget_heads()
        expected = change.apply(expected)
        found = log.head()
        assert found == head
        appended = log.append(head, change, "a change")
        assert appended is not None
        head = appended
    forget_heads()
    found = log.head()
    assert found is not None
    assert found.contents == expected


def test_a_store_that_cannot_create_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="zip"):
        Storage(f"zip://x::{tmp_path}/a.zip").require_create()
    Storage(str(tmp_path)).require_create()
    assert not Storage(str(tmp_path)).names()
