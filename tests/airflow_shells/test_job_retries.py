"""Failures of a task's Spark jobs count since the last commit, regardless of Airflow's remaining tries.

The jobs are entries in the state, as their processes would leave them; ``test_spark_jobs.py`` tests the processes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import airflow_support  # noqa: F401

# isort: split
from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk.exceptions import AirflowException, TaskDeferred

from airflow_cdc_provider.engine.core.errors import GateClosed, StreamFailed
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from airflow_cdc_provider.engine.state.submission import Submission, as_outcome, end, write
from airflow_cdc_provider.hooks.spark_job import SparkJobHook
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.retry import CdcTaskFailed, CdcTaskRefused
from tests.support.task_instances import task_instance

pytestmark = pytest.mark.airflow

RETRIES = 2


class Airflow:
    """A task instance with its tries, and jobs that fail by a script.

    :param script: for each job whether it commits before it fails: ``c`` or ``-``; ``!`` means a closed gate.
    """

    def __init__(self, pipeline: Path, state: State, script: str, retries: int = RETRIES, **arguments: Any) -> None:
        self.operator = CdcStreamOperator(task_id="t", pipeline=str(pipeline), retries=retries, **arguments)
        self.state = state
        self.script = list(script)
        self.begun = 0
        self.values: dict[str, Any] = {}
        self.max_tries = retries
        self.try_number = 1
        self.deadlines: list[float | None] = []
        self.cluster = False

    def start(self, hook: SparkJobHook, job: Submission) -> None:
        """Simulate a job from its start to its end."""
        self.begun += 1
        kind = self.script.pop(0)
        write(self.state, replace(job, cluster=self.cluster))
        progress = {"applied_lsn": "0/10", "progressed": kind == "c"}
        write_heartbeat(self.state, Heartbeat(Owner.this(), "stream", self.begun, time.time(), True, progress, job.id))
        error = GateClosed("the slot is gone", "Look.") if kind == "!" else StreamFailed("the host is gone", "Wait.")
        end(self.state, job.id, error=as_outcome(error))

    @property
    def context(self) -> Any:
        store = SimpleNamespace(get=self.values.get, set=lambda key, value, retention: self.values.update({key: value}))
        return {
            "task_state_store": store,
            "ti": task_instance(self.max_tries, self.try_number),
        }

    def run(self) -> AirflowException:
        """Run the task to the end of its last try, and return the error with which it failed."""
        while True:
            try:
                self._run_try()
            except CdcTaskFailed as e:
                if self.try_number > self.max_tries:
                    return e
                self.try_number += 1
            except CdcTaskRefused as e:
                return e

    def _run_try(self) -> None:
        step, arguments = "execute", {}
        while True:
            try:
                getattr(self.operator, step)(self.context, **arguments)
            except TaskDeferred as deferred:
                step, arguments = deferred.method_name, dict(deferred.kwargs or {})
                if not isinstance(deferred.trigger, DateTimeTrigger):
                    self.deadlines.append(deferred.trigger.deadline)  # type: ignore[attr-defined]
                    arguments["event"] = asyncio.run(_first(deferred.trigger))
            else:
                raise AssertionError("the jobs end by their script")


async def _first(trigger: Any) -> Any:
    async for event in trigger.run():
        return event.payload
    return None


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the task of a pipeline whose servers are never contacted."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"{{pipeline: p, source: {{dsn: 'postgresql://u@h/s', tables: [public.t]}},"
        f" sink: {{dsn: 'postgresql://u@h/t'}}, state: 'file://{tmp_path}/state'}}"
    )

    def make(script: str, **arguments: Any) -> Airflow:
        airflow = Airflow(file, State(f"file://{tmp_path}/state"), script, **arguments)
        monkeypatch.setattr(SparkJobHook, "start", lambda hook, job: airflow.start(hook, job))
        return airflow

    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", "spark://local")
    return make


@pytest.mark.parametrize(
    ("script", "begun"),
    [
        ("---", 3),  # as Airflow counts
        ("c--", 3),
        ("--c--", 5),
        ("cccccccccc--", 12),
        ("ccc-c-c-c--", 11),
    ],
)
def test_failures_count_since_the_last_commit(task: Any, script: str, begun: int) -> None:
    airflow = task(script + "---")
    failed = airflow.run()
    assert "the host is gone" in str(failed)
    assert airflow.begun == begun


def test_tries_of_airflow_are_used_first(task: Any) -> None:
    """These are the tries that its users see."""
    airflow = task("cc" + "c" * 5 + "--")
    airflow.run()
    assert airflow.try_number == RETRIES + 1


def test_what_needs_a_person_is_not_begun_again(task: Any) -> None:
    airflow = task("cccc!ccc")
    assert isinstance(airflow.run(), CdcTaskRefused)
    assert airflow.begun == 5


def test_a_task_without_retries_has_none(task: Any) -> None:
    airflow = task("cc", retries=0)
    airflow.run()
    assert airflow.begun == 1


def test_the_time_of_a_try_is_not_made_longer(task: Any) -> None:
    airflow = task("cccccc--", execution_timeout=timedelta(hours=1))
    airflow.run()
    assert len(airflow.deadlines) == 8
    assert len(set(airflow.deadlines)) == RETRIES + 1  # one for each try of Airflow


@pytest.mark.parametrize("variable", ["AIRFLOW_IS_K8S_EXECUTOR_POD", "AIRFLOW_IS_EXECUTOR_CONTAINER"])
def test_a_task_whose_container_would_end_the_job_does_not_defer(
    task: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "True")
    airflow = task("--", retries=0)
    airflow.run()
    assert (airflow.begun, airflow.deadlines) == (1, [])

    airflow.cluster, airflow.values = True, {}
    airflow.run()
    assert (airflow.begun, airflow.deadlines) == (2, [None])
