"""The whole path on a real Spark cluster: a standalone master and two workers as local processes.

These tests cover what ``local[2]`` cannot show: executors are separate processes, find the engine only in the archive
that the driver ships, and cannot use files on the driver's disk. Their Python has all libraries but not this package,
and refuses to open files below the driver's directory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.airflow_support import connection_json
from tests.support.patience import SECONDS

# isort: split
from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.pipelines import SPARK_CONF, UNHURRIED, PipelineUnderTest
from tests.support.spark_cluster import PASSWORD, Cluster, cluster, make_python
from tests.support.spark_jobs import Jobs, Task

__all__ = ["cluster"]

# A cluster consists of eight Python processes and four JVMs, which take minutes to start on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


TABLES = """
CREATE TABLE public.orders (id bigint PRIMARY KEY, customer int NOT NULL, note text);
CREATE TABLE public.lines (order_id bigint, line int, price numeric NOT NULL, PRIMARY KEY (order_id, line));
INSERT INTO public.orders SELECT n, n % 100, md5(n::text) FROM generate_series(1, 4000) n;
INSERT INTO public.lines SELECT n, l, n * 1.5 FROM generate_series(1, 4000) n, generate_series(1, 2) l;
"""
WRITES = """
INSERT INTO public.orders SELECT max(id) + 1, 1, NULL FROM public.orders;
INSERT INTO public.lines SELECT max(id), 1, 0.50 FROM public.orders;
UPDATE public.orders SET note = clock_timestamp()::text WHERE id % 97 = 0;
UPDATE public.lines SET line = line + 10 WHERE order_id % 501 = 0 AND line < 100;
DELETE FROM public.lines WHERE order_id = (SELECT min(order_id) FROM public.lines);
"""


@pytest.fixture
def pipeline(
    cluster: Cluster, databases: Databases, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PipelineUnderTest]:
    """Return a pipeline on the cluster, whose driver has a directory for all its files."""
    directory = cluster.driver / f"test{len(list(cluster.driver.iterdir()))}"
    temporary = directory / "tmp"
    temporary.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("PYTHONPATH", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    execute(databases.source, *TABLES.strip().splitlines())
    conf = {**SPARK_CONF, "spark.driver.host": "127.0.0.1"}
    pipeline = PipelineUnderTest(
        directory,
        databases,
        ["public.orders", "public.lines"],
        snapshot={"chunk_rows": 1500},
        spark={"master": cluster.master, "conf": conf},
    )
    yield pipeline
    pipeline.end_commands()


@contextmanager
def writing(dsn: str) -> Iterator[None]:
    """Change the source in the background."""
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.5):
            execute(dsn, *WRITES.strip().splitlines())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_executors_get_the_engine_from_the_driver_and_are_killed(
    cluster: Cluster, pipeline: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other executors repeat their tasks, and everything that they had staged or committed counts once."""
    monkeypatch.setenv("PYSPARK_PYTHON", str(make_python(tmp_path / "python")))
    before = cluster.executors()
    pipeline.provision()
    with writing(pipeline.databases.source):
        snapshot = pipeline.start("snapshot")
        snapshot.until(lambda: len(pipeline.finished_chunks()) > 1, "a part of the snapshot", SECONDS)
        cluster.kill_an_executor()
        assert len(pipeline.finished_chunks()) < len(pipeline.record.chunks)
        outcome = snapshot.wait(SECONDS)
        assert outcome.code == 0, outcome.stderr[-4000:]
        pipeline.change(stream=UNHURRIED)
        stream = pipeline.start("stream")
        begun = pipeline.marker()
        stream.until(lambda: pipeline.record.applied >= begun, "changes", SECONDS)
        cluster.kill_an_executor()
    end = pipeline.marker()
    stream.until(lambda: pipeline.record.applied >= end, "the end", SECONDS)
    stream.terminate()
    assert stream.wait(SECONDS).code == 0, stream.output()
    verified = commands.verify(pipeline.pipeline)
    assert verified["equal"]
    assert [table["source_rows"] > 4000 for table in verified["tables"]] == [True, True]
    # Each of the two jobs had one executor on each worker.
    assert all(count >= started + 2 for count, started in zip(cluster.executors(), before, strict=True))


@pytest.mark.thorough
def test_a_library_that_executors_lack_is_named(
    pipeline: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "adbc_driver_postgresql"
    monkeypatch.setenv("PYSPARK_PYTHON", str(make_python(tmp_path / "python", library)))
    error = pipeline.json("preflight", code=1)["error"]
    assert error["kind"] == "SparkUnusable"
    assert error["message"].endswith(f"lack: {library}")
    assert "PYSPARK_PYTHON" in error["solution"]


@pytest.mark.thorough
def test_a_driver_on_the_cluster_outlives_all_that_submitted_it(
    cluster: Cluster, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators use cluster mode: only the pipeline's file, its state and the cluster's own password are there."""
    temporary = cluster.driver / "airflow"
    temporary.mkdir()
    extra = {"deploy-mode": "cluster"}
    given = {
        "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host=cluster.master, extra=extra),
        "PYSPARK_PYTHON": str(make_python(tmp_path / "python")),
        "TMPDIR": str(temporary),
        PASSWORD: "n0tTelling",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    pipeline = PipelineUnderTest(
        tmp_path,
        databases,
        ["public.orders"],
        sink={"dsn": databases.pipeline_target.replace("@", f":${{{PASSWORD}}}@")},
        spark={"conf": {**SPARK_CONF, "spark.driver.host": "127.0.0.1", "spark.driver.memory": "512m"}},
    )
    pipeline.source(*TABLES.strip().splitlines())
    monkeypatch.setenv("TEST_PIPELINE", pipeline.name)
    jobs, path = Jobs(pipeline), str(pipeline.file)
    epoch = pipeline.provision().epoch

    (group,) = CdcPlanOperator(task_id="plan", pipeline=path, groups=1).execute({})
    result = Task(CdcSnapshotOperator(task_id="t", pipeline=path, epoch=epoch, group=group)).run()
    assert (result["finished"], result["rows"]) == (result["chunks"], 4000)

    stream = Task(CdcStreamOperator(task_id="t", pipeline=path, epoch=epoch, until="stopped"))
    trigger = stream.defer()
    jobs.await_beat(trigger)
    driver = jobs.driver("stream")
    assert driver.environ()[PASSWORD] == "here"
    (keeper,) = jobs.keepers()
    (submitting,) = (process for process in keeper.children(recursive=True) if process.name() == "java")
    assert PASSWORD not in submitting.environ()
    keeper.kill()
    assert await_condition(lambda: not submitting.is_running(), SECONDS)
    jobs.await_none()
    assert stream.defer().submission == trigger.submission
    pipeline.source(*WRITES.strip().splitlines())
    marker = pipeline.marker()
    assert await_condition(lambda: pipeline.record.applied >= marker, SECONDS)
    stream.operator.on_kill()
    with pytest.raises(AirflowException, match="ended before its work was done"):
        stream.complete(trigger)
    assert await_condition(lambda: not psutil.pid_exists(driver.pid), SECONDS)

    pipeline.source(*WRITES.strip().splitlines())
    assert Task(CdcStreamOperator(task_id="t", pipeline=path, epoch=epoch, until="caught_up")).run()["caught_up"]
    pipeline.assert_equal("public.orders")
    jobs.await_none()
