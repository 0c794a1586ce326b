"""Tasks of a real Airflow that are killed: Airflow tries them again, and the data stays right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from airflow_cdc_provider.demo.servers import await_condition
from tests.conftest import Databases
from tests.pipelines import PipelineUnderTest
from tests.torture.airflow import Airflow, DagRun

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(900)]

SECONDS = 300.0
"""How long Airflow and Spark are waited for, far beyond what they take on an idle machine."""


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """A table, not copied yet."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"])
    under_test.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 1000) n",
    )
    return under_test


@pytest.fixture
def airflow(pipeline: PipelineUnderTest) -> Iterator[Airflow]:
    """An Airflow that runs its Dag."""
    airflow = Airflow(pipeline.file)
    airflow.start()
    yield airflow
    airflow.stop()


def strike(run: DagRun, part: str) -> list[psutil.Process]:
    """Kill a part of the run; returns its processes."""
    parts = list(run.parts())
    assert {"supervisor", "task", "guard", "driver", "jvm"} <= {found for found, _ in parts}, parts
    (process,) = (process for found, process in parts if found == part)
    process.kill()
    return [process for found, process in parts if found != "supervisor"]


def await_applied(pipeline: PipelineUnderTest, run: DagRun, attempt: int) -> None:
    """Wait until an attempt of the stream has begun, and all is applied that is committed then."""
    begun = await_condition(lambda: run.attempts("stream") >= attempt, SECONDS, interval=0.5)
    assert begun, run.output()
    marker = pipeline.marker()
    over = await_condition(lambda: not run.running or pipeline.record.applied >= marker, SECONDS, interval=0.5)
    assert over, run.output()
    assert run.running, run.output()


def test_airflow_tries_again_what_was_killed(pipeline: PipelineUnderTest, airflow: Airflow) -> None:
    """Nothing of the attempt that was killed is alive in the next; nobody has to help either of them."""
    run = airflow.trigger()
    for attempt, part in enumerate(("task", "supervisor"), start=1):
        await_applied(pipeline, run, attempt)
        family = strike(run, part)
        pipeline.source(f"UPDATE public.t SET body = '{part}' WHERE id % 7 = {attempt}")
        _, alive = psutil.wait_procs(family, timeout=SECONDS)
        assert not alive, run.output()
    await_applied(pipeline, run, 3)
    pipeline.run("stop")
    assert run.wait(SECONDS).code == 0, run.output()
    pipeline.assert_equal()
    pipeline.assert_verified()
