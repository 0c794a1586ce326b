"""Measures runs of a small pipeline in a real Airflow: from the trigger to the first rows and to the end of the run.

A run that copies has a new pipeline with a few small tables. A run without work follows one that has copied. A run
whose stream has no end submits a Spark job, and is stopped once the job has applied a change that was waiting.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import yaml

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from benchmarks.lab import create_database, execute
from benchmarks.report import check, spread
from local_servers.airflow import AirflowStack
from local_servers.airflow_client import FINAL_STATES
from local_servers.postgres import PostgresServer

TRIGGER = "trigger"

TABLES, ROWS = 3, 200
SECONDS = 600.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Trigger:
    """Seconds of each repeat, from the trigger unless otherwise stated.

    :param rows: until the first row is in the target.
    :param success: until a run that copies has ended.
    :param nothing: until a run that finds nothing new has ended.
    :param live: from the start of the task of a stream without end until its job has applied the first change.
    :param tasks: for the last run of both kinds, the seconds at which each task began and ended.
    """

    rows: tuple[float, ...]
    success: tuple[float, ...]
    nothing: tuple[float, ...]
    live: tuple[float, ...]
    tasks: dict[str, dict[str, tuple[float, float]]]

    name: ClassVar[str] = TRIGGER
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        kinds = {kind: seconds for kind, seconds in asdict(self).items() if kind != "tasks"}
        return {
            kind: {"seconds": [round(each, 3) for each in seconds], **spread(seconds, 2)}
            for kind, seconds in kinds.items()
        } | {"tasks": self.tasks}

    def as_text(self) -> str:
        """Return a table with a row per kind."""
        found = self.as_json()
        kinds = [kind for kind in found if kind != "tasks"]
        body = [[kind, *(f"{found[kind][name]:.2f}" for name in ("median", "min", "max"))] for kind in kinds]
        tasks = [
            f"{kind}: " + ", ".join(f"{task} {began:.1f}-{ended:.1f}" for task, (began, ended) in times.items())
            for kind, times in self.tasks.items()
        ]
        return "\n".join([text_table(["seconds", "median", "min", "max"], body), *tasks])


def measure(repeat: int) -> Trigger:
    """Trigger runs, one after the other.

    :raises WrongResult: if a run fails, or source and target differ at the end.
    """
    with _scene() as scene:
        scene.copy("warmup")
        copied = [scene.copy(f"p{n}") for n in range(repeat)]
        nothing = [scene.run("cdc_warmup") for _ in range(repeat)]
        live = tuple(scene.stream("warmup", -number) for number in range(1, repeat + 1))
        return Trigger(
            tuple(rows for rows, _, _ in copied),
            tuple(success for _, success, _ in copied),
            tuple(success for success, _ in nothing),
            live,
            {"copy": copied[-1][2], "nothing": nothing[-1][1]},
        )


class _Scene:
    def __init__(self, directory: Path, source: PostgresServer, target: PostgresServer, metadata: str) -> None:
        self._directory = directory
        self._source, self._target = source, target
        self._dags = directory / "dags"
        self._dags.mkdir()
        settings = {
            "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2:{metadata}",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+psycopg:{metadata}",
        }
        self.airflow = AirflowStack(directory / "airflow", self._dags, settings)

    def copy(self, name: str) -> tuple[float, float, dict[str, tuple[float, float]]]:
        """Run a new pipeline; return the seconds until the first row and until the end, and those of its tasks."""
        for server in (self._source, self._target):
            create_database(server, name)
        with psycopg.connect(self._source.dsn(name), autocommit=True) as source:
            for number in range(TABLES):
                source.execute(f"CREATE TABLE t{number} (id bigint PRIMARY KEY, value text)")
                source.execute(f"INSERT INTO t{number} SELECT n, md5(n::text) FROM generate_series(1, {ROWS}) n")
        file = self._directory / f"{name}.yaml"
        document = {
            "pipeline": name,
            "source": {"dsn": self._source.dsn(name), "tables": ["public.*"]},
            "sink": {"dsn": self._target.dsn(name)},
            "state": f"file://{self._directory / 'state' / name}",
        }
        file.write_text(yaml.safe_dump(document))
        dag = f"from airflow_cdc_provider import cdc_dag\n\ndag = cdc_dag({str(file)!r})\n"
        (self._dags / f"{name}.py").write_text(dag)
        self.airflow.client.await_dag(f"cdc_{name}")
        counts = [f"(SELECT count(*) FROM public.t{number})" for number in range(TABLES)]
        with psycopg.connect(self._target.dsn(name), autocommit=True) as target:

            def rows() -> bool:
                try:
                    return target.execute("SELECT FROM public.t0 LIMIT 1").rowcount > 0
                except psycopg.errors.UndefinedTable:
                    return False

            began = time.time()
            run_id = self.airflow.client.trigger(f"cdc_{name}")
            while not rows() and time.time() - began < SECONDS:
                time.sleep(_POLL_SECONDS)
            first = time.time() - began
            success, tasks = self._ended(f"cdc_{name}", run_id, began)
            (found,) = target.execute(f"SELECT {' + '.join(counts)}").fetchone() or (0,)
            check(TABLES * ROWS, found, f"rows of {name}")
        return first, success, tasks

    def run(self, dag_id: str) -> tuple[float, dict[str, tuple[float, float]]]:
        """Trigger a run; return the seconds until its end, and those of its tasks."""
        began = time.time()
        return self._ended(dag_id, self.airflow.client.trigger(dag_id), began)

    def stream(self, name: str, row: int) -> float:
        """Run a stream without end until it has applied a new row; return the seconds since its task began."""
        dag_id, client = f"cdc_{name}", self.airflow.client
        pipeline = Pipeline.load(self._directory / f"{name}.yaml")
        execute(self._source.dsn(name), f"INSERT INTO t0 VALUES ({row}, 'x')")
        began = time.time()
        run_id = client.trigger(dag_id, {"until": "forever"})
        with psycopg.connect(self._target.dsn(name), autocommit=True) as target:
            query = "SELECT FROM public.t0 WHERE id = %s"
            applied = await_condition(
                lambda: target.execute(query, [row]).rowcount == 1, SECONDS, interval=_POLL_SECONDS
            )
        check(True, applied, "the first change applied")
        seconds = time.time() - began
        asked = await_condition(lambda: bool(commands.stop(pipeline)["asked"]), SECONDS)
        check(True, asked, "the stream asked to stop")
        _, tasks = self._ended(dag_id, run_id, began)
        return round(seconds - tasks["stream"][0], 2)

    def _ended(self, dag_id: str, run_id: str, began: float) -> tuple[float, dict[str, tuple[float, float]]]:
        client, deadline = self.airflow.client, time.monotonic() + SECONDS
        while client.run_state(dag_id, run_id) not in FINAL_STATES and time.monotonic() < deadline:
            time.sleep(0.2)
        run = client.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")
        check("success", run["state"], f"run of {dag_id}\n{client.failures(dag_id, run_id)}")
        found = {}
        for task in client.pages(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", "task_instances"):
            if task["start_date"] and task["end_date"]:
                index = "" if task["map_index"] < 0 else f"[{task['map_index']}]"
                found[task["task_id"] + index] = (_since(began, task["start_date"]), _since(began, task["end_date"]))
        return _since(began, run["end_date"]), found


def _since(began: float, text: str) -> float:
    return round(datetime.fromisoformat(text).timestamp() - began, 2)


@contextmanager
def _scene() -> Iterator[_Scene]:
    directory = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    directory.chmod(0o755)  # servers of root run as another user
    try:
        with ExitStack() as started:
            source, target, metadata = (
                started.enter_context(PostgresServer.create(directory / name, settings={"fsync": "off"}))
                for name in ("source", "target", "metadata")
            )
            create_database(metadata, "airflow")
            scene = _Scene(directory, source, target, metadata.dsn("airflow").removeprefix("postgresql:"))
            started.enter_context(scene.airflow)
            yield scene
    finally:
        shutil.rmtree(directory, ignore_errors=True)
