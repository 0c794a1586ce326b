"""A real Airflow that runs the pipeline: scheduler, LocalExecutor, and tasks that can be killed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.hooks import keeper
from airflow_cdc_provider.hooks.process_group import _GUARD
from local_servers.airflow import AirflowStack
from local_servers.airflow_client import FINAL_STATES
from tests.support.airflow_support import ROOT, connection_json
from tests.support.patience import SECONDS
from tests.support.pipelines import Outcome

DAG = "torture"
_DAGS = Path(__file__).parent / "dags"
_PIPELINE = "TORTURED_PIPELINE"
_SETTINGS = {
    # Notice a task without a supervisor soon.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
    "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host="local[2]"),
    "PYTHONPATH": str(ROOT),
}


class Airflow:
    """Runs of the Dag in :file:`dags`, for one pipeline; the processes start when a run first needs them.

    :param file: the pipeline file; reports of tasks are next to it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stack = AirflowStack(file.parent / "airflow", _DAGS, {**_SETTINGS, _PIPELINE: str(file)})
        self._started = False

    def start(self) -> None:
        """Start Airflow, unless it is running."""
        if not self._started:
            self.stack.start()
            self._started = True

    def stop(self) -> None:
        """Stop Airflow, if it is running."""
        if self._started:
            self.stack.stop()

    def trigger(self) -> DagRun:
        """Start a run."""
        return DagRun(self, self.stack.client.trigger(DAG))


class DagRun:
    """A run of the pipeline's Dag, which can be awaited and killed like a command."""

    def __init__(self, airflow: Airflow, run_id: str) -> None:
        self.title = f"run {run_id} of the Dag"
        self._airflow, self._run_id = airflow, run_id
        self._file = Path(f"{airflow.file}.{run_id}")
        self._known = 0.0, "queued"

    @property
    def running(self) -> bool:
        """Return whether Airflow has not ended the run yet."""
        return self._state not in FINAL_STATES

    @property
    def _state(self) -> str:
        """Request the state once a second, because more frequent requests overload the server."""
        if self._known[1] not in FINAL_STATES and time.monotonic() - self._known[0] > 1:
            with contextlib.suppress(httpx.TransportError):
                self._known = time.monotonic(), self._airflow.stack.client.run_state(DAG, self._run_id)
        return self._known[1]

    def said(self) -> list[dict[str, Any]]:
        """Return the reports of tasks: their starts and errors."""
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def tries(self) -> int:
        """Return how often tasks have been started."""
        return sum("task" in line for line in self.said())

    def parts(self) -> Iterator[tuple[str, psutil.Process]]:
        """Return its living processes with their kinds: ``task``, ``supervisor``, and those of :func:`part_of`."""
        for line in self.said():
            with contextlib.suppress(psutil.Error, KeyError):
                task, supervisor = map(psutil.Process, line["pids"])
                if task.create_time() == line["born"] and task.status() != psutil.STATUS_ZOMBIE:  # not another process
                    yield "task", task
                    if task.ppid() == supervisor.pid:  # it continues with other tasks
                        yield "supervisor", supervisor
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                part = part_of(process.cmdline())
                if part and process.environ().get(_PIPELINE) == str(self._airflow.file):
                    yield part, process

    def processes(self) -> list[psutil.Process]:
        """Return its living processes without their kinds."""
        return [process for _, process in self.parts()]

    def kill(self) -> None:
        """Kill tasks, their supervisors and jobs; Airflow retries them if tries are left."""

        def dead() -> bool:
            family = self.processes()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not family

        assert await_condition(dead, SECONDS), f"{self.title} cannot be killed"

    def wait(self, seconds: float = SECONDS) -> Outcome:
        """Wait for its end; if it takes too long, the test fails."""
        if not await_condition(lambda: not self.running, seconds, interval=0.5):
            pytest.fail(f"{self.title} did not end within {seconds:g} seconds:\n{self.output()}")
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return an outcome like that of a command: 0 or 1, and a line of JSON per error that has failed a task."""
        errors = [json.dumps({"error": line["error"]}) for line in self.said() if "error" in line]
        return Outcome(int(self._state != "success"), "\n".join(errors), self.output())

    def output(self) -> str:
        """Return attempts, and the ends of the logs of failed ones."""
        client = self._airflow.stack.client
        states = [
            (task["task_id"], task["state"], task["try_number"]) for task in client.task_states(DAG, self._run_id)
        ]
        return f"{self._state}: {states}\n{client.failures(DAG, self._run_id)[-4000:]}"


def part_of(line: Sequence[str]) -> str:
    """Return the kind of a process of a pipeline: ``keeper``, ``guard``, ``driver``, ``jvm``, ``worker``, ``reader``.

    :param line: its command line.
    """
    if "pyspark.daemon" in line:
        return "worker"
    if keeper.__name__ in line:
        return "keeper"
    if not line:
        return ""
    if "java" in line[0]:
        return "jvm"
    if line[0] == "/bin/sh" and _GUARD in line:
        return "guard"
    if any(argument.endswith("engine/job.py") for argument in line[1:2]):
        return "driver"
    return "reader" if "pyspark.sql.streaming.python_streaming_source_runner" in line else ""
