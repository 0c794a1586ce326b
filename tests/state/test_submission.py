"""Submissions: the fate of a job, according to the state."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow_support import write_pipeline

# isort: split
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ExitCode,
    GateClosed,
    StateUnwritable,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.run_errors import request_stop
from airflow_cdc_provider.engine.state import job_watch, submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Owner, read_heartbeats, write_heartbeat
from airflow_cdc_provider.engine.state.submission import (
    Asker,
    Status,
    Submission,
    ask_to_stop,
    askers,
    read,
    stop,
)
from airflow_cdc_provider.operators.job_handle import FirstAction, Handle, first_action
from airflow_cdc_provider.triggers.job import TIMEOUT, JobMonitor, SparkJobTrigger
from tests.state.owners import DEAD, FENCED, LOST
from tests.support.patience import SECONDS
from tests.support.submissions import HERE, beat, failing, state, submitted

__all__ = ["state"]


@pytest.mark.parametrize(
    ("values", "asked", "status"),
    [
        ({"ended_at": None}, "", "running"),
        ({"ended_at": None}, "user", "running"),
        ({"ended_at": None}, "user airflow", "ending"),
        ({"ended_at": None}, "watcher", "ending"),
        ({"result": {"caught_up": True}}, "", "done"),
        ({"result": {"caught_up": False}}, "", "stopped"),
        ({"result": {"caught_up": False}}, "user", "done"),
        ({"result": {"caught_up": True}}, "airflow", "stopped"),
        ({"result": {"chunks": 3, "finished": 3}}, "", "done"),
        ({"result": {"chunks": 3, "finished": 2}}, "", "stopped"),
        ({"error": LOST}, "", "failed"),
        ({"error": LOST}, "watcher", "failed"),
        ({"error": LOST}, "airflow", "stopped"),
        ({"error": LOST}, "user watcher", "done"),
        ({"error": FENCED}, "user", "failed"),
    ],
)
def test_the_status_of_a_job(values: dict[str, Any], asked: str, status: str) -> None:
    job = replace(Submission.new("shop", "stream", []), **({"ended_at": 1.0} | values))

    assert job.status(frozenset(map(Asker, asked.split()))) == status


HANDLE = Handle("1", "do this", 2)


@pytest.mark.parametrize(
    ("handle", "fingerprint", "max_tries", "status", "step"),
    [
        (None, "do this", 2, None, FirstAction.SUBMIT),
        (HANDLE, "do this", 2, Status.RUNNING, FirstAction.REATTACH),
        (HANDLE, "do this", 2, Status.ENDING, FirstAction.SUBMIT),
        (HANDLE, "do this", 2, Status.DONE, FirstAction.RETURN),
        (HANDLE, "do this", 2, Status.FAILED, FirstAction.SUBMIT),
        (HANDLE, "do this", 2, Status.STOPPED, FirstAction.SUBMIT),
        (HANDLE, "do this", 2, None, FirstAction.SUBMIT),
        (HANDLE, "do this", 5, Status.RUNNING, FirstAction.SUBMIT),
        (HANDLE, "do this", 5, Status.DONE, FirstAction.SUBMIT),
        (HANDLE, "do that", 2, Status.RUNNING, FirstAction.SUBMIT),
        (HANDLE, "do that", 2, Status.DONE, FirstAction.SUBMIT),
    ],
)
def test_what_a_try_begins_with(
    handle: Handle | None, fingerprint: str, max_tries: int, status: Status | None, step: FirstAction
) -> None:
    assert first_action(handle, fingerprint, max_tries, status) is step


def test_the_first_word_of_an_end_counts(state: State) -> None:
    job = submitted(state)

    submission.end(state, job.id, exit_code=0, result={"caught_up": True})
    submission.end(state, job.id, exit_code=143, error=LOST)

    ended = read(state, job.id)
    assert ended is not None
    assert (ended.exit_code, ended.result, ended.error) == (143, {"caught_up": True}, None)
    submission.end(state, "unknown", exit_code=1)
    assert read(state, "unknown") is None


def test_old_submissions_are_forgotten(state: State) -> None:
    long_ago = time.time() - 7200
    old = [submitted(state, submitted_at=long_ago + n, ended_at=long_ago, id=f"{n:03}") for n in range(30)]
    running = submitted(state, part="snapshot-1", submitted_at=long_ago, id="0000")
    ask_to_stop(state, old[0].id, Asker.USER)
    last = submitted(state)

    submission.end(state, last.id)

    left = {name.rpartition("/")[2].removesuffix(".json") for name in state.names("submissions")}
    assert left == {last.id, running.id, *(job.id for job in old[30 - submission.KEPT + 1 :])}
    assert not askers(state, old[0].id)


def test_a_job_is_remembered_while_it_lives_and_for_a_while_after_its_end(state: State) -> None:
    long_ago = time.time() - 7200
    groups = [submitted(state, f"snapshot-{n}", submitted_at=long_ago, id=f"0{n:02}") for n in range(30)]
    live = submitted(state, submitted_at=long_ago, id="0000")
    write_heartbeat(state, beat(live))
    for n in range(30):
        submitted(state, submitted_at=long_ago, ended_at=long_ago, id=f"1{n:02}")

    submission.end(state, groups[0].id, result={"chunks": 1, "finished": 1})

    assert read(state, live.id) == live
    assert all(read(state, job.id) for job in groups)
    assert len(state.names("submissions")) == 31 + submission.KEPT


def test_what_others_have_left_does_not_keep_a_job_from_ending(state: State) -> None:
    job = submitted(state)
    state.write("submissions/0.json", {"of": "another version"})

    submission.end(state, job.id, exit_code=0)

    ended = read(state, job.id)
    assert ended is not None
    assert ended.exit_code == 0


def test_a_stop_reaches_jobs_that_airflow_would_begin_again(state: State) -> None:
    superseded = submitted(state, id="1", ended_at=1.0, error=LOST)
    died = submitted(state, id="2", ended_at=1.0, error=LOST)
    ended = submitted(state, id="3", part="snapshot-1", ended_at=1.0, result={})
    failed = submitted(state, id="4", part="snapshot-2", ended_at=1.0, error=FENCED)
    starting = submitted(state, id="5", part="snapshot-3")

    assert request_stop(state, "alice") == ["snapshot-3", "stream"]
    assert request_stop(state, "alice") == []
    jobs = (superseded, died, ended, failed, starting)
    assert [Asker.USER in askers(state, job.id) for job in jobs] == [False, True, False, False, True]


def test_a_stop_reaches_a_live_job_beside_which_another_has_ended(state: State) -> None:
    live = submitted(state, id="1")
    submitted(state, id="2", ended_at=1.0, error=FENCED)
    write_heartbeat(state, beat(live))
    write_heartbeat(state, replace(beat(None), part="snapshot"))

    assert request_stop(state, "alice") == ["snapshot", "stream"]

    submission.end(state, live.id, result={"caught_up": False})
    ended = read(state, live.id)
    assert ended is not None
    assert ended.status(askers(state, live.id)) is Status.DONE
    assert state.read("stop.json") == {"owners": [asdict(HERE)]}


def test_a_stop_is_waited_for(state: State) -> None:
    job = submitted(state)

    assert not stop(state, job.id, 0.1)
    assert askers(state, job.id) == {Asker.AIRFLOW}
    submission.end(state, job.id)
    assert stop(state, job.id, 0.1)
    assert stop(state, "unknown", 0.1)


# Sends the heartbeats of a job whose unit does not end.
_STUCK = """
import sys
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs import run
run._BEAT_SECONDS, run.KILL_SECONDS = 0.1, 0.3
pipeline = Pipeline.load(sys.argv[1])
run.Run(pipeline, run.State(pipeline.state), "stream", 7).keep_beating()
"""


@pytest.mark.lengthy
def test_a_job_that_is_not_wanted_does_not_wait_for_its_unit(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc@db/shop")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc@dw/dw")
    job, path = submitted(state), write_pipeline(tmp_path)
    stuck = subprocess.Popen([sys.executable, "-c", _STUCK, path], env={**os.environ, submission.VARIABLE: job.id})
    try:
        ask_to_stop(state, job.id, Asker.USER)
        assert await_condition(lambda: len(read_heartbeats(state)) == 1, SECONDS)
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(1.0)
        ask_to_stop(state, job.id, Asker.AIRFLOW)
        assert stuck.wait(SECONDS) == ExitCode.FAILED
    finally:
        stuck.kill()

    ended = read(state, job.id)
    assert ended is not None
    assert ended.error is not None
    assert ended.error["message"].startswith("stream was ended")
    assert ended.error["retry"] == "retry"


def test_a_job_that_cannot_read_its_pipeline_says_so(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(state)
    monkeypatch.setenv(submission.VARIABLE, job.id)
    monkeypatch.setenv(submission.STATE_VARIABLE, state.url)

    assert cli.main(["stream", "--pipeline", str(tmp_path / "none.yaml")]) == ExitCode.INVALID

    ended = read(state, job.id)
    assert ended is not None
    assert ended.error is not None
    assert (ended.error["kind"], ended.error["retry"]) == ("ConfigError", "fail")


@pytest.mark.parametrize("given_up", [False, True])
def test_a_driver_that_a_cluster_begins_too_late_does_nothing(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    job = submitted(state)
    monkeypatch.setenv(submission.VARIABLE, job.id)
    monkeypatch.setenv(submission.STATE_VARIABLE, state.url)
    if given_up:
        submission.give_up(state, job, "nothing was heard")
    else:
        ask_to_stop(state, job.id, Asker.AIRFLOW)

    assert cli.main(["stream", "--pipeline", str(tmp_path / "not-even-looked-for.yaml")]) == ExitCode.FAILED

    ended = read(state, job.id)
    assert ended is not None
    assert ended.error is not None
    assert (ended.error["kind"], ended.error["retry"]) == ("JobLost", "retry")


@pytest.mark.parametrize(
    ("keeper", "error", "kind"),
    [
        (DEAD, StreamFailed("Connection refused", "Start again."), "JobLost"),
        (DEAD, GateClosed("the slot is gone", "Resnapshot."), "GateClosed"),
        (HERE, StreamFailed("Connection refused", "Start again."), "StreamFailed"),
    ],
)
def test_what_breaks_when_the_keeper_is_killed_is_said_to_be_that(
    state: State, monkeypatch: pytest.MonkeyPatch, keeper: Owner, error: CdcError, kind: str
) -> None:
    job = submitted(state, keeper=keeper)
    monkeypatch.setenv(submission.VARIABLE, job.id)
    monkeypatch.setenv(submission.STATE_VARIABLE, state.url)

    assert submission.cause_of(error).kind == kind


@pytest.mark.parametrize("reachable", [True, False])
def test_a_job_is_asked_to_end_when_its_time_is_up(
    state: State, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    job = submitted(state, keeper=HERE)
    now = time.monotonic()
    monkeypatch.setattr(job_watch.time, "monotonic", lambda: now)
    watch = JobMonitor(state, job.id, time.time() - 1, print)
    if not reachable:
        monkeypatch.setattr(State, "read_as", failing(State.read_as, times=99))

    assert watch.look() is None
    if reachable:
        assert askers(state, job.id) == {Asker.AIRFLOW}
    now += submission.STOP_SECONDS + 1
    event = watch.look()
    assert event is not None
    assert (event["status"], event["id"]) == (TIMEOUT, job.id)


def test_a_job_that_ends_when_its_time_is_up_is_waited_for(state: State) -> None:
    job = submitted(state, keeper=HERE)
    watch = JobMonitor(state, job.id, time.time() - 1, print)
    assert watch.look() is None
    submission.end(state, job.id, result={"caught_up": False})

    event = watch.look()

    assert event is not None
    assert event["status"] == TIMEOUT
    done = submitted(state, ended_at=1.0, result={"caught_up": True})
    event = JobMonitor(state, done.id, time.time() - 1, print).look()
    assert event is not None
    assert event["status"] == Status.DONE


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ({"run": {"t": "deferred"}}, False),
        ({"run": {"t": "failed"}}, True),
        ({"run": {"t": None}}, True),
        ({}, True),
        (ConnectionError("no API server"), True),
    ],
)
def test_a_trigger_that_another_triggerer_has_taken_over_leaves_the_job_alone(
    state: State, monkeypatch: pytest.MonkeyPatch, answer: Any, asked: bool
) -> None:
    job = submitted(state, keeper=HERE)
    trigger = SparkJobTrigger(state.url, job.id)
    trigger.task_instance = SimpleNamespace(dag_id="d", run_id="run", task_id="t", map_index=-1)  # type: ignore[assignment]

    def states(dag_id: str, **of: Any) -> Any:
        assert (dag_id, of) == ("d", {"map_index": -1, "task_ids": ["t"], "run_ids": ["run"]})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", states)

    asyncio.run(asyncio.wait_for(trigger.on_kill(), 5))  # without waiting for the job's end

    assert askers(state, job.id) == ({Asker.AIRFLOW} if asked else set())


def test_whatever_a_file_system_raises_says_that_the_state_is_out_of_reach(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HttpError(Exception):
        """An error of an object store."""

    def fail(*_: Any, **__: Any) -> None:
        raise HttpError("503")

    remote = State("memory://state")
    for method in ("cat_file", "pipe_file", "ls", "rm", "exists"):
        monkeypatch.setattr(f"fsspec.implementations.memory.MemoryFileSystem.{method}", fail)
    for call in (lambda: remote.read("f"), lambda: remote.write("f", {}), lambda: remote.names("f")):
        with pytest.raises(StateUnwritable, match="503"):
            call()
    with pytest.raises(StateUnwritable, match="f cannot be removed: 503"):
        remote.remove("f")


def test_a_trigger_travels_as_json() -> None:
    path, arguments = SparkJobTrigger("file:///state", "1", 12.5).serialize()

    assert path == "airflow_cdc_provider.triggers.job.SparkJobTrigger"
    assert SparkJobTrigger(**json.loads(json.dumps(arguments))).serialize() == (path, arguments)
