"""The Airflow of these tests: its settings, folders and processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.airflow import AirflowStack
from local_servers.postgres import PostgresServer
from tests.airflow.client import Client
from tests.support.airflow_support import HOME_VARIABLE, ROOT, connection_json

SECONDS = 600.0
"""Seconds to wait for Airflow and Spark, far more than they need on an idle machine."""

POLL = 1.0
"""Seconds between two requests to Airflow, each of which takes it up to a twentieth of a second of a core."""

HISTORY_SERVER = "http://127.0.0.1:1"
"""Address of Spark, at which no server answers: only the targets of links matter."""

SETTINGS: Mapping[str, str] = {
    "PYTHONPATH": str(ROOT),
    "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host="local[2]"),
    "AIRFLOW__METRICS__STATSD_ON": "False",
    # Notice missing supervisors of tasks, triggerers and schedulers soon, but not while a busy machine delays them.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "45",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "40",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "40",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "5",
}
"""Settings of an Airflow that notices failures soon, for these tests and for the torture tests.

Each loop of the scheduler takes a twentieth of a second of a core, so its pauses stay as long as they are by default.
"""


class AirflowUnderTest:
    """``airflow standalone`` with the Dags of the repository, and the operations of tests on it.

    Its metadata are in Postgres: in SQLite each writer blocks all others, and these tests kill tasks and backfill.

    :param directory: its own directory, which Postgres can enter.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dags = directory / "dags"
        """Folder of Dags: ``repository`` is a link to those of the repository, and tests add their own files."""
        self.pipelines = directory / "pipelines"
        """Folder in which the page looks for pipeline files."""
        self.scheduled = directory / "scheduled.yaml"
        """Pipeline file of scheduled runs, which a test may write."""
        for folder in (self.dags, self.pipelines):
            folder.mkdir(parents=True)
        (self.dags / "repository").symlink_to(ROOT / "dags", target_is_directory=True)
        self._metadata = PostgresServer.create(directory / "metadata", settings={"fsync": "off"})
        self.stack = AirflowStack(directory / "airflow", self.dags, self._environment(), path="/air")
        self.client = Client(self.stack.base_url)

    def start(self) -> None:
        """Start Airflow and wait until it is healthy."""
        self._metadata.start()
        with psycopg.connect(self._metadata.dsn(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE airflow")
        self.stack.start()

    def stop(self) -> None:
        """Stop all of it, including detached Spark jobs."""
        self.stack.stop()
        self._metadata.remove()

    def add_dag(self, name: str, source: str) -> None:
        """Add or replace a file of Dags; use ``client.await_dag`` to wait for its Dags."""
        (self.dags / f"{name}.py").write_text(source, encoding="utf-8")

    def succeed(self, dag_id: str, run_id: str, seconds: float = SECONDS) -> None:
        """Wait until a run has ended, and fail with the logs of its tasks if it failed."""
        state = self.client.wait(dag_id, run_id, seconds)
        assert state == "success", f"{self.client.states(dag_id, run_id)}\n{self.client.failures(dag_id, run_id)}"

    def await_state(
        self, dag_id: str, run_id: str, task_id: str, *states: str | None, map_index: int = -1, seconds: float = SECONDS
    ) -> None:
        """Wait until a task instance is in one of some states."""

        def reached() -> bool:
            return self.client.state(dag_id, run_id, task_id, map_index) in states

        assert await_condition(reached, seconds, POLL), self.client.states(dag_id, run_id)

    def await_end_of_process(self, dag_id: str, run_id: str, task_id: str) -> None:
        """Wait until the scheduler knows that the process of a task has ended, after the task was deferred.

        If a task continues before that, within the second, Airflow 3.3.2 considers it killed.
        """
        event = f"TaskInstanceKey(dag_id='{dag_id}', task_id='{task_id}', run_id='{run_id}'"

        def known() -> bool:
            lines = self.stack.log_file.read_text(errors="replace").splitlines()
            return any("Received executor event" in line and event in line for line in lines)

        assert await_condition(known, SECONDS, POLL), self.client.states(dag_id, run_id)

    def answer(self, dag_id: str, run_id: str, choice: str) -> dict[str, Any]:
        """Answer the question of the task ``approve`` of a run, once it asks, and return the question."""
        self.await_state(dag_id, run_id, "approve", "awaiting_input")
        self.await_end_of_process(dag_id, run_id, "approve")
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/approve/-1/hitlDetails"
        question: dict[str, Any] = self.client.call("GET", path)
        self.client.call("PATCH", path, json={"chosen_options": [choice]})
        return question

    def task_processes(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> tuple[psutil.Process, psutil.Process]:
        """Return the process of a running task and that of its supervisor, a worker of the executor."""
        task = psutil.Process(self.client.task(dag_id, run_id, task_id, map_index)["pid"])
        return task, psutil.Process(task.ppid())

    def restart(self, component: str) -> None:
        """Start a component that was killed, and wait until Airflow is complete again."""
        self.stack.restart(component)
        assert await_condition(lambda: self.client.healthy, SECONDS, POLL), self.stack.log_tail()

    def kill(self, component: str) -> None:
        """Kill a component with its child processes, like a crash of its machine; :meth:`restart` starts it."""
        main = self.stack.component(component)
        assert main is not None, f"{component} is dead already"
        family = [main, *main.children(recursive=True)]
        for process in family:
            process.kill()
        assert await_condition(lambda: not any(process in family for process in self.stack.processes()), SECONDS)

    def _environment(self) -> dict[str, str]:
        address = self._metadata.dsn("airflow").removeprefix("postgresql:")
        return {
            **SETTINGS,
            # Dags may import the tests' modules, which otherwise create their own home.
            HOME_VARIABLE: str(self.directory / "airflow"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2:{address}",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+psycopg:{address}",
            # Airflow's own sessions with its metadata do not tolerate the tests' environment for libpq.
            "PGCLIENTENCODING": "UTF8",
            "PGDATESTYLE": "ISO, MDY",
            "PGOPTIONS": "",
            "AIRFLOW__CORE__PARALLELISM": "8",
            "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
            "AIRFLOW__AIRFLOW_CDC__PIPELINES": str(self.pipelines),
            "AIRFLOW__AIRFLOW_CDC__SPARK_HISTORY_SERVER": HISTORY_SERVER,
            "AIRFLOW_CDC_PIPELINE": str(self.scheduled),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
            # Only files that change are parsed again.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
        }
