"""A backfill as users make it, beside writers and a stream that live, of a target that is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from tests.airflow.client import Client
from tests.airflow.server import SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import UNHURRIED, PipelineUnderTest
from tests.support.threads import Stoppable

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1500)]

DAG, RESNAPSHOT, DROP = "cdc_backfill", "cdc_resnapshot", "cdc_drop"
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
# Thirty rows a day for ten days.
TABLE = (
    "CREATE TABLE public.t (id int PRIMARY KEY, at timestamptz NOT NULL, body text)",
    "INSERT INTO public.t SELECT n, timestamptz '2026-01-01 00:00+00' + n * interval '48 minutes', 'row ' || n"
    " FROM generate_series(0, 299) n",
)
# In each day, of rows that the writer leaves alone: changed, missing, and foreign to the source.
DAMAGE = (
    "UPDATE public.t SET body = 'damaged' WHERE id < 300 AND id % 6 = 0",
    "DELETE FROM public.t WHERE id < 300 AND id % 6 = 3",
    "INSERT INTO public.t SELECT 10000 + n, timestamptz '2026-01-01 12:00+00' + n * interval '1 day', 'foreign'"
    " FROM generate_series(0, 9) n ON CONFLICT DO NOTHING",
)
UNTOUCHED = "SELECT id, at, body FROM public.t WHERE id % 3 = 0 AND id < 300 OR id >= 10000"


class Writer(Stoppable):
    """Changes rows of all days, but not those that are damaged, and adds some."""

    def __init__(self, dsn: str) -> None:
        super().__init__("writer")
        self._dsn = dsn

    def work(self) -> None:
        changed = "UPDATE public.t SET body = body || '+' WHERE id % 3 = 1 AND id % 30 = 10 * (random() * 3)::int + 1"
        added = "INSERT INTO public.t SELECT 1000 + count(*), %s, 'new' FROM public.t"
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            number = 0
            while not self._halt.wait(0.1):
                number += 1
                connection.execute(changed)
                connection.execute(added, [FIRST + number % 10 * DAY])


class Backfilled:
    """A pipeline whose rows are backfilled."""

    def __init__(self, airflow: AirflowUnderTest, pipeline: PipelineUnderTest) -> None:
        self.airflow, self.client, self.pipeline = airflow, airflow.client, pipeline
        self.conf = {"pipeline": str(pipeline.file), "tables": ["public.t"], "time_column": "at"}

    def create(self, *options: str) -> int:
        """``airflow backfill create`` for the days 2 to 6; its id."""
        command = ["backfill", "create", "--dag-id", DAG, "--dag-run-conf", json.dumps(self.conf)]
        span = ["--from-date", "2026-01-03", "--to-date", "2026-01-07"]
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *command, *span, *options],
            env=self.airflow.stack._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = self.client.call("GET", "/backfills", params={"dag_id": DAG})["backfills"]
        return max(int(each["id"]) for each in found)

    def finish(self, backfill: int) -> None:
        """Wait until all runs of a backfill have succeeded."""
        assert await_condition(lambda: self.client.backfill_over(backfill), SECONDS, 0.5), self.client.runs(DAG)
        runs = self.runs
        assert set(runs.values()) == {"success"}, [self.client.failures(DAG, run) for run in runs]
        assert len(runs) == 5

    @property
    def runs(self) -> dict[str, str]:
        """The states of the runs of backfills."""
        return {run: state for run, state in self.client.runs(DAG).items() if run.startswith("backfill")}

    @property
    def tries(self) -> list[int]:
        """How often the task of each of them was tried."""
        return [self.client.task(DAG, run, "resnapshot")["try_number"] for run in self.runs]

    @property
    def damaged(self) -> list[int]:
        """The days of which rows differ, as far as no writer touches them."""
        source, target = set(self.pipeline.source_rows(UNTOUCHED)), set(self.pipeline.target_rows(UNTOUCHED))
        return sorted({(at - FIRST).days for _, at, _ in source ^ target})

    def damage(self) -> None:
        """Damage all days."""
        self.pipeline.target(*DAMAGE)
        assert self.damaged == list(range(10))

    def log(self, run: str) -> str:
        """What the latest try of a run's task has said."""
        number = self.client.task(DAG, run, "resnapshot")["try_number"]
        return self.client.logs(DAG, run, "resnapshot", try_number=number)

    def requests(self) -> list[str]:
        """The requests that stand."""
        return [path.stem for path in (self.pipeline.state / "requests").glob("*.json")]

    def run(self, dag_id: str, **conf: Any) -> str:
        """Trigger a Dag for the pipeline; the id of the run."""
        return self.client.trigger(dag_id, {"pipeline": str(self.pipeline.file), **conf})


@pytest.fixture
def backfilled(airflow: AirflowUnderTest, client: Client, databases: Databases, tmp_path: Path) -> Iterator[Backfilled]:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], stream=UNHURRIED)
    pipeline.source(*TABLE)
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    for dag_id in (DAG, RESNAPSHOT, DROP):
        client.await_dag(dag_id)
    yield Backfilled(airflow, pipeline)
    pipeline.end_commands()


def test_a_backfill_heals_its_intervals(backfilled: Backfilled) -> None:
    pipeline, client, airflow = backfilled.pipeline, backfilled.client, backfilled.airflow
    stream = pipeline.start("stream")
    pipeline.await_beat(stream, "stream")
    writer = Writer(pipeline.databases.source)
    writer.start()

    # Five intervals, three at a time: they are healed, and no others.
    backfilled.damage()
    backfilled.finish(backfilled.create("--max-active-runs", "3"))
    assert backfilled.damaged == [0, 1, 7, 8, 9]
    assert backfilled.tries == [1] * 5

    # Reprocessed backwards, two at a time: the same runs really run again.
    backfilled.damage()
    backfilled.finish(
        backfilled.create("--reprocess-behavior", "completed", "--run-backwards", "--max-active-runs", "2")
    )
    assert backfilled.damaged == [0, 1, 7, 8, 9]
    assert backfilled.tries == [2] * 5

    # Cancelled while two intervals wait for an older transaction, and one of these marked as failed.
    backfilled.damage()
    with transaction(pipeline.databases.source, "INSERT INTO public.t VALUES (-1, now(), 'open')") as session:
        cancelled = backfilled.create("--reprocess-behavior", "completed", "--max-active-runs", "2")
        assert await_condition(lambda: len(backfilled.requests()) == 2, SECONDS, 0.2), backfilled.runs
        client.change_backfill(cancelled, "cancel")
        waiting = [run for run, state in backfilled.runs.items() if state == "running"]
        for run in waiting:
            airflow.await_state(DAG, run, "resnapshot", "deferred")
            # A deferred task that is marked before its trigger runs withdraws nothing: Airflow forgets the trigger.
            assert await_condition(lambda run=run: "waits for" in backfilled.log(run), SECONDS, 0.5)
        client.mark(DAG, waiting[0], "resnapshot", "failed")
        assert await_condition(lambda: len(backfilled.requests()) == 1, SECONDS, 0.2), "the request is withdrawn"
        session.rollback()
    assert client.wait(DAG, waiting[1]) == "success"
    assert client.wait(DAG, waiting[0]) == "failed"
    assert sorted(backfilled.runs.values()) == ["failed"] * 4 + ["success"]
    assert len(backfilled.damaged) == 9

    # What is wrong with a form is said in its terms, and not tried again.
    wrong = backfilled.run(DAG, tables=["public.t"], time_column="at")
    assert client.wait(DAG, wrong) == "failed"
    assert "Give From and To" in client.failures(DAG, wrong)

    # Without a stream the tasks read themselves, one after the other.
    pipeline.run("stop")
    assert stream.wait().code == 0
    backfilled.finish(backfilled.create("--reprocess-behavior", "completed", "--max-active-runs", "3"))
    assert backfilled.damaged == [0, 1, 7, 8, 9]

    # The rest, by a condition; then everything, with a new slot, once somebody has approved it.
    rest = backfilled.run(RESNAPSHOT, tables=["public.t"], where="at < '2026-01-02' OR id % 2 = 0")
    airflow.succeed(RESNAPSHOT, rest)
    assert client.states(RESNAPSHOT, rest)["start_over"] == "skipped"
    assert backfilled.damaged == [1, 7, 8, 9]
    everything = backfilled.run(RESNAPSHOT, everything=True, groups=1)
    question = airflow.answer(RESNAPSHOT, everything, "Approve")
    assert "all tables are read again" in question["body"]
    assert "public.t: " in question["body"]
    airflow.succeed(RESNAPSHOT, everything)
    assert client.states(RESNAPSHOT, everything)["snapshot[0]"] == "success"
    writer.stop()
    pipeline.apply()
    pipeline.assert_equal()
    pipeline.assert_verified()

    # Who rejects keeps the pipeline.
    kept = backfilled.run(DROP)
    question = airflow.answer(DROP, kept, "Reject")
    assert question["subject"] == f"Remove pipeline {pipeline.name}?"
    airflow.succeed(DROP, kept)
    assert client.states(DROP, kept)["drop"] == "skipped"
    assert sink_of(pipeline.pipeline).record() is not None
    airflow.succeed(DROP, backfilled.run(DROP, approve=False))
    assert sink_of(pipeline.pipeline).record() is None
