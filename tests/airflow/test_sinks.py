"""All kinds of sinks at once in a real Airflow: fed from one slot, sensed, compared, maintained, shown, removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from airflow_cdc_provider.engine.runs.commit_records import sink_of
from demo.warehouse import WAREHOUSES
from tests.airflow.browser import Browser
from tests.airflow.client import Client
from tests.airflow.server import AirflowUnderTest
from tests.conftest import Databases
from tests.support.airflow_connections import connect
from tests.support.pipelines import SPARK_CONF, UNHURRIED, PipelineUnderTest
from tests.support.spark_jars import DELTA, require_jars

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.timeout(1800)]


PATIENCE = 600.0  # seconds: five sinks, one of which uses a Spark that has to warm up


MIRRORS = ("postgres", "mysql", "delta")
VIEWS = {"dwd.named": {"sql": "SELECT t.id, t.name, t.price * 2 AS double_price FROM public.t AS t WHERE t.price > 1"}}
"""Views of the mirrors, in SQL that all of these stores have."""

COPY, SENSE, MAINTAIN, DROP = "cdc_sinks", "sinks_sense", "sinks_maintain", "cdc_drop"


DAGS = """
from airflow.sdk import DAG

from airflow_cdc_provider import cdc_dag
from airflow_cdc_provider.operators.pipeline import CdcMaintainOperator, CdcVerifyOperator
from airflow_cdc_provider.sensors.pipeline import CdcLagSensor, SnapshotFinishedSensor

copy = cdc_dag("PIPELINE", dag_id="cdc_sinks", groups=1)

with DAG("sinks_sense", default_args={"pipeline": "PIPELINE", "poke_interval": 1}):
    SnapshotFinishedSensor(task_id="consistent", consistent=True)
    CdcLagSensor(task_id="close", below_bytes="8MiB")

with DAG("sinks_maintain", default_args={"pipeline": "PIPELINE"}):
    CdcMaintainOperator(task_id="maintain") >> CdcVerifyOperator(task_id="verify")
"""


@pytest.fixture
def pipeline(
    airflow: AirflowUnderTest,
    client: Client,
    databases: Databases,
    tmp_path: Path,
    server_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[PipelineUnderTest]:
    """Return a pipeline into the demo's stores, whose addresses only Airflow's connections contain."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 400}, stream=UNHURRIED)
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, name text, price numeric(10,2), at timestamptz, big text)",
        "INSERT INTO public.t SELECT n, 'name ' || n, n / 7.0, now(),"
        " CASE WHEN n % 9 = 0 THEN repeat(md5(n::text), 200) END FROM generate_series(1, 1000) n",
    )
    require_jars(DELTA)
    with ExitStack() as ended:
        sinks = []
        for kind, start in WAREHOUSES.items():
            warehouse = start(ended, server_directory / f"{tmp_path.name}-{kind}")
            section = yaml.safe_load(warehouse.section)
            sinks.append(section | ({"views": VIEWS} if kind in MIRRORS else {}))
            for name, uri in warehouse.connections.items():
                monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", uri)  # for this process; Airflow has its own
                connect(client, ended, name, uri)
        pipeline.change(sink=sinks, spark={"conf": {**SPARK_CONF, "spark.jars.packages": ""}})
        shown = airflow.pipelines / "sinks.yaml"
        shown.symlink_to(pipeline.file)
        ended.callback(shown.unlink)
        airflow.add_dag("sinks", DAGS.replace("PIPELINE", str(pipeline.file)))
        yield pipeline


@pytest.mark.thorough
def test_every_kind_of_sink_is_filled_and_equal(
    airflow: AirflowUnderTest, client: Client, browser: Browser, pipeline: PipelineUnderTest
) -> None:
    waits = client.trigger(SENSE)
    for name in ("consistent", "close"):
        airflow.await_state(SENSE, waits, name, "deferred")

    airflow.succeed(COPY, client.trigger(COPY), PATIENCE)
    airflow.succeed(SENSE, waits)

    pipeline.source(
        "UPDATE public.t SET name = upper(name) WHERE id % 3 = 0",
        "UPDATE public.t SET id = id + 5000 WHERE id % 90 = 0",
        "DELETE FROM public.t WHERE id % 5 = 1",
        "ALTER TABLE public.t ADD COLUMN more int",
        "INSERT INTO public.t (id, name, more) SELECT n, 'new', n FROM generate_series(2001, 2100) n",
    )
    airflow.succeed(COPY, client.trigger(COPY), PATIENCE)
    status = pipeline.json("status")
    assert {sink["applied_lsn"] for sink in status["sinks"]} == {status["applied_lsn"]}
    assert all(sink["consistent"] for sink in status["sinks"])
    with browser.look(f"plugin/cdc?pipeline={pipeline.name}") as page:
        sinks = "postgres (mirror), mysql (mirror), delta (mirror), files (changelog), kafka (changelog)"
        page.get_by_text(sinks).wait_for()
        page.get_by_text("idle", exact=True).first.wait_for()
        page.get_by_role("link", name="public.t", exact=True).click()
        page.get_by_role("img", name="public.t: 3 of 3 chunks copied").wait_for()

    maintained = client.trigger(MAINTAIN)
    airflow.succeed(MAINTAIN, maintained, PATIENCE)
    assert len(client.xcom(MAINTAIN, maintained, "maintain")["sinks"]) == 2  # of Delta and of files
    verified = client.xcom(MAINTAIN, maintained, "verify")
    assert [table["equal"] for table in verified["tables"]] == [True] * len(WAREHOUSES), verified
    assert {(table["source_rows"], table["target_rows"]) for table in verified["tables"]} == {(900, 900)}
    ((wanted,),) = pipeline.source_rows("SELECT count(*)::int FROM public.t WHERE price > 1")
    assert [(view["equal"], view["rows"]) for view in verified["views"]] == [(True, wanted)] * len(MIRRORS), verified

    ended = client.trigger(DROP, {"pipeline": str(pipeline.file)})
    airflow.answer(DROP, ended, "Approve")
    airflow.succeed(DROP, ended)
    assert [sink_of(branch).record() for branch in pipeline.pipeline.branches] == [None] * len(WAREHOUSES)
