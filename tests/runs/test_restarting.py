"""When a job is restarted, when a slot has kept too much, what a heartbeat tolerates: decided from numbers alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    SlotBudgetExceeded,
    SparkLost,
    StateUnwritable,
    StreamFailed,
)
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.restart_strategy import Attempt, Failure, Restart
from airflow_cdc_provider.engine.postgres.slot_budget import Action, Budget, BudgetWatch
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.runs import restarting
from airflow_cdc_provider.engine.runs import run as run_module
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from airflow_cdc_provider.engine.state.history import read_history

FIXED = Restart(attempts=3, delay=5.0)
RATE = Restart("failure-rate", failures=2, interval=60.0, delay=1.0)


@pytest.mark.parametrize(
    ("restart", "failures", "number"),
    [
        (Restart("none"), [0], None),
        (FIXED, [0], 1),
        (FIXED, [0, 6, 12], 3),
        (FIXED, [0, 6, 12, 18], None),
        (FIXED, [0, 6000, 12000, 18000], None),  # however long each took
        (RATE, [0], 1),
        (RATE, [0, 59], 2),
        (RATE, [0, 30, 59], None),
        (RATE, [0, 30, 60], 2),
        (RATE, [0, 61, 122, 183, 244], 1),
    ],
)
def test_what_follows_a_failure(restart: Restart, failures: list[float], number: int | None) -> None:
    of = restart.failures if restart.strategy == "failure-rate" else restart.attempts
    assert restart.after([Failure(at, False) for at in failures]) == (
        None if number is None else Attempt(number, of, restart.delay)
    )


@pytest.mark.parametrize(
    ("progressed", "number"),
    [("----", None), ("---c", 1), ("--c-", 2), ("-c--", 3), ("c---", None), ("cccc", 1), ("c" * 100 + "--", 3)],
)
def test_failures_count_since_the_last_commit(progressed: str, number: int | None) -> None:
    """So a stream that runs for months does not use up its attempts, and one that commits nothing gives up."""
    failures = [Failure(i, mark == "c") for i, mark in enumerate(progressed)]
    assert FIXED.after(failures) == (None if number is None else Attempt(number, 3, 5.0))


def test_what_a_job_says_of_itself_tells_whether_it_has_committed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[bool]] = []

    class Watched(Restart):
        def after(self, failures: Sequence[Failure]) -> Attempt | None:
            seen.append([failure.progressed for failure in failures])
            return super().after(failures) if len(failures) < 6 else None

    reports: list[dict[str, Any]] = [{}, {"finished": 0}, {}, {"finished": 0}, {"finished": 1}, {"finished": 1}]
    pipeline = replace(parse({}), stream=replace(parse({}).stream, restart=Watched(attempts=5, delay=0.0)))
    run = Run(pipeline, State(str(tmp_path)), "stream", 1)
    monkeypatch.setattr(restarting, "_look_at_slot", lambda run: None)
    monkeypatch.setattr(restarting, "rejoin", lambda run: None)

    def attempt(record: object) -> None:
        run.progress = {**run.progress, **reports.pop(0)}
        raise StreamFailed("broken", "")

    with pytest.raises(StreamFailed):
        restarting.keep_trying(run, None, attempt)  # type: ignore[arg-type]
    assert seen[-1] == [False, False, False, False, True, False]
    assert run.report()["restarts"] == 5
    assert run.report()["progressed"]
    run.history.write()
    assert [(error["message"], error["count"]) for error in read_history(run.state)["errors"]] == [("broken", 5)]


def test_the_end_of_spark_is_no_error_of_a_job_that_is_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A signal to all of its processes ends the JVM, too."""
    run = Run(parse({}), State(str(tmp_path)), "stream", 1)
    monkeypatch.setattr(restarting, "_look_at_slot", lambda run: None)

    def attempt(record: object) -> None:
        raise SparkLost("its JVM has ended", "")

    with pytest.raises(SparkLost):
        restarting.keep_trying(run, None, attempt)  # type: ignore[arg-type]

    def stopped(record: object) -> None:
        run.ask_to_stop()
        attempt(record)

    assert restarting.keep_trying(run, None, stopped) is None  # type: ignore[arg-type,func-returns-value]


def test_a_heartbeat_may_fail_while_others_still_take_the_job_for_alive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(parse({}), State(str(tmp_path)), "stream", 1)
    run.beat()
    (tmp_path / "jobs").rename(tmp_path / "away")
    (tmp_path / "jobs").touch()
    with pytest.raises(StateUnwritable):
        run.beat()  # the first one is not tolerated
    run.try_beat()
    run.check()
    (tmp_path / "jobs").unlink()
    run.try_beat()
    assert len(read_heartbeats(run.state)) == 1
    (tmp_path / "jobs").rename(tmp_path / "too")
    (tmp_path / "jobs").touch()
    monkeypatch.setattr(run_module, "STALE_SECONDS", 0.0)
    run.keep_beating()  # ends automatically
    with pytest.raises(StateUnwritable, match="the heartbeat could not be written"):
        run.check()


def parse(stream: dict[str, Any]) -> Pipeline:
    server = {"dsn": "postgresql://db/a"}
    return Pipeline.parse(
        {"pipeline": "p", "source": server | {"tables": ["a.b"]}, "sink": server, "state": "/s", "stream": stream}, {}
    )


@pytest.mark.parametrize(
    ("section", "restart"),
    [
        ({}, Restart()),
        ({"restart": {}}, Restart()),
        ({"restart": {"strategy": "none"}}, Restart("none")),
        ({"restart": {"strategy": "fixed-delay", "attempts": 3, "delay": "1 minute"}}, Restart(attempts=3, delay=60.0)),
        (
            {"restart": {"strategy": "failure-rate", "failures": 4, "interval": "5 minutes", "delay": 0}},
            Restart("failure-rate", failures=4, interval=300.0, delay=0.0),
        ),
    ],
)
def test_strategies_of_the_file(section: dict[str, Any], restart: Restart) -> None:
    assert parse(section).stream.restart == restart


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"restart": "none"}, ["stream.restart", "mapping"]),
        ({"restart": {"strategy": "always"}}, ["stream.restart.strategy", "a text", "failure-rate"]),
        ({"restart": {"strategy": "none", "delay": 1}}, ["stream.restart.delay", "unknown key", "strategy"]),
        ({"restart": {"attempts": 0}}, ["stream.restart.attempts", "from 1 on"]),
        ({"restart": {"failures": 3}}, ["stream.restart.failures", "attempts, delay, strategy"]),
        ({"restart": {"strategy": "failure-rate", "interval": 0}}, ["stream.restart.interval", "above zero"]),
        ({"max_retained_wal": "10GB"}, ["stream.max_retained_wal", "'10GB'"]),
        ({"on_max_retained_wal": "drop"}, ["stream.on_max_retained_wal", "drop-slot"]),
    ],
)
def test_what_is_wrong_is_refused(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(section)
    assert [word for word in words if word not in f"{refused.value} {refused.value.solution}"] == []


def slot(retained: int) -> SlotState:
    return SlotState("pgoutput", "shop", False, None, 1, 1, "reserved", retained)


def test_levels() -> None:
    budget = Budget(1000, "warn")
    assert [budget.level(size) for size in (0, 800, 801, 1000, 1001)] == ["ok", "ok", "warning", "warning", "exceeded"]


def test_each_level_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = BudgetWatch(Budget(1 << 20, "warn"), "s")
    with caplog.at_level(logging.WARNING):
        for percent in (10, 85, 90, 120, 500, 10, 95):
            watch.look(slot(percent * (1 << 20) // 100))
    assert [record.getMessage().partition(" %")[0][-3:].strip() for record in caplog.records] == ["85", "120", "95"]
    assert "slot 's' retains 870.4 KiB" in caplog.text


@pytest.mark.parametrize(
    ("action", "solution"), [("stop", "raise stream.max_retained_wal"), ("drop-slot", "resnapshot --all")]
)
def test_the_action_has_numbers(action: Action, solution: str) -> None:
    watch = BudgetWatch(Budget(1 << 20, action), "s")
    watch.look(slot(1 << 20))
    with pytest.raises(SlotBudgetExceeded, match=r"'s' retains 1\.0 MiB.* is 1\.0 MiB$") as exceeded:
        watch.look(slot((1 << 20) + 1))
    assert solution in exceeded.value.solution


def test_a_job_that_begins_beyond_the_budget_may_catch_up() -> None:
    watch = BudgetWatch(Budget(1 << 20, "stop"), "s")
    for percent in (300, 360, 200, 50, 350):
        watch.look(slot(percent * (1 << 20) // 100))
    with pytest.raises(SlotBudgetExceeded, match=r"retains 3\.7 MiB.* is 1\.0 MiB \(3\.6 MiB here, to catch up\)"):
        watch.look(slot(370 * (1 << 20) // 100))
