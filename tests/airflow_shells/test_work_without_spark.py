"""Operators do little work in the process of the task; Spark cannot start in these tests, since there is no Java."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow_support import connection_json

# isort: split
from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.assets import CHANGED_TABLES
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.submission import read_all
from airflow_cdc_provider.operators.prepare import CdcPrepareOperator
from airflow_cdc_provider.operators.snapshot import CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.retry import CdcTaskRefused
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.spark_jobs import Jobs, Task

pytestmark = [pytest.mark.airflow, pytest.mark.slow]


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineUnderTest]:
    made = PipelineUnderTest(
        tmp_path, databases, ["public.t"], spark={"min_bytes": "64MiB"}, snapshot={"chunk_rows": 100}
    )
    made.source(
        "CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t SELECT n, n FROM generate_series(1, 300) n"
    )
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("TEST_PIPELINE", made.name)
    yield made
    Jobs(made).await_none()


CONTEXT: Any = {"ti": SimpleNamespace(xcom_push=lambda key, value: None)}


def submissions(pipeline: PipelineUnderTest) -> int:
    return len(read_all(State(pipeline.pipeline.state)))


def test_a_run_from_its_first_step_to_its_last(pipeline: PipelineUnderTest) -> None:
    """The steps of a Dag copy and catch up, report tables that have changed, and submit no job."""
    path = str(pipeline.file)
    (group,) = CdcPrepareOperator(task_id="prepare", pipeline=path, groups=2).execute(CONTEXT)
    assert group == {"label": "public.t all rows, 3 chunks", "chunks": [["public.t", 0, 2]]}

    copied = Task(CdcSnapshotOperator(task_id="t", pipeline=path, epoch=str(pipeline.record.epoch), group=group))
    result = copied.operator.execute(copied.context)
    assert (result["chunks"], result["finished"], result["rows"]) == (3, 3, 300)
    assert copied.operator.execute(copied.context) == result  # a next try reports the same
    assert CdcPrepareOperator(task_id="prepare", pipeline=path).execute(CONTEXT) == []

    pipeline.source("DELETE FROM t WHERE id > 290")
    streamed = Task(CdcStreamOperator(task_id="t", pipeline=path))
    result = streamed.operator.execute(streamed.context)
    assert (result["caught_up"], result["changes"], result["tables"]) == (True, 10, {"public.t": 10})
    (event,) = streamed.events[CHANGED_TABLES].asset_alias_events
    assert event.extra["changes"] == 10
    pipeline.assert_equal()
    assert streamed.operator.execute(streamed.context) == result
    assert len(streamed.events[CHANGED_TABLES].asset_alias_events) == 2
    assert submissions(pipeline) == 0


def test_much_work_is_submitted(pipeline: PipelineUnderTest) -> None:
    """Whatever has no end is, too; so is a catch-up with a long log behind it."""
    path = str(pipeline.file)
    pipeline.provision()
    pipeline.copy()
    forever = Task(CdcStreamOperator(task_id="t", pipeline=path, until="forever"))
    with pytest.raises(AirflowException, match="ended with exit code"):
        forever.complete(forever.defer())
    pipeline.change(spark={"min_bytes": 1})
    pipeline.source("UPDATE t SET n = 0")
    caught_up = Task(CdcStreamOperator(task_id="t", pipeline=path))
    with pytest.raises(AirflowException, match="ended with exit code"):
        caught_up.complete(caught_up.defer())
    assert submissions(pipeline) == 2


def test_an_outage_is_left_to_a_job(pipeline: PipelineUnderTest) -> None:
    """A job waits for the end of an outage without a worker; other errors fail the task."""
    path = str(pipeline.file)
    pipeline.provision()
    pipeline.copy()
    before = pipeline.document["source"]["dsn"]
    pipeline.change(source={"dsn": "postgresql://cdc@127.0.0.1:1/none"})
    task = Task(CdcStreamOperator(task_id="t", pipeline=path))
    with pytest.raises(AirflowException, match="ended with exit code"):
        task.complete(task.defer())
    assert submissions(pipeline) == 1

    pipeline.change(source={"dsn": before})
    pipeline.source(f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    with pytest.raises(CdcTaskRefused, match="no longer exists on the source"):
        task.operator.execute(task.context)
    assert submissions(pipeline) == 1


def test_a_task_that_is_killed_fails(pipeline: PipelineUnderTest) -> None:
    """The chunk that it works on is finished; a next try does the rest."""
    path = str(pipeline.file)
    (group,) = CdcPrepareOperator(task_id="prepare", pipeline=path).execute(CONTEXT)
    task = Task(CdcSnapshotOperator(task_id="t", pipeline=path, epoch=pipeline.record.epoch, group=group))

    def kill(locked: ExitStack) -> None:
        with locked:
            assert await_condition(lambda: any(pipeline.state.glob("jobs/snapshot-*.json")), SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)

    with ExitStack() as locked, ThreadPoolExecutor() as killer:
        locked.enter_context(transaction(pipeline.databases.target, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"))
        killed = killer.submit(kill, locked.pop_all())
        with pytest.raises(AirflowException, match="asked to end before its work was done"):
            task.operator.execute(task.context)
        killed.result()
    assert len(pipeline.finished_chunks()) == 1
    assert task.operator.execute(task.context)["rows"] == 200
    pipeline.assert_equal()
