"""Views as Airflow sees them: events of assets, column lineage, and their states on the page CDC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_support import ROOT, connection_json

# isort: split
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_cdc_provider import view_asset
from airflow_cdc_provider.assets import CHANGED_TABLES, announce_views
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.hooks.progress import progress_line
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.plugins.overview import describe
from airflow_cdc_provider.plugins.pipeline_files import read_pipeline
from airflow_cdc_provider.plugins.reports import PipelineReport, read_report
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.spark_jobs import Jobs, Task

pytestmark = pytest.mark.airflow

WIDE = (
    "SELECT o.id, c.city, o.quantity * o.price AS amount FROM public.orders o"
    " LEFT JOIN public.customers c ON c.id = o.customer"
)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineUnderTest]:
    tables = ["public.orders", "public.customers", "public.notes"]
    views = {"dwd.orders_wide": {"sql": WIDE}}
    under_test = PipelineUnderTest(tmp_path, databases, tables, sink={"views": views, "schema": "copy"})
    under_test.source(
        "CREATE TABLE public.customers (id int PRIMARY KEY, city text)",
        "CREATE TABLE public.orders (id int PRIMARY KEY, customer int, quantity int, price int)",
        "CREATE TABLE public.notes (id int PRIMARY KEY)",
        "INSERT INTO public.customers VALUES (1, 'Oslo'), (2, 'Rome')",
        "INSERT INTO public.orders SELECT n, n % 3, n, 10 FROM generate_series(1, 30) n",
    )
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection_json(conn_type="spark", host="local[1]"))
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", json.dumps({"type": "console"}))
    monkeypatch.setenv("TEST_PIPELINE", under_test.name)
    under_test.provision()
    under_test.copy_tables()
    yield under_test
    for process in Jobs(under_test).family():
        process.kill()


def events(task: Task) -> dict[str, dict[str, Any]]:
    """Return the events that a task adds, by the names of their assets."""
    found = task.events[CHANGED_TABLES].asset_alias_events
    return {event.dest_asset_key.name: event.extra for event in found}


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_task_announces_a_view_only_if_it_has_moved(pipeline: PipelineUnderTest) -> None:
    jobs, view = Jobs(pipeline), f"{pipeline.name}/views/dwd.orders_wide"

    def task(until: str = "caught up") -> Task:
        return Task(CdcStreamOperator(task_id="t", pipeline=str(pipeline.file), until=until))

    building = task()
    built = building.run()
    assert events(building) == {view: {"pipeline": pipeline.name, "applied_lsn": built["applied_lsn"]}}
    assert pipeline.target_rows("SELECT count(*) FROM dwd.orders_wide") == [(30,)]
    assert_lineage(pipeline, building)
    assert_shown(pipeline)

    pipeline.source("INSERT INTO public.notes VALUES (1)")
    elsewhere = task()
    elsewhere.run()
    assert events(elsewhere).keys() == {f"{pipeline.name}/public.notes"}

    # The job that moves the view is killed; the next one of the same task changes nothing.
    moving = task("forever")
    trigger = moving.defer()
    jobs.await_beat(trigger)
    pipeline.source("UPDATE public.customers SET city = 'Bergen' WHERE id = 1")
    moved = "SELECT count(*) FROM dwd.orders_wide WHERE city = 'Bergen'"
    assert await_condition(lambda: pipeline.target_rows(moved) == [(10,)], SECONDS, 0.5)
    jobs.driver("stream").kill()
    with pytest.raises(AirflowException, match="ended with exit code"):
        moving.complete(trigger)
    assert events(moving) == {}
    trigger = moving.defer()
    jobs.await_beat(trigger)
    pipeline.json("stop")
    assert moving.complete(trigger)["changes"] == 0
    assert events(moving).keys() == {view}


def assert_lineage(pipeline: PipelineUnderTest, task: Task) -> None:
    """Check that each column of the view leads to the columns of the mirror that it is computed from."""
    lineage = task.operator.get_openlineage_facets_on_complete(None)
    database = pipeline.databases.target.rpartition("/")[2]
    (view,) = (each for each in lineage.outputs if each.name == f"{database}.dwd.orders_wide")
    fields = view.facets["columnLineage"].fields
    orders, customers = f"{database}.copy.orders", f"{database}.copy.customers"
    assert {name: [(each.name, each.field) for each in field.inputFields] for name, field in fields.items()} == {
        "id": [(orders, "id")],
        "city": [(customers, "city")],
        "amount": [(orders, "price"), (orders, "quantity")],
    }
    assert {each.namespace for each in lineage.outputs} == {view.namespace}
    assert {orders, customers} <= {each.name for each in lineage.inputs}


def assert_shown(pipeline: PipelineUnderTest) -> None:
    """Check that the page has the views of the ended job."""
    told = describe(read_pipeline(pipeline.file), read_report(pipeline.pipeline), None, time.time())
    (view,) = told["views"]
    assert (view["view"], view["state"], view["built_percent"]) == ("dwd.orders_wide", "up-to-date", 100)
    assert pipeline.record.applied == parse_lsn(view["as_of"])


def test_the_asset_of_a_view_is_not_that_of_a_table() -> None:
    assert view_asset("shop", "dwd.we ird") == Asset(
        name="shop/views/dwd.we ird", uri="postgres-cdc://shop/views/dwd.we%20ird", group="airflow-cdc"
    )


def test_a_view_that_lags_behind_is_announced_with_its_own_position() -> None:
    context: Any = {"outlet_events": OutletEventAccessors()}
    before = {"dwd.still": [[1, 3, None]], "dwd.drained": [[1, 3, "0/100"]]}
    after = {"dwd.still": [[1, 3, None]], "dwd.drained": [[1, 3, None]], "dwd.new": [[2, 9, "0/200"]]}

    announce_views(context, "shop", before, after, "0/300")

    found = context["outlet_events"][CHANGED_TABLES].asset_alias_events
    assert {event.dest_asset_key.name: event.extra["applied_lsn"] for event in found} == {
        "shop/views/dwd.drained": "0/300",
        "shop/views/dwd.new": "0/200",
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a pipeline file with a view, whose connections are known only to workers."""
    views = {"dwd.wide": {"sql": "SELECT id FROM public.t"}}
    document = {
        "pipeline": "shop",
        "source": {"conn_id": "known_to_workers", "tables": ["public.t"]},
        "sink": {"conn_id": "known_to_workers", "views": views},
        "state": str(tmp_path / "state"),
    }
    path = tmp_path / "shop.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_views_wait_on_the_page_until_a_stream_reports_them(file: Path) -> None:
    told = describe(read_pipeline(file), PipelineReport(), None, time.time())

    assert told["views"] == [{"view": "dwd.wide", "state": "waiting", "built_percent": 0.0}]


PARSING = """
import sys
from airflow_cdc_provider import cdc_dag, view_asset

dag = cdc_dag(sys.argv[1])
assert f"* `dwd.wide`, as the asset `{view_asset('shop', 'dwd.wide').name}`" in dag.doc_md, dag.doc_md
print([name for name in ("sqlglot", "psycopg2", "pyspark") if name in sys.modules])
"""


def test_where_dags_are_parsed_views_need_no_parser_and_no_connection(file: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    loaded = subprocess.check_output([sys.executable, "-c", PARSING, str(file)], env=environment, text=True)

    assert loaded.splitlines()[-1] == "[]"


def test_a_task_says_how_far_views_are_built() -> None:
    views = [
        {"view": "dwd.wide", "state": "building", "built_percent": 12.5},
        {"view": "dwd.built", "state": "up-to-date", "built_percent": 100.0},
    ]
    assert progress_line({"views": views}) == "view dwd.wide is built to 12.5 %"
