"""The report of ``status`` on a pipeline that does not continue automatically, and on one that is about to start."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    Fenced,
    GateClosed,
    StateUnwritable,
    StreamFailed,
    UnknownTable,
)
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.runs.run_errors import last_error, record_error
from airflow_cdc_provider.engine.state.announcement import announced, announcement_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from airflow_cdc_provider.engine.state.history import read_history
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS
from airflow_cdc_provider.engine.state.submission import VARIABLE, Asker, Submission, as_outcome, ask_to_stop, write
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
DEAD = Owner("elsewhere", 7, 7)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline that has not been provisioned."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"])
    under_test.source(TABLE, "INSERT INTO public.t SELECT n FROM generate_series(1, 20) n")
    return under_test


@pytest.fixture
def stopped(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    """Return a pipeline whose last run has succeeded."""
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    return pipeline


def status(pipeline: PipelineUnderTest) -> tuple[str, str | None]:
    """Return the state, and the kind of problem that needs attention."""
    found = commands.status(pipeline.pipeline)
    return found["state"], found["attention"] and found["attention"]["kind"]


def main(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str], command: str, *options: str) -> Any:
    """Return exit code and output of a command."""
    capsys.readouterr()
    code = cli.main([command, "--pipeline", str(pipeline.file), *options])
    return code, *capsys.readouterr()


def test_a_slot_that_is_gone(stopped: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a stream is started, status and preflight report it, with the command and the Dag that repair it."""
    assert status(stopped) == ("stopped", None)
    assert main(stopped, capsys, "status")[0] == 0
    slot = stopped.pipeline.source.slot
    stopped.source(f"SELECT pg_drop_replication_slot('{slot}')")
    code, out, _ = main(stopped, capsys, "status", "--json")
    found = json.loads(out)
    assert (code, found["state"], found["attention"]["kind"]) == (1, "needs attention", "GateClosed")
    assert found["last_error"] is None
    assert "`airflow-cdc resnapshot --all`" in found["attention"]["solution"]
    assert "the Dag cdc_resnapshot" in found["attention"]["solution"]
    code, out, _ = main(stopped, capsys, "status")
    assert (code, out.count("no longer exists")) == (1, 1)
    code, out, err = main(stopped, capsys, "preflight", "--no-spark")
    assert code == 3
    assert f"✗ replication slot {slot!r} no longer exists on the source" in out
    assert "cdc_resnapshot" in err
    commands.start_over(stopped.pipeline)
    assert status(stopped) == ("stopped", None)


def test_a_copy_that_is_complete_needs_no_slot(stopped: PipelineUnderTest) -> None:
    stopped.change(snapshot={"mode": "only"})
    stopped.source(f"SELECT pg_drop_replication_slot('{stopped.pipeline.source.slot}')")
    assert status(stopped) == ("stopped", None)
    assert all(finding["ok"] for finding in commands.preflight(stopped.pipeline)["findings"])


def test_errors_of_commands(stopped: PipelineUnderTest) -> None:
    """Each is shown until the command succeeds, or a new run has started; a command refused at once changes nothing."""
    state = State(stopped.pipeline.state)
    stopped.change(source={"tables": ["public.t", "public.u"]})
    for command in (commands.preflight, commands.provision):
        with pytest.raises(UnknownTable):
            command(stopped.pipeline)  # type: ignore[operator]
        error = last_error(state)
        assert error is not None
        assert (error["kind"], error["part"]) == ("UnknownTable", command.__name__)
        assert status(stopped) == ("needs attention", "UnknownTable")
    assert [error["part"] for error in read_history(state)["errors"]] == ["preflight", "provision"]
    stopped.change(source={"tables": ["public.t"]})
    commands.preflight(stopped.pipeline)  # it reports nothing about provisioning
    assert status(stopped) == ("needs attention", "UnknownTable")
    commands.provision(stopped.pipeline)
    assert status(stopped) == ("stopped", None)
    with pytest.raises(ConfigError):  # it is no problem of the pipeline
        commands.resnapshot(stopped.pipeline, tables=["public.u"])
    assert status(stopped) == ("stopped", None)


def test_an_error_before_there_is_a_state_leaves_none(pipeline: PipelineUnderTest) -> None:
    pipeline.change(source={"tables": ["public.u"]})
    with pytest.raises(UnknownTable):
        commands.provision(pipeline.pipeline)
    assert not pipeline.state.exists()


def test_an_error_of_two_parts_is_one(stopped: PipelineUnderTest) -> None:
    """The error that ends a part within a command is not reported again for the command."""
    stopped.source(f"SELECT pg_drop_replication_slot('{stopped.pipeline.source.slot}')")
    with pytest.raises(GateClosed):
        commands.resnapshot(stopped.pipeline, tables=["public.t"])
    assert len(read_history(State(stopped.pipeline.state))["errors"]) == 1


def test_a_run_that_another_has_overtaken_is_no_trouble(stopped: PipelineUnderTest) -> None:
    state = State(stopped.pipeline.state)
    with run_part(stopped.pipeline, "stream", None) as (run, _):
        overtaken = Run(stopped.pipeline, state, "stream", run.epoch - 1)
        overtaken.record_error(Fenced.by("the pipeline is at", run.epoch, run.epoch - 1))
    assert status(stopped) == ("stopped", None)


def beat(part: str, epoch: int, submission: str | None = None, ended: bool = False) -> Heartbeat:
    """Return a heartbeat of a job that is no longer alive."""
    return Heartbeat(DEAD, part, epoch, time.time() - 3600, ended, {}, submission)


def test_a_job_that_ended_without_a_word(stopped: PipelineUnderTest) -> None:
    """It was killed, or lost with its host; jobs that were asked to end do not count."""
    state, epoch = State(stopped.pipeline.state), stopped.record.epoch + 1
    write_heartbeat(state, beat("stream", epoch))
    assert status(stopped) == ("needs attention", "JobLost")
    assert "process 7 on elsewhere" in commands.status(stopped.pipeline)["attention"]["message"]
    write_heartbeat(state, beat("stream", epoch, "an-id"))
    ask_to_stop(state, "an-id", Asker.AIRFLOW)
    assert status(stopped) == ("stopped", None)


def test_a_submission_before_its_first_heartbeat(stopped: PipelineUnderTest) -> None:
    """Then the pipeline is neither stopped nor in trouble, whatever the last run left; but this has a time limit."""
    state = State(stopped.pipeline.state)
    record_error(state, "stream", StreamFailed("broke", "Start again."))
    submitted = Submission.new(stopped.name, "stream", [])
    write(state, submitted)
    assert status(stopped) == ("starting", None)
    write(state, dataclasses.replace(submitted, keeper=Owner.this()))
    assert status(stopped) == ("starting", None)
    write(state, dataclasses.replace(submitted, keeper=dataclasses.replace(Owner.this(), started=1)))
    assert status(stopped) == ("needs attention", "StreamFailed")  # the keeper is dead
    write(state, dataclasses.replace(submitted, submitted_at=time.time() - PATIENCE_SECONDS - 1))
    assert status(stopped) == ("needs attention", "StreamFailed")
    write(state, submitted)
    write_heartbeat(state, beat("stream", stopped.record.epoch + 1, submitted.id, ended=True))
    assert status(stopped)[0] == "needs attention"  # it has been reported


def test_a_submission_that_failed_before_its_first_heartbeat(stopped: PipelineUnderTest) -> None:
    state, failed = State(stopped.pipeline.state), CdcError("no such class", "Look at the log.")
    submitted = Submission.new(stopped.name, "stream", [])
    write(state, dataclasses.replace(submitted, ended_at=time.time(), error=as_outcome(failed)))
    assert status(stopped) == ("needs attention", "CdcError")
    stopped.apply()  # another job has worked since
    assert status(stopped) == ("stopped", None)


def test_one_decimal(stopped: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    stopped.source("CREATE TABLE elsewhere (id int)")
    _, out, _ = main(stopped, capsys, "status")
    (line,) = [line for line in out.splitlines() if line.startswith("applied")]
    assert line.rpartition(", ")[2].removesuffix(" s").partition(".")[2].isdigit()
    assert len(line.rpartition(", ")[2].removesuffix(" s").partition(".")[2]) == 1
    assert cli._plain({"lag_seconds": 1.23456, "caught_up": True}) == "lag_seconds 1.2, caught_up True"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "Allow this user to write"),
        (errno.EROFS, "not mounted read-only"),
        (errno.EIO, "a location that this user can write"),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
def test_a_full_disk_is_told_from_missing_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateUnwritable) as raised:
        State(f"file://{tmp_path}").write("error.json", {})
    assert os.strerror(number) in raised.value.message
    assert advice in raised.value.solution


def test_a_run_that_starts_spark(stopped: PipelineUnderTest) -> None:
    """It has no heartbeat yet, because it has no epoch, but can still be asked to stop."""
    state = State(stopped.pipeline.state)
    with announced(state, "stream"):
        assert status(stopped) == ("starting", None)
        assert commands.stop(stopped.pipeline) == {"asked": ["stream"]}
        with run_part(stopped.pipeline, "stream", None) as (run, _):
            assert run.stopping
            assert status(stopped) == ("streaming", None)
            assert commands.stop(stopped.pipeline) == {"asked": ["stream"]}
    assert status(stopped) == ("stopped", None)
    assert not state.names("starting")


def test_an_announcement_counts_as_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster, no other process can answer for the job."""
    state = State(f"file://{tmp_path}")
    submitted = dataclasses.replace(Submission.new("shop", "stream", []), cluster=True)
    write(state, submitted)
    monkeypatch.setenv(VARIABLE, submitted.id)
    with announced(state, "stream"):
        found = announcement_of(state, submitted.id)
        assert found is not None
        assert (found.owner, found.part, found.epoch) == (Owner.this(), "stream", 0)
    assert announcement_of(state, submitted.id) is None
