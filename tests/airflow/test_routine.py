"""The daily life of a pipeline: sensors, scheduled runs and their effects, comparisons, a time limit, the end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.submission import read_all
from local_servers.airflow_client import AirflowFailed
from tests.airflow.client import Client
from tests.airflow.server import POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.pipelines import UNHURRIED, PipelineUnderTest
from tests.support.threads import Stoppable

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]

INCREMENTAL, VERIFY, DROP = "cdc_incremental", "cdc_verify", "cdc_drop"
LIMIT = 90
"""Seconds that the task with a limit may take; before that, its job has to start, and two comparisons have to end."""

DAGS = """
from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_cdc_provider import table_asset
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.sensors.pipeline import CdcLagSensor, SnapshotFinishedSensor

with DAG("routine_waits", default_args={"pipeline": "PIPELINE", "poke_interval": 1}):
    SnapshotFinishedSensor(task_id="copied")
    SnapshotFinishedSensor(task_id="consistent", consistent=True)
    CdcLagSensor(task_id="close", below_bytes="8MiB")

with DAG("routine_reports", schedule=[table_asset("NAME", "public.t")]):

    @task
    def report(triggering_asset_events=None):
        return [event.extra for events in triggering_asset_events.values() for event in events]

    report()

with DAG("routine_limited"):
    CdcStreamOperator(
        task_id="stream", pipeline="PIPELINE", until="stopped", execution_timeout=timedelta(seconds=LIMIT)
    )
"""


class Writer(Stoppable):
    """Sets the same number in all rows up to 100, each time in one transaction."""

    def __init__(self, dsn: str) -> None:
        super().__init__("writer")
        self._dsn = dsn

    def work(self) -> None:
        number = 0
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._halt.wait(0.3):
                number += 1
                connection.execute("UPDATE public.t SET body = %s WHERE id <= 100", [str(number)])


@pytest.fixture
def pipeline(airflow: AirflowUnderTest, client: Client, databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline that has copied nothing, and Dags for it, which scheduled runs also use."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], stream=UNHURRIED)
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 200) n",
    )
    pipeline.provision()
    shutil.copy(pipeline.file, airflow.scheduled)
    source = DAGS.replace("PIPELINE", str(pipeline.file)).replace("NAME", pipeline.name)
    airflow.add_dag("routine", source.replace("LIMIT", str(LIMIT)))
    for dag_id in ("routine_waits", "routine_reports", "routine_limited", INCREMENTAL, VERIFY, DROP):
        client.await_dag(dag_id)
    # From last night, before the pipeline existed; there is never more than one.
    for run in client.runs(VERIFY):
        client.mark_run(VERIFY, run, "failed")
    return pipeline


class Runs:
    """The bounded runs of a pipeline, triggered ones and those that the schedule starts meanwhile."""

    def __init__(self, airflow: AirflowUnderTest, pipeline: PipelineUnderTest) -> None:
        self._airflow, self._client, self._pipeline = airflow, airflow.client, pipeline

    def first(self) -> str:
        """Start the schedule, and return its run, once it has succeeded."""
        self._client.pause(INCREMENTAL, False)
        assert await_condition(lambda: bool(self._states()), SECONDS, POLL)
        (run,) = self._states()
        assert run.startswith("scheduled__")
        self._airflow.succeed(INCREMENTAL, run)
        return run

    def finish(self) -> dict[str, dict[str, Any]]:
        """Wait until all have succeeded; return the results of their streams, and check that their assets agree."""
        self._end()
        results = {}
        events = self._events()
        for run in self._states():
            self._airflow.succeed(INCREMENTAL, run)
            assert self._client.states(INCREMENTAL, run)["snapshot"] == "skipped"
            result: dict[str, Any] = self._client.xcom(INCREMENTAL, run, "stream")
            assert result["caught_up"] is True
            extra = {"pipeline": self._pipeline.name, "applied_lsn": result["applied_lsn"]}
            told = [extra | {"changes": changes} for changes in result["tables"].values()]
            assert events.get(run, []) == told
            assert await_condition(lambda told=told: all(each in self._reported() for each in told), SECONDS, POLL)
            results[run] = result
        return results

    def _end(self) -> None:
        """Pause the schedule while no run is active, because a run that it has just started would be stuck."""
        while True:
            assert await_condition(self._over, SECONDS, POLL), self._states()
            self._client.pause(INCREMENTAL)
            if self._over():
                return
            self._client.pause(INCREMENTAL, False)

    def _states(self) -> dict[str, str]:
        return self._client.runs(INCREMENTAL)

    def _over(self) -> bool:
        states = self._states()
        return bool(states) and set(states.values()) <= {"success", "failed"}

    def _events(self) -> dict[str, list[dict[str, Any]]]:
        """Return the contents of the table's events, by the runs that left them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for event in self._asset_events():
            if event["name"] == f"{self._pipeline.name}/public.t":
                found.setdefault(event["source_run_id"], []).append(event["extra"])
        return found

    def _asset_events(self) -> list[dict[str, Any]]:
        """Return all events; Airflow 3.3 answers with an error while a run is queued that one of them has created."""
        found: list[dict[str, Any]] = []

        def answered() -> bool:
            try:
                found[:] = self._client.pages("/assets/events", "asset_events")
            except AirflowFailed as e:
                if "/assets/events with 500" not in e.message:
                    raise
                return False
            return True

        assert await_condition(answered, SECONDS, POLL)
        return found

    def _reported(self) -> list[dict[str, Any]]:
        """Return what the Dag that is scheduled by the table's asset has received in its runs."""
        over = [run for run, state in self._client.runs("routine_reports").items() if state == "success"]
        return [each for run in over for each in self._client.xcom("routine_reports", run, "report")]


def test_a_pipeline_day_by_day(airflow: AirflowUnderTest, client: Client, pipeline: PipelineUnderTest) -> None:
    conf = {"pipeline": str(pipeline.file)}
    bounded = Runs(airflow, pipeline)

    # Sensors wait in the triggerer, each for its own condition.
    pipeline.source("SELECT pg_logical_emit_message(false, 'test', repeat('x', 16 << 20))")
    waits = client.trigger("routine_waits")
    for name in ("copied", "consistent", "close"):
        airflow.await_state("routine_waits", waits, name, "deferred")
    pipeline.copy()
    airflow.await_state("routine_waits", waits, "copied", "success")
    assert client.states("routine_waits", waits) == {"copied": "success", "consistent": "deferred", "close": "deferred"}

    # While a stream is running: a comparison that finds nothing, and one that finds the damage.
    limited = client.trigger("routine_limited")
    writer = Writer(pipeline.databases.source)
    writer.start()
    marker = pipeline.marker()
    assert await_condition(lambda: pipeline.record.applied > marker, SECONDS, POLL), client.states(
        "routine_limited", limited
    )
    equal = client.trigger(VERIFY, conf)
    airflow.succeed(VERIFY, equal)
    assert client.xcom(VERIFY, equal, "verify")["equal"] is True
    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id = 150", "DELETE FROM public.t WHERE id = 151")
    damaged = client.trigger(VERIFY, conf)
    assert client.wait(VERIFY, damaged) == "failed"
    assert client.task(VERIFY, damaged, "verify")["try_number"] == 1
    told = client.failures(VERIFY, damaged)
    for words in ("different id=150", "missing id=151", "trigger the Dag cdc_resnapshot with Tables: public.t;"):
        assert words in told, told

    # The stream has brought about what the sensors waited for.
    airflow.succeed("routine_waits", waits)
    for name in ("copied", "consistent", "close"):
        ended = client.task("routine_waits", waits, name)
        # Running a task on a worker records its process and host.
        assert (ended["pid"], ended["hostname"], ended["try_number"]) == (None, "", 1), ended

    # When the stream's time is up its job ends; each transaction is applied completely or not at all.
    assert client.wait("routine_limited", limited) == "failed"
    assert "The task exceeded its execution_timeout, and its Spark job was stopped." in client.failures(
        "routine_limited", limited
    )
    writer.stop()
    job = read_all(State(pipeline.pipeline.state))[-1]
    assert job.keeper is not None
    assert await_condition(lambda: not job.keeper.lives, SECONDS)
    assert not [process for process in airflow.stack.processes() if str(pipeline.file) in process.cmdline()]
    ((number,),) = pipeline.target_rows("SELECT DISTINCT body FROM public.t WHERE id <= 100")
    assert int(number) > 0

    # The schedule starts with a run, which continues from there, drains the log and ends; so does a triggered one. They
    # follow each other closely, because the schedule adds a run every five minutes.
    pipeline.source("UPDATE public.t SET body = 'healed' WHERE id IN (150, 151)")
    scheduled = bounded.first()
    pipeline.assert_equal()
    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 10")
    triggered = client.trigger(INCREMENTAL, conf)
    results = bounded.finish()
    assert client.run_state(INCREMENTAL, triggered) == "success"
    assert results.pop(scheduled)["tables"]["public.t"] >= 2
    assert [result["tables"] for result in results.values() if result["tables"]] == [{"public.t": 10}]
    assert format_lsn(pipeline.record.applied) in [result["applied_lsn"] for result in results.values()]
    pipeline.assert_equal()

    # An approval removes the pipeline; the copy stays.
    ended = client.trigger(DROP, conf)
    question = airflow.answer(DROP, ended, "Approve")
    assert question["subject"] == f"Remove pipeline {pipeline.name}?"
    airflow.succeed(DROP, ended)
    assert sink_of(pipeline.pipeline).record() is None
    assert not pipeline.source_rows(
        f"SELECT FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"
    )
    assert not list(pipeline.state.rglob("*.json"))
    pipeline.assert_equal()
