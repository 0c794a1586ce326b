"""Spark jobs that outlive their tasks: submitted by a worker, watched by a trigger, found again by the next try.

Operators and triggers run in this process, with real servers, a real keeper and a real Spark; tests in ``airflow/`` run
them in Airflow itself.
does with them is tested in ``airflow/``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.airflow_support import connection_json

# isort: split
from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.assets import CHANGED_TABLES
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.links.spark import SparkUiLink
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.retry import CdcTaskFailed
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.spark_jobs import Jobs, Task

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineUnderTest]:
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 300})
    under_test.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 1000) n",
    )
    # A password that the servers do not require.
    under_test.change(sink={"dsn": databases.pipeline_target.replace("@", ":n0tTelling@")})
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    monkeypatch.setenv("TEST_PIPELINE", under_test.name)
    yield under_test
    for process in Jobs(under_test).family():
        process.kill()


@pytest.fixture
def jobs(pipeline: PipelineUnderTest) -> Jobs:
    return Jobs(pipeline)


def test_a_snapshot_finds_its_job_again(pipeline: PipelineUnderTest, jobs: Jobs) -> None:
    epoch = pipeline.provision().epoch
    path = str(pipeline.file)
    first, second = CdcPlanOperator(task_id="plan", pipeline=path, groups=2).execute({})
    assert first == {"label": "public.t .. 601, 2 chunks", "chunks": [["public.t", 0, 1]]}
    task = Task(CdcSnapshotOperator(task_id="t", pipeline=path, epoch=str(epoch), group=first))
    trigger = task.defer()
    # The worker has been killed since: the next try.
    assert task.defer().submission == trigger.submission
    result = task.complete(trigger)
    assert (result["chunks"], result["finished"], result["rows"]) == (2, 2, 600)
    assert task.operator.execute(task.context) == result
    assert len(pipeline.finished_chunks()) == 2
    submission = jobs.submission(trigger)
    assert submission.log is not None
    output = Path(submission.log).read_text()
    assert "n0tTelling" not in output
    assert '"rows": 600' in output
    application = jobs.submission(trigger).application
    assert application is not None
    assert application.startswith("local-")
    link = SparkUiLink().get_link(task.operator, ti_key=None)  # type: ignore[arg-type]
    assert link.endswith(f"/pipelines/{pipeline.name}/spark/{trigger.submission}?application={application}")

    # The map has been expanded again since, and another group has this index.
    remapped = Task(CdcSnapshotOperator(task_id="t", pipeline=path, epoch=str(epoch), group=second))
    remapped.values = task.values
    other = remapped.defer()
    assert other.submission != trigger.submission
    assert json.dumps(second["chunks"]) in jobs.submission(other).command
    asyncio.run(other.on_kill())
    jobs.await_none()
    with pytest.raises(AirflowException, match="ended before its work was done"):
        remapped.complete(other)
    shown = [path.read_bytes() for path in pipeline.state.rglob("*") if path.is_file()]
    assert not any(b"n0tTelling" in content for content in shown)


def test_a_stream_is_found_taken_over_and_stopped(pipeline: PipelineUnderTest, jobs: Jobs) -> None:
    epoch = pipeline.provision().epoch
    pipeline.copy()
    task = Task(CdcStreamOperator(task_id="t", pipeline=str(pipeline.file), epoch=epoch, until="stopped"))

    trigger = task.defer()
    jobs.await_beat(trigger)
    assert pipeline.record.epoch == epoch
    assert not any("n0tTelling" in " ".join(process.cmdline()) for process in jobs.family())
    jobs.driver("stream").kill()
    with pytest.raises(AirflowException, match="ended with exit code") as failed:
        task.complete(trigger)
    assert type(failed.value) is CdcTaskFailed  # it is tried again

    trigger = task.defer()
    jobs.await_beat(trigger)
    assert pipeline.record.epoch > epoch
    (keeper,) = jobs.keepers()
    keeper.kill()
    with pytest.raises(AirflowException, match=f"its keeper, process {keeper.pid} on .*, was killed") as lost:
        task.complete(trigger)
    assert type(lost.value) is CdcTaskFailed
    jobs.await_none()

    trigger = task.defer()
    jobs.await_beat(trigger)
    before = pipeline.record.epoch
    task.max_tries += 3  # cleared
    cleared = task.defer()
    assert cleared.submission != trigger.submission
    with pytest.raises(AirflowException, match="ended before its work was done"):
        task.complete(trigger)
    jobs.await_beat(cleared)
    assert pipeline.record.epoch > before
    assert len(jobs.keepers()) == 1
    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id % 7 = 0")
    marker = pipeline.marker()
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS, 0.5)
    assert pipeline.json("stop") == {"asked": ["stream"]}
    assert not task.complete(cleared)["caught_up"]
    (event,) = task.events[CHANGED_TABLES].asset_alias_events
    assert event.dest_asset_key.name == f"{pipeline.name}/public.t"
    assert event.extra["changes"] > 0
    jobs.await_none()
    pipeline.assert_equal()
