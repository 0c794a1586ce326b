"""The commit record of stores without transactions: who may append, what a crash leaves, what a sleeper can do."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConfigError, Failpoint, Fenced, GateClosed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.lake import log as log_module
from airflow_cdc_provider.engine.sinks.lake.log import SPAN, Head, Log
from airflow_cdc_provider.engine.sinks.lake.record import Commit, LakeRecord
from airflow_cdc_provider.engine.sinks.lake.storage import Place
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step
from tests.sinks.begun_sink import IDENTITY, TARGET, WHOLE

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.sinks.test_record_log"])


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")
    yield found
    found.remove()


def begun(log: Log) -> Head:
    head = log.begin(Change({"head": {"epoch": 1}}), "begun")
    assert head is not None
    return head


def counted(log: Log, who: str) -> Change:
    """A change that adds one to a count, as it is at the head."""
    head = log.head()
    assert head is not None
    return Change({"counts": {who: head.contents.get("counts", {}).get(who, 0) + 1}})


def forget_heads() -> None:
    """Be a process that has seen no log yet."""
    log_module._heads.clear()


# -- the log ---------------------------------------------------------------------------------------


def test_of_all_who_have_read_the_same_head_one_appends(place: Place) -> None:
    log = Log(place)
    head = begun(log)
    appended = [log.append(head, Change({"a": {str(i): i}}), "an entry") for i in range(3)]
    assert [found is not None for found in appended] == [True, False, False]
    assert log.head() == appended[0]


def test_a_log_begins_once(place: Place) -> None:
    begun(Log(place))
    assert Log(place).begin(Change(), "begun again") is None


def test_of_many_threads_that_begin_at_once_one_does(place: Place) -> None:
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


def test_the_log_is_the_same_read_from_its_beginning_and_from_where_it_carries_its_contents(place: Place) -> None:
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


@pytest.mark.parametrize("hint", [None, b"", b"rubbish", b"7", b"00000000000000000000", "old"])
def test_the_hint_is_no_more_than_that(place: Place, hint: bytes | str | None) -> None:
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


def test_a_sleeper_cannot_append_where_entries_have_been_removed(place: Place) -> None:
    log = Log(place)
    old = begun(log)
    head: Head | None = old
    for i in range(3 * SPAN):
        assert head is not None
        head = log.append(head, Change({"n": {"i": i}}), "an entry")
    assert log.append(old, Change({"n": {"i": -1}}), "a sleeper's") is None
    forget_heads()
    assert Log(place).head() == head


def test_a_sleeper_cannot_append_to_a_log_that_is_gone_nor_to_the_next(place: Place) -> None:
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


def test_who_has_read_the_head_before_the_log_was_dropped_drops_no_other(place: Place) -> None:
    log = Log(place)
    old = begun(log)
    assert log.append(old, Change(), "an entry") is not None
    assert not log.drop(old)
    assert log.head() is not None


def test_a_log_that_lacks_entries_is_not_taken_for_another(place: Place) -> None:
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
    with pytest.raises(GateClosed, match="not whole"):
        log.head()
    place.replace(names[0], kept)
    place.replace(names[2], place.read(names[3]) or b"")
    with pytest.raises(GateClosed, match="does not follow"):
        log.head()


def _hammer(url: str, who: str, times: int) -> None:
    log = Log(Place(url))
    for _ in range(times):
        while True:
            head = log.head()
            assert head is not None
            count = head.contents.get("counts", {}).get(who, 0) + 1
            total = head.contents.get("counts", {}).get("all", 0) + 1
            if log.append(head, Change({"counts": {who: count, "all": total}}), f"{who} {count}") is not None:
                break


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
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


def test_threads_that_append_at_once_lose_nothing(place: Place) -> None:
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
    log = Log(Place(url))
    head = log.head()
    assert head is not None
    log.append(head, Change({"a": {"b": 1}}), "an entry")


@pytest.mark.parametrize(
    ("armed", "appended"), [("before-entry", 0), ("before-link", 0), ("after-link", 1), ("after-entry", 1)]
)
def test_an_entry_is_there_whole_or_not_at_all(tmp_path: Path, armed: str, appended: int) -> None:
    place = Place(str(tmp_path))
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CHANGES, min_size=SPAN, max_size=3 * SPAN), st.lists(st.booleans(), min_size=5))
def test_the_contents_are_the_changes_of_all_entries(made: list[Change], fresh: list[bool]) -> None:
    log = Log(Place(f"memory://{uuid.uuid4().hex}"))
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
        Place(f"zip://x::{tmp_path}/a.zip").require_create()
    Place(str(tmp_path)).require_create()
    assert not Place(str(tmp_path)).names()


# -- the record ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers(LakeRecord):
    """A sink whose commits change several files, each of which notes the step's number."""

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: int | None) -> None:
        pass

    def _carry_out(self, contents: Contents, step: Step) -> None:
        for name, value in step.work.items():
            found = (self.root.read(name) or b"0").decode().split()
            if int(found[0]) < step.number:
                self.root.replace(name, " ".join([str(step.number), *found[1:], value]).encode())

    def unit(self, epoch: int, start: int, end: int, work: Mapping[str, Any] | None = None) -> bool:
        def decide(contents: Contents) -> Commit | None:
            if not self._is_next(contents, start, end, []):
                return None
            then = record_contents.unit_applied(contents, end, 0.0)
            return Commit(then) if work is None else Commit(work=work, then=then)

        return self._append(epoch, "unit", decide) is not None

    def values(self, name: str) -> Sequence[str]:
        return (self.root.read(name) or b"0").decode().split()[1:]


@pytest.fixture
def sink(place: Place) -> Numbers:
    sink = Numbers(place, "shop", "changelog")
    sink.prepare([TARGET], [WHOLE], IDENTITY, 50)
    return sink


def test_a_run_that_is_overtaken_while_it_does_something_beside_the_sink_is_told(sink: Numbers) -> None:
    old = sink.take_epoch("old")
    with pytest.raises(Fenced), sink.fenced(old):
        sink.take_epoch("new")


def test_a_run_that_is_overtaken_between_its_look_and_its_write_does_not_write(sink: Numbers) -> None:
    old = sink.take_epoch("old")
    overtaken: list[int] = []

    def decide(contents: Contents) -> Commit:
        if not overtaken:
            head = sink._log.head()
            assert head is not None
            taking = record_contents.taken(contents, "new", 0.0)
            assert Log(sink._home / "log").append(head, taking, "taken") is not None
            overtaken.append(taking.set["head"]["epoch"])
        return Commit(record_contents.noted({"old": True}))

    with pytest.raises(Fenced):
        sink._append(old, "a note", decide)
    record = sink.record()
    assert record is not None
    assert "old" not in record.identity


def test_a_dropped_pipeline_takes_no_commits(sink: Numbers) -> None:
    epoch = sink.take_epoch("me")
    sink.deposit(epoch, "a", b"b")
    sink.drop()
    sink.drop()
    assert sink.record() is None
    assert sink.root.names("_airflow_cdc") == []
    with pytest.raises(Fenced):
        sink.unit(epoch, 50, 60)
    sink.prepare([TARGET], [WHOLE], IDENTITY, 80)
    with pytest.raises(Fenced):
        sink.unit(epoch, 50, 60)


def test_sweeping_leaves_the_chunks_of_this_run_alone(sink: Numbers) -> None:
    old = sink.take_epoch("old")
    for kind in ("units", "chunks"):
        sink._staging(kind, old).replace("f", b"1")  # type: ignore[arg-type]
    epoch = sink.take_epoch("me")
    for kind in ("units", "chunks"):
        sink._staging(kind, epoch).replace("f", b"1")  # type: ignore[arg-type]
    sink.sweep(old)
    assert len((sink._home / "staging").files()) == 4
    sink.sweep(epoch)
    assert (sink._home / "staging").files() == [f"chunks/{epoch}/f"]


def test_the_store_is_told_from_every_other(sink: Numbers) -> None:
    found = sink.identity()
    assert found == sink.identity() == Numbers(sink.root, "other", "mirror").identity()
    sink.root.remove()
    assert sink.identity() != found


# -- commits that change several objects ------------------------------------------------------------


def test_a_step_is_carried_out_before_the_record_tells_of_it(sink: Numbers) -> None:
    epoch = sink.take_epoch("me")
    assert sink.unit(epoch, 50, 60, {"t1": "a", "t2": "b"})
    assert (sink.values("t1"), sink.values("t2")) == (["a"], ["b"])
    assert sink.unit(epoch, 60, 70, {"t1": "c"})
    assert sink.values("t1") == ["a", "c"]
    assert len({e.number for e in sink._log.entries()}) == 6


@pytest.mark.parametrize("place_", ["after-entry", "before-step", "after-step"])
@pytest.mark.parametrize("next_", ["same run", "next run"])
def test_a_step_that_was_decided_is_carried_out_once_by_whoever_comes_next(
    sink: Numbers, place_: str, next_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_cdc_provider.engine.sinks.lake.record._PATIENCE", 1.0)  # nobody is at the step
    epoch = sink.take_epoch("me")
    monkeypatch.setenv(VARIABLE, f"{place_}:error")
    with pytest.raises(Failpoint):
        sink.unit(epoch, 50, 60, {"t1": "a", "t2": "b"})
    monkeypatch.delenv(VARIABLE)
    record = sink.record()
    assert record is not None
    assert record.applied == 50, "it is not in all tables yet"
    if next_ == "next run":
        epoch = sink.take_epoch("next")
        record = sink.record()
        assert record is not None
        assert record.applied == 60
    assert not sink.unit(epoch, 50, 60, {"t1": "a", "t2": "b"})
    assert sink.unit(epoch, 60, 70, {"t1": "c"})
    assert (sink.values("t1"), sink.values("t2")) == (["a", "c"], ["b"])


@pytest.mark.parametrize("entering", ["rejoins", "enters"])
def test_a_part_goes_on_behind_a_step_that_was_decided_under_its_epoch(
    sink: Numbers, entering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an automatic restart in the same run, and as the next task of it: neither takes the epoch."""
    epoch = sink.take_epoch("me")
    monkeypatch.setenv(VARIABLE, "before-step:error")
    with pytest.raises(Failpoint):
        sink.unit(epoch, 50, 60, {"t1": "a"})
    monkeypatch.delenv(VARIABLE)
    if entering == "rejoins":
        sink.end_sessions()
    else:
        assert sink.missing([TARGET]) == ()
    record = sink.record()
    assert record is not None
    assert sink.unit(epoch, record.applied, 65, {"t1": "b"}), "a unit that ends elsewhere than the one before"
    assert sink.values("t1") == ["a", "b"]


def test_sweeping_leaves_what_a_step_that_was_decided_still_needs(
    sink: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = sink.take_epoch("me")
    sink._staging("units", epoch).replace("f", b"1")
    monkeypatch.setenv(VARIABLE, "before-step:error")
    with pytest.raises(Failpoint):
        sink.unit(epoch, 50, 60, {"t1": "a"})
    sink.sweep(epoch)
    assert (sink._home / "staging").files() == [f"units/{epoch}/f"]
    with pytest.raises(Failpoint):
        sink.take_epoch("next")
    monkeypatch.delenv(VARIABLE)
    record = sink.record()
    assert record is not None
    assert record.epoch > epoch, "it is taken before the step is carried out, so that nobody decides another meanwhile"
    sink.sweep(record.epoch)
    assert (sink._home / "staging").files() == [f"units/{epoch}/f"]
    epoch = sink.take_epoch("the one after")
    record = sink.record()
    assert record is not None
    assert (record.epoch, record.applied, sink.values("t1")) == (epoch, 60, ["a"])
    sink.sweep(epoch)
    assert not (sink._home / "staging").files()


def test_a_step_that_an_overtaken_run_carries_out_late_changes_nothing(sink: Numbers) -> None:
    old = sink.take_epoch("old")
    head = sink._log.head()
    assert head is not None
    then = record_contents.unit_applied(head.contents, 60, 0.0)
    sink._log.append(head, record_contents.decided(head.number + 1, {"t1": "a"}, then), "decided")
    slept = sink._log.head()
    assert slept is not None
    epoch = sink.take_epoch("new")
    assert sink.unit(epoch, 60, 70, {"t1": "b"})
    sink._roll_forward(slept)
    assert sink.values("t1") == ["a", "b"]
    with pytest.raises(Fenced):
        sink.unit(old, 70, 80, {"t1": "c"})


def _units(url: str, epoch: int, who: str) -> None:
    sink = Numbers(Place(url), "shop", "changelog")
    for i in range(30):
        sink._append(epoch, who, lambda contents: Commit(work={"t1": f"{who}{i}"}, then=Change()))  # noqa: B023


def test_processes_that_commit_at_once_help_each_other(tmp_path: Path) -> None:
    sink = Numbers(Place(str(tmp_path)), "shop", "changelog")
    sink.prepare([TARGET], [WHOLE], IDENTITY, 50)
    epoch = sink.take_epoch("me")
    workers = [processes.Process(target=_units, args=(str(tmp_path), epoch, who)) for who in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    head = sink._log.head()
    assert head is not None
    assert record_contents.step_of(head.contents) is None
