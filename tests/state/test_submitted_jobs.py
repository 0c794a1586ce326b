"""Jobs of tasks: started once, found again, asked to stop, and lost, according to the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow_support import connection_json, write_pipeline

# isort: split
from airflow.sdk.exceptions import AirflowException, TaskDeferred

from airflow_cdc_provider.engine.runs.run_errors import request_stop
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.submission import (
    Asker,
    Status,
    Submission,
    askers,
    read,
)
from airflow_cdc_provider.operators import spark
from airflow_cdc_provider.operators.job_handle import FirstAction, first_action
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.triggers.job import JobMonitor
from tests.state.owners import LOST
from tests.support.submissions import HERE, state
from tests.support.task_instances import task_instance

__all__ = ["state"]


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CdcStreamOperator]:
    """Return a factory of operators whose jobs have no keeper."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc@db/shop")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgresql://cdc@dw/dw")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    monkeypatch.setattr("airflow_cdc_provider.hooks.spark_job.start_keeper", lambda *_: None)
    path = write_pipeline(tmp_path)
    return lambda **arguments: CdcStreamOperator(task_id="t", pipeline=str(path), **arguments)


@pytest.fixture
def context() -> Any:
    stored: dict[str, Any] = {}
    store = SimpleNamespace(get=stored.get, set=lambda key, value, retention: stored.update({key: value}))
    return {"task_state_store": store, "ti": task_instance(1, 1)}


def begin(operator: CdcStreamOperator, context: Any, state: State) -> Submission:
    """Run a try until it is deferred, and return the latest job."""
    with pytest.raises(TaskDeferred):
        operator.execute(context)
    latest = read(state, Path(state.names("submissions")[-1]).stem)
    assert latest is not None
    return latest


def test_a_job_that_died_is_not_begun_again_once_it_was_asked_to_stop(
    state: State, stream: Callable[..., CdcStreamOperator], context: Any
) -> None:
    operator = stream(until="stopped")
    job = begin(operator, context, state)
    submission.end(state, job.id, error=LOST)
    request_stop(state, "alice")

    assert operator.execute(context)["caught_up"] is False
    assert len(state.names("submissions")) == 1


def test_only_the_first_job_of_a_task_has_the_epoch_of_the_run(
    state: State, stream: Callable[..., CdcStreamOperator], context: Any
) -> None:
    first = begin(stream(epoch=5), context, state)
    submission.give_up(state, first, "it may be alive after all")

    second = begin(stream(epoch=5, until="stopped"), context, state)

    assert "--epoch" in first.command
    assert "--epoch" not in second.command


def test_a_job_begins_after_the_last_process_of_the_one_before(
    state: State, stream: Callable[..., CdcStreamOperator], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(stream(), context, state)
    submission.write(state, replace(job, keeper=HERE, ended_at=1.0, error=LOST))
    stopped: list[str] = []
    monkeypatch.setattr(submission, "stop", lambda _, id_: stopped.append(id_) or True)

    begin(stream(), context, state)

    assert stopped == [job.id]


def test_a_kill_while_the_job_is_found_again_reaches_it(
    state: State, stream: Callable[..., CdcStreamOperator], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(stream(), context, state)
    again = stream()

    def killed(*arguments: Any) -> FirstAction:
        again.on_kill()
        return first_action(*arguments)

    monkeypatch.setattr(spark, "first_action", killed)
    event = {"status": Status.STOPPED, "id": job.id, "log": None, "keeper": None, "application": None}
    monkeypatch.setattr(JobMonitor, "look", lambda _: event)

    with pytest.raises(AirflowException, match="ended before its work was done"):
        again.execute(context)

    assert askers(state, job.id) == {Asker.AIRFLOW}


@pytest.mark.lengthy
def test_a_job_that_could_not_be_begun_says_why(
    state: State, stream: Callable[..., CdcStreamOperator], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no memory is left")

    monkeypatch.setattr("airflow_cdc_provider.hooks.spark_job.start_keeper", fail)

    with pytest.raises(OSError, match="no memory"):
        stream().execute(context)

    (name,) = state.names("submissions")
    ended = read(state, Path(name).stem)
    assert ended is not None
    assert ended.error is not None
    assert ended.error["message"] == "the Spark job could not be started: no memory is left"
