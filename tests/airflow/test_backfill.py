"""A backfill as users create it, of a damaged target, while writers and a stream are active."""

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
from tests.airflow.server import POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.pipelines import UNHURRIED, PipelineUnderTest
from tests.support.threads import Stoppable

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]

DAG, RESNAPSHOT, DROP = "cdc_backfill", "cdc_resnapshot", "cdc_drop"
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
SPAN = ("2026-01-03", "2026-01-05")
"""The days 2 to 4, which are backfilled."""
# Thirty rows per day for ten days.
TABLE = (
    "CREATE TABLE public.t (id int PRIMARY KEY, at timestamptz NOT NULL, body text)",
    "INSERT INTO public.t SELECT n, timestamptz '2026-01-01 00:00+00' + n * interval '48 minutes', 'row ' || n"
    " FROM generate_series(0, 299) n",
)
# On each day, among rows that the writer does not touch: one changed, one missing, and one foreign to the source.
DAMAGE = (
    "UPDATE public.t SET body = 'damaged' WHERE id < 300 AND id % 6 = 0",
    "DELETE FROM public.t WHERE id < 300 AND id % 6 = 3",
    "INSERT INTO public.t SELECT 10000 + n, timestamptz '2026-01-01 12:00+00' + n * interval '1 day', 'foreign'"
    " FROM generate_series(0, 9) n ON CONFLICT DO NOTHING",
)
UNTOUCHED = "SELECT id, at, body FROM public.t WHERE id % 3 = 0 AND id < 300 OR id >= 10000"


class Writer(Stoppable):
    """Changes rows of all days except the damaged ones, and adds some."""

    def __init__(self, dsn: str) -> None:
        super().__init__("writer")
        self._dsn = dsn

    def work(self) -> None:
        changed = "UPDATE public.t SET body = body || '+' WHERE id % 3 = 1 AND id % 30 = 10 * (random() * 3)::int + 1"
        added = "INSERT INTO public.t SELECT 1000 + count(*), %s, 'new' FROM public.t"
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            number = 0
            while not self._halt.wait(0.3):
                number += 1
                connection.execute(changed)
                connection.execute(added, [FIRST + number % 10 * DAY])


class Backfilled:
    """A pipeline whose rows are backfilled."""

    def __init__(self, airflow: AirflowUnderTest, pipeline: PipelineUnderTest) -> None:
        self.airflow, self.client, self.pipeline = airflow, airflow.client, pipeline
        self.conf = {"pipeline": str(pipeline.file), "tables": ["public.t"], "time_column": "at"}

    def create(self, *options: str) -> int:
        """Run ``airflow backfill create`` for the days 2 to 4, and return the backfill's id."""
        command = ["backfill", "create", "--dag-id", DAG, "--dag-run-conf", json.dumps(self.conf)]
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *command, "--from-date", SPAN[0], "--to-date", SPAN[1], *options],
            env=self.airflow.stack._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = self.client.call("GET", "/backfills", params={"dag_id": DAG})["backfills"]
        return max(int(each["id"]) for each in found)

    def repeat(self, **options: Any) -> int:
        """Create a backfill for the same days, whose runs run again, as users of the page do."""
        span = (f"{day}T00:00:00Z" for day in SPAN)
        return self.client.backfill(DAG, *span, dag_run_conf=self.conf, reprocess_behavior="completed", **options)

    def finish(self, backfill: int) -> None:
        """Wait until all runs of a backfill have succeeded."""
        assert await_condition(lambda: self.client.backfill_over(backfill), SECONDS, POLL), self.client.runs(DAG)
        runs = self.runs
        assert set(runs.values()) == {"success"}, [self.client.failures(DAG, run) for run in runs]
        assert len(runs) == 3

    @property
    def runs(self) -> dict[str, str]:
        """Return the states of the runs of backfills."""
        return {run: state for run, state in self.client.runs(DAG).items() if run.startswith("backfill")}

    @property
    def tries(self) -> dict[str, int]:
        """Return how often the task of each of them was tried."""
        return {run: self.client.task(DAG, run, "resnapshot")["try_number"] for run in self.runs}

    @property
    def damaged(self) -> list[int]:
        """Return the days on which rows differ that no writer touches."""
        source, target = set(self.pipeline.source_rows(UNTOUCHED)), set(self.pipeline.target_rows(UNTOUCHED))
        return sorted({(at - FIRST).days for _, at, _ in source ^ target})

    def damage(self) -> None:
        """Damage all days."""
        self.pipeline.target(*DAMAGE)
        assert self.damaged == list(range(10))

    def log(self, run: str) -> str:
        """Return the log of the latest try of a run's task."""
        number = self.client.task(DAG, run, "resnapshot")["try_number"]
        return self.client.logs(DAG, run, "resnapshot", try_number=number)

    def requests(self) -> list[str]:
        """Return the pending requests."""
        return [path.stem for path in (self.pipeline.state / "requests").glob("*.json")]

    def run(self, dag_id: str, **conf: Any) -> str:
        """Trigger a Dag for the pipeline, and return the id of the run."""
        return self.client.trigger(dag_id, {"pipeline": str(self.pipeline.file), **conf})


@pytest.fixture
def backfilled(airflow: AirflowUnderTest, client: Client, databases: Databases, tmp_path: Path) -> Iterator[Backfilled]:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], stream={**UNHURRIED, "trigger": "2 seconds"})
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

    # Three intervals, two at a time: exactly these are repaired.
    backfilled.damage()
    backfilled.finish(backfilled.create("--max-active-runs", "2"))
    assert backfilled.damaged == [0, 1, 5, 6, 7, 8, 9]
    assert list(backfilled.tries.values()) == [1] * 3

    # Reprocessed backwards, two at a time: the same runs run again. Canceled while these two wait for an older
    # transaction, and one of them marked as failed.
    backfilled.damage()
    with transaction(pipeline.databases.source, "INSERT INTO public.t VALUES (-1, now(), 'open')") as session:
        cancelled = backfilled.repeat(run_backwards=True, max_active_runs=2)
        assert await_condition(lambda: len(backfilled.requests()) == 2, SECONDS, 0.2), backfilled.runs
        client.change_backfill(cancelled, "cancel")
        waiting = [run for run, state in backfilled.runs.items() if state == "running"]
        assert len(waiting) == 2
        assert not any(SPAN[0] in run for run in waiting), waiting
        for run in waiting:
            airflow.await_state(DAG, run, "resnapshot", "deferred")
            # If a deferred task is marked before its trigger runs, nothing is withdrawn: Airflow forgets the trigger.
            assert await_condition(lambda run=run: "waits for" in backfilled.log(run), SECONDS, POLL)
        client.mark(DAG, waiting[0], "resnapshot", "failed")
        assert await_condition(lambda: len(backfilled.requests()) == 1, SECONDS, 0.2), "the request is withdrawn"
        session.rollback()
    assert client.wait(DAG, waiting[1]) == "success"
    assert client.wait(DAG, waiting[0]) == "failed"
    assert sorted(backfilled.runs.values()) == ["failed", "failed", "success"]
    assert len(backfilled.damaged) == 9
    tries = backfilled.tries
    assert tries[waiting[1]] == 2, backfilled.log(waiting[1])

    # Errors in a form are reported in its terms, and not retried.
    wrong = backfilled.run(DAG, tables=["public.t"], time_column="at")
    assert client.wait(DAG, wrong) == "failed"
    assert "Give From and To" in client.failures(DAG, wrong)

    # Without a stream the tasks re-read themselves, one after the other.
    pipeline.run("stop")
    assert stream.wait().code == 0
    again = ("--reprocess-behavior", "completed", "--run-backwards")
    backfilled.finish(backfilled.create(*again, "--max-active-runs", "3"))
    assert backfilled.damaged == [0, 1, 5, 6, 7, 8, 9]
    assert backfilled.tries == {run: number + 1 for run, number in tries.items()}

    # The rest, by a condition; then everything, with a new slot, after an approval.
    rest = backfilled.run(RESNAPSHOT, tables=["public.t"], where="at < '2026-01-02' OR id % 2 = 0")
    airflow.succeed(RESNAPSHOT, rest)
    assert client.states(RESNAPSHOT, rest)["start_over"] == "skipped"
    assert backfilled.damaged == [1, 5, 6, 7, 8, 9]
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

    # A rejection keeps the pipeline.
    kept = backfilled.run(DROP)
    question = airflow.answer(DROP, kept, "Reject")
    assert question["subject"] == f"Remove pipeline {pipeline.name}?"
    airflow.succeed(DROP, kept)
    assert client.states(DROP, kept)["drop"] == "skipped"
    assert sink_of(pipeline.pipeline).record() is not None
    airflow.succeed(DROP, backfilled.run(DROP, approve=False))
    assert sink_of(pipeline.pipeline).record() is None
