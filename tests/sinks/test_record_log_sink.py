"""A sink over a log of entries: the rights of an overtaken run, and steps that are decided before they are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.errors import Failpoint, Fenced
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.lake.log import Log
from airflow_cdc_provider.engine.sinks.lake.record import Commit, LakeRecord
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step
from tests.sinks.begun_sink import IDENTITY, TARGET, WHOLE
from tests.sinks.log_places import place, processes

__all__ = ["place"]


@dataclass(frozen=True)
class Numbers(LakeRecord):
    """A sink whose commits change several files, each of which records the step's number."""

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
def sink(place: Storage) -> Numbers:
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
    monkeypatch.setattr("airflow_cdc_provider.engine.sinks.lake.record._PATIENCE", 1.0)  # no process is at the step
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
    """This covers an automatic restart in the same run, and the next task of it: neither takes the epoch."""
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
    assert record.epoch > epoch, (
        "it is taken before the step is carried out, so that no other run decides another meanwhile"
    )
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
    sink = Numbers(Storage(url), "shop", "changelog")
    for i in range(30):
        sink._append(epoch, who, lambda contents: Commit(work={"t1": f"{who}{i}"}, then=Change()))  # noqa: B023


def test_processes_that_commit_at_once_help_each_other(tmp_path: Path) -> None:
    sink = Numbers(Storage(str(tmp_path)), "shop", "changelog")
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
