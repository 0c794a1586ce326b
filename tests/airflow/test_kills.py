"""Spark jobs when parts of a real Airflow are killed, and when users mark or clear their tasks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeat
from airflow_cdc_provider.engine.state.submission import Submission, read
from tests.airflow.client import Client
from tests.airflow.server import POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import UNHURRIED, PipelineUnderTest
from tests.support.threads import Stoppable

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]

DAGS = """
from datetime import timedelta
from pathlib import Path
from airflow.sdk import DAG
from airflow_cdc_provider.engine.state import job_watch
from airflow_cdc_provider.operators.pipeline import CdcProvisionOperator
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator

PIPELINE = "{{ params.pipeline }}"
EPOCH = "{{ ti.xcom_pull(task_ids='provision')['epoch'] }}"

# Tasks that wait in a worker look from where this file has been imported; while a driver hangs they do not bear its
# silence for five minutes.
stated = job_watch.patience
job_watch.patience = lambda submission, beat: 15.0 if beat and Path("HANGS").exists() else stated(submission, beat)

for deferrable in (True, False):
    with DAG(
        "kills_deferred" if deferrable else "kills_waiting",
        schedule=None,
        params={"pipeline": "", "groups": 1},
        default_args={"retries": 5, "retry_delay": timedelta(seconds=2)},
    ):
        provision = CdcProvisionOperator(task_id="provision", pipeline=PIPELINE)
        plan = CdcPlanOperator(task_id="plan", pipeline=PIPELINE, groups="{{ params.groups }}")
        snapshot = CdcSnapshotOperator.partial(
            task_id="snapshot",
            pipeline=PIPELINE,
            epoch=EPOCH,
            deferrable=deferrable,
            pool="source",
            map_index_template="{{ task.group['label'] }}",
        ).expand(group=plan.output)
        stream = CdcStreamOperator(
            task_id="stream", pipeline=PIPELINE, epoch=EPOCH, until="stopped", deferrable=deferrable
        )
        provision >> plan >> snapshot >> stream
"""


class Jobs(Stoppable):
    """The Spark jobs of a run: the current one, and the largest number of jobs at a time."""

    def __init__(self, airflow: AirflowUnderTest, pipeline: PipelineUnderTest, dag: str, groups: int) -> None:
        super().__init__("census")
        self.most = 0
        self._pipeline = pipeline
        self._state = State(pipeline.pipeline.state)
        self._airflow = airflow
        self._dag = dag
        self._run = airflow.client.trigger(dag, {"pipeline": str(pipeline.file), "groups": groups})

    def work(self) -> None:
        while not self._halt.wait(0.5):
            self.most = max(self.most, len(self.drivers()))

    def drivers(self) -> list[psutil.Process]:
        return [
            process
            for process in self._airflow.stack.processes()
            if any(argument.endswith("engine/job.py") for argument in self._line(process)[1:2])
            and str(self._pipeline.file) in self._line(process)
        ]

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of all jobs: the session of each keeper."""
        keepers = {job.keeper.pid for job in self.submissions() if job.keeper is not None}
        found = []
        for process in self._airflow.stack.processes():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) in keepers:
                    found.append(process)
        return found

    def submissions(self) -> list[Submission]:
        found = (read(self._state, Path(name).stem) for name in self._state.names("submissions"))
        return [job for job in found if job is not None]

    def await_work(self, number: int) -> Submission:
        """Wait until the job with this number, from 1, is running, and its task waits for it."""
        seen: list[Submission] = []

        def works() -> bool:
            seen[:] = self.submissions()
            if len(seen) < number:
                return False
            beat = read_heartbeat(self._state, seen[-1].part)
            at_work = beat is not None and bool({"changes", "chunks"} & beat.progress.keys())
            return at_work and beat is not None and beat.submission == seen[-1].id

        assert await_condition(works, SECONDS, 0.3), self.explain()
        assert len(seen) == number, self.explain()
        return seen[-1]

    def await_state(self, *states: str) -> None:
        assert await_condition(lambda: self.task["state"] in states, SECONDS, POLL), self.explain()

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Return the Dag, the run, the task and the map index of the current job."""
        if self.submissions()[-1].part == "stream":
            return self._dag, self._run, "stream", -1
        instances = self._airflow.client.task_states(self._dag, self._run)
        alive = [t["map_index"] for t in instances if t["state"] in ("running", "deferred") and t["map_index"] >= 0]
        return self._dag, self._run, "snapshot", alive[0] if alive else 0

    @property
    def task(self) -> dict[str, Any]:
        return self._airflow.client.task(*self.place)

    def tried_again(self, attempt: int) -> bool:
        """Return whether the task waits for its job again, after an attempt."""
        task = self.task
        return task["try_number"] > attempt and task["state"] == "running" and task["pid"] is not None

    def kill_driver(self) -> None:
        (driver,) = self.drivers()
        driver.kill()

    def stop_driver(self) -> list[psutil.Process]:
        """Halt the driver and its JVM, and return them."""
        (driver,) = self.drivers()
        hung = [driver, driver.parent()]
        for process in hung:
            process.suspend()
        return hung

    def restart_triggerer(self) -> None:
        """Kill the triggerer, and wait until another one has taken over its triggers."""
        self._airflow.kill("triggerer")
        self._airflow.restart("triggerer")

    def explain(self) -> str:
        client = self._airflow.client
        return f"{client.states(self._dag, self._run)}\n{self.submissions()}\n{client.failures(self._dag, self._run)}"

    def succeed(self) -> None:
        self._airflow.succeed(self._dag, self._run)
        assert await_condition(lambda: not self.processes(), SECONDS, POLL), self.processes()

    @staticmethod
    def _line(process: psutil.Process) -> list[str]:
        with contextlib.suppress(psutil.Error):
            return list(process.cmdline())
        return []


@pytest.fixture(scope="module", autouse=True)
def dags(airflow: AirflowUnderTest, client: Client) -> None:
    client.call("POST", "/pools", json={"name": "source", "slots": 1, "include_deferred": True})
    airflow.add_dag("kills", DAGS.replace("HANGS", str(airflow.directory / "hangs")))


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline whose copy takes long enough to be interrupted."""
    under_test = PipelineUnderTest(
        tmp_path,
        databases,
        ["public.t"],
        snapshot={"chunk_rows": 25, "parallelism": 1},
        stream={**UNHURRIED, "restart": {"strategy": "fixed-delay", "attempts": 1000, "delay": "1 second"}},
    )
    under_test.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 1500) n",
    )
    return under_test


@pytest.fixture
def jobs(airflow: AirflowUnderTest, pipeline: PipelineUnderTest, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    client = airflow.client
    client.await_dag(request.param[0])
    jobs = Jobs(airflow, pipeline, *request.param)
    jobs.start()
    yield jobs
    jobs.stop()
    for process in jobs.processes():
        process.kill()


@contextmanager
def held(pipeline: PipelineUnderTest) -> Iterator[None]:
    """Keep a snapshot from making progress during the block; its job retries."""
    with transaction(pipeline.databases.source, "LOCK TABLE public.t"):
        yield


def change(pipeline: PipelineUnderTest, word: str) -> int:
    """Change rows, and return the end of the log afterwards."""
    pipeline.source(f"UPDATE public.t SET body = '{word}' WHERE id % 7 = 0")
    return pipeline.marker()


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [("kills_deferred", 2)], indirect=True, ids=str)
def test_jobs_of_deferred_tasks(
    pipeline: PipelineUnderTest, jobs: Jobs, airflow: AirflowUnderTest, client: Client
) -> None:
    snapshot = jobs.await_work(1)
    jobs.await_state("deferred")
    epoch = pipeline.record.epoch
    with held(pipeline):
        jobs.restart_triggerer()
        assert jobs.submissions() == [snapshot]
        assert jobs.task["rendered_map_index"] in ("public.t .. 751, 30 chunks", "public.t 751 .., 30 chunks")
        before = pipeline.finished_chunks()
        jobs.kill_driver()
        jobs.await_work(2)  # either group

    stream = jobs.await_work(4)
    jobs.await_state("deferred")
    assert stream.part == "stream"
    after = pipeline.finished_chunks()
    assert len(after) == 60
    assert before.items() <= after.items()
    assert pipeline.record.epoch == epoch
    jobs.restart_triggerer()
    assert jobs.submissions()[-1].id == stream.id
    jobs.kill_driver()
    jobs.await_work(5)
    assert pipeline.record.epoch > epoch
    marker = change(pipeline, "killed")
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS, POLL)

    jobs.await_state("deferred")
    started = time.monotonic()
    client.mark(*jobs.place[:3], "failed")
    assert await_condition(lambda: not jobs.processes(), SECONDS), jobs.processes()
    assert time.monotonic() - started < 10
    marker = change(pipeline, "marked")

    client.clear(*jobs.place[:2], [jobs.place[2]])
    jobs.await_work(6)
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS, POLL)

    # Without a scheduler the job continues and ends; the next scheduler uses its result.
    jobs.await_state("deferred")
    airflow.kill("scheduler")
    marker = change(pipeline, "alone")
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS, POLL)
    pipeline.run("stop")
    assert await_condition(lambda: not jobs.processes(), SECONDS), jobs.processes()
    airflow.restart("scheduler")
    jobs.succeed()
    assert client.xcom(*jobs.place[:3])["caught_up"] is False
    assert jobs.most == 1  # also because the pool of the source has one slot, which deferred tasks keep
    assert len(jobs.submissions()) == 6
    pipeline.assert_equal()


@pytest.mark.thorough
@pytest.mark.parametrize("jobs", [("kills_waiting", 1)], indirect=True, ids=str)
def test_jobs_of_tasks_that_wait_in_a_worker(
    pipeline: PipelineUnderTest, jobs: Jobs, airflow: AirflowUnderTest
) -> None:
    for number, part in enumerate(("snapshot", "stream"), start=1):
        job = jobs.await_work(number)
        assert job.part.startswith(part)
        (driver,) = jobs.drivers()
        task, supervisor = airflow.task_processes(*jobs.place)
        attempt = jobs.task["try_number"]
        with held(pipeline) if part == "snapshot" else nullcontext():
            (task if part == "snapshot" else supervisor).kill()
            assert await_condition(lambda attempt=attempt: jobs.tried_again(attempt), SECONDS, POLL), jobs.explain()
            assert jobs.drivers() == [driver]

    # A job that hangs is considered lost, and killed before another takes over.
    epoch = pipeline.record.epoch
    (airflow.directory / "hangs").touch()
    hung = jobs.stop_driver()
    jobs.await_work(3)
    (airflow.directory / "hangs").unlink()
    assert not any(process.is_running() for process in hung)
    assert pipeline.record.epoch > epoch
    lost = jobs.submissions()[1].error
    assert lost is not None
    assert (lost["kind"], lost["retry"]) == ("JobLost", "retry")
    assert "there has been no further heartbeat for" in lost["message"]
    marker = change(pipeline, "killed")
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS, POLL)
    pipeline.run("stop")
    jobs.succeed()
    assert jobs.most == 1
    assert len(jobs.submissions()) == 3
    pipeline.assert_equal()
