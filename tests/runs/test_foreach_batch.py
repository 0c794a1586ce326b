"""The error of a run in which both a batch and the work next to it have failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.core.errors import CdcError, ConnectionFailed, Fenced, SlotBudgetExceeded, StreamFailed
from airflow_cdc_provider.engine.runs.foreach_batch import ForeachBatch
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.state.heartbeat import STREAM
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import SPARK_CONF, PipelineUnderTest
from tests.support.spark_jvm import local_session

pytestmark = pytest.mark.spark

FENCED = Fenced("another run has taken over", "Let it.")
EXCEEDED = SlotBudgetExceeded("the slot retains too much", "Make room.")
OUTAGE = ConnectionFailed("the broker does not answer", "Start again.")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session(SPARK_CONF) as session:
        yield session


@pytest.fixture
def run(databases: Databases, tmp_path: Path) -> Iterator[Run]:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    with run_part(pipeline.pipeline, STREAM, None) as (run, _):
        yield run


@pytest.mark.parametrize(
    ("in_batch", "beside", "told"),
    [
        (FENCED, OUTAGE, FENCED),
        (OUTAGE, FENCED, FENCED),
        (FENCED, EXCEEDED, EXCEEDED),
        (OUTAGE, StreamFailed("the first to fail", "Start again."), StreamFailed),
        (FENCED, None, FENCED),
    ],
)
def test_what_ends_a_run_for_good_goes_before_an_outage(
    spark: SparkSession,
    run: Run,
    tmp_path: Path,
    in_batch: CdcError,
    beside: CdcError | None,
    told: CdcError | type[CdcError],
) -> None:
    begun, failing = threading.Event(), threading.Event()

    def write_batch(rows: DataFrame, number: int) -> None:
        begun.set()
        assert failing.wait(SECONDS)
        raise in_batch

    def failure(*said: object) -> CdcError:
        return StreamFailed(f"unforeseen: {said}", "None.")

    batches = ForeachBatch(run, write_batch, failure, failure)
    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(batches)
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def watch() -> None:
        with batches.watched(query):
            assert begun.wait(SECONDS)
            failing.set()
            if beside is not None:
                raise beside
            while not batches.ended(query):
                pass

    with pytest.raises(CdcError) as raised:
        watch()
    assert raised.value is told or type(raised.value) is told
    assert raised.value.__cause__ is not raised.value
    assert not query.isActive
