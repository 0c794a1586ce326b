"""What a task gives to Airflow in addition to its state: retries, assets, lineage, links.

All Dags, also the provider's own, run in one process, because it takes long to start.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_support import ROOT, connection_json, migrate_database, write_pipeline

# isort: split
from airflow.sdk import Asset, RetryAction
from airflow.sdk.exceptions import AirflowFailException

from airflow_cdc_provider import CDC_RETRY_POLICY, table_asset
from airflow_cdc_provider.engine.core.errors import Blocked, CdcError, Fenced, GateClosed, SecondWriter, ServerNotReady
from airflow_cdc_provider.engine.postgres.connection import dataset
from airflow_cdc_provider.hooks.cdc import airflow_failures
from airflow_cdc_provider.retry import CdcRetryPolicy, CdcTaskFailed
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.airflow

RUN = """
import json, sys
from datetime import timedelta
from pathlib import Path
import tests.support.airflow_support
# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.models.asset import AssetEvent, AssetModel
from airflow.models.xcom import XComModel
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import DAG, task
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_cdc_provider import CDC_RETRY_POLICY
from airflow_cdc_provider.assets import CHANGED_TABLES, announce_changes, announce_views
from airflow_cdc_provider.engine.core.errors import GateClosed, SecondWriter
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.pipeline import CdcPreflightOperator

here = Path(__file__).parent
RESULT = {"applied_lsn": "0/16B3748", "changes": 7, "tables": {"public.t": 5, "we ird.T": 2}}


class Streamed(CdcOperator):
    def execute(self, context):
        self.defer(trigger=TimeDeltaTrigger(timedelta(0)), method_name="execute_complete")

    def execute_complete(self, context, event):
        pipeline = load_pipeline(self.pipeline).pipeline
        self.record_flows(pipeline)
        announce_changes(context, pipeline.name, RESULT)
        still, moved = [[1, 3, None]], {"dwd.still": [[1, 3, None]], "dwd.order_lines_wide": [[2, 1, None]]}
        announce_views(context, pipeline.name, {"dwd.still": still}, moved, RESULT["applied_lsn"])


with DAG("outcomes", schedule=None, default_args={"retries": 2, "retry_delay": timedelta(0)}) as dag:
    CdcPreflightOperator.partial(task_id="refused").expand(pipeline=[str(here / "none.yaml")])
    Streamed(task_id="streamed", pipeline=str(here / "pipeline.yaml"), outlets=[CHANGED_TABLES])

    @task(retry_policy=CDC_RETRY_POLICY)
    def asks():
        raise GateClosed("the slot is gone", "Resnapshot.")

    @task(retry_policy=CDC_RETRY_POLICY)
    def waits(ti=None):
        if ti.try_number == 1:
            raise SecondWriter("another run is alive", "Wait.")

    asks()
    waits()

if __name__ == "__main__":
    run = dag.test(logical_date=None)
    with create_session() as session:
        found = select(AssetModel.name, AssetModel.uri, AssetEvent.extra)
        found = found.join(AssetEvent, AssetModel.id == AssetEvent.asset_id)
        events = session.execute(found.where(AssetEvent.source_dag_id == dag.dag_id)).all()
        found = select(XComModel.value).where(XComModel.dag_id == dag.dag_id, XComModel.key == "_link_CdcPageLink")
        links = session.scalars(found).all()
        outcome = {
            "tasks": {ti.task_id: [str(ti.state), ti.try_number] for ti in run.get_task_instances()},
            "events": [list(event) for event in events],
            "links": list(links),
        }
    for name in ("orders_report", "city_report"):
        DagBag(str(here / f"{name}_dag.py")).dags[name].test(logical_date=None)
    # The tests with a whole Airflow include the steps that follow the snapshot.
    run = DagBag(str(here / "cdc_pipeline.py")).dags["cdc_pipeline"].test(
        logical_date=None,
        run_conf={"pipeline": str(here / "shop" / "shop.yaml")},
        mark_success_pattern="stream|slot_progress|verify",
    )
    outcome["copy"] = {
        f"{ti.task_id} {ti.rendered_map_index or ''}".strip(): str(ti.state) for ti in run.get_task_instances()
    }
    (here / "outcome").write_text(json.dumps(outcome))
"""


def run_dags(directory: Path, pipeline: PipelineUnderTest) -> dict[str, Any]:
    """Run the Dag above, two that its assets could trigger, and the provider's own, in a process.

    :returns: the results of the first and the last one, OpenLineage's events and the output.
    """
    pipeline.source(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE orders (id int PRIMARY KEY, body text)",
        "INSERT INTO orders SELECT i, 'order ' || i FROM generate_series(1, 1000) i",
    )
    pipeline.provision()
    (directory / "shop").mkdir()
    write_pipeline(directory / "shop", **{"pipeline: shop": f"pipeline: shop_{os.getpid()}"})
    shutil.copy(ROOT / "dags" / "cdc_pipeline.py", directory)  # a Dag has to be in Airflow's folder
    # The servers require no password, so any password shows where it ends up.
    databases = pipeline.databases
    source, sink = (dsn.replace("@", ":n0tTelling@") for dsn in (databases.pipeline_source, databases.pipeline_target))
    migrate_database()
    (directory / "run.py").write_text(RUN)
    for consumer, replaced, asset in (
        ("orders_report_dag.py", 'table_asset("shop", "shop.orders")', f'table_asset("{pipeline.name}", "public.t")'),
        ("city_report_dag.py", 'view_asset("shop"', f'view_asset("{pipeline.name}"'),
    ):
        text = (ROOT / "docs" / "examples" / consumer).read_text()
        (directory / consumer).write_text(text.replace(replaced, asset))
    lineage = directory / "lineage.jsonl"
    transport = {"type": "file", "log_file_path": str(lineage), "append": True}

    done = subprocess.run(
        [sys.executable, str(directory / "run.py")],
        env={
            **os.environ,
            "AIRFLOW__CORE__DAGS_FOLDER": str(directory),
            "AIRFLOW__API__BASE_URL": "http://airflow.example.com/air/",
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
            "AIRFLOW__OPENLINEAGE__EXECUTION_TIMEOUT": "120",  # on a busy machine an event takes longer than 10 s
            "PYTHONPATH": str(ROOT),
            "AIRFLOW_CONN_SHOP_PG": source,
            "AIRFLOW_CONN_WAREHOUSE_PG": sink,
            "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host="local[1]"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    emitted = [json.loads(line) for line in lineage.read_text().splitlines()]
    return json.loads((directory / "outcome").read_text()) | {
        "lineage": emitted,
        "output": done.stdout,
    }


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_what_runs_report_to_airflow(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"schema": "copy_of_{schema}"})
    name = pipeline.name

    outcome = run_dags(tmp_path, pipeline)

    # A task is retried only if its error permits it.
    assert outcome["tasks"] == {
        "refused": ["failed", 1],
        "asks": ["failed", 1],
        "waits": ["success", 2],
        "streamed": ["success", 1],
    }, outcome["output"]
    assert "a person must look at it first" in outcome["output"]
    # Every changed table and every moved view has an event with its watermark.
    assert {asset: (uri, extra) for asset, uri, extra in outcome["events"]} == {
        f"{name}/{changed}": (
            f"postgres-cdc://{name}/{quoted}",
            {"pipeline": name, "applied_lsn": "0/16B3748", **changes},
        )
        for changed, quoted, changes in (
            ("public.t", "public.t", {"changes": 5}),
            ("we ird.T", "we%20ird.T", {"changes": 2}),
            ("views/dwd.order_lines_wide", "views/dwd.order_lines_wide", {}),
        )
    }
    # And Dags that are scheduled by them can read the position of the copy and of the view.
    for what in ("copy of shop.orders", "view"):
        assert f"The {what} has all that the source had committed before 0/16B3748." in outcome["output"]
    # Lineage leads from source to target.
    completed = [
        event
        for event in outcome["lineage"]
        if event["eventType"] == "COMPLETE" and event["job"]["name"].endswith("streamed")
    ]
    assert len(completed) == 1, outcome["output"]
    (event,) = completed
    source, target = (dsn.rpartition("@")[2].rpartition("/")[0] for dsn in (databases.source, databases.target))
    assert [(data["namespace"], data["name"]) for data in event["inputs"]] == [
        (f"postgres://{source}", f"{name}.public.t")
    ]
    assert [(data["namespace"], data["name"]) for data in event["outputs"]] == [
        (f"postgres://{target}", f"{name}.copy_of_public.t")
    ]
    # Tasks link to their pipeline on the page; the one whose file is missing links to the page.
    page = "http://airflow.example.com/air/plugin/cdc"
    assert set(outcome["links"]) == {page, f"{page}?pipeline={name}"}
    # The provider's own Dag copies the tables of real servers.
    assert set(outcome["copy"].values()) == {"success"}, outcome["output"]
    assert "snapshot public.orders all rows, 1 chunk" in outcome["copy"]
    assert pipeline.target_rows("SELECT count(*), max(body) FROM orders") == [(1000, "order 999")]
    # Logs of the tasks; Airflow's database with rendered fields and XComs, and its files; state and checkpoint.
    assert "n0tTelling" not in outcome["output"]
    home = Path(os.environ["AIRFLOW_HOME"])
    shown = [path for place in (tmp_path, home) for path in place.rglob("*") if path.is_file()]
    assert home / "airflow.db" in shown
    assert [path for path in shown if b"n0tTelling" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("dsn", "named"),
    [
        ("postgresql://cdc:secret@db:5433/shop", ("postgres://db:5433", "shop.s.t")),
        ("postgresql://cdc@a:1,b:2/shop", ("postgres://a:1", "shop.s.t")),
        ("postgresql:///shop?host=%2Frun%2Fpg", ("postgres://localhost:5432", "shop.s.t")),
    ],
)
def test_a_table_is_named_as_openlineage_does(dsn: str, named: tuple[str, str]) -> None:
    assert dataset(dsn, "s", "t") == named


@pytest.mark.parametrize(
    ("error", "action", "reason"),
    [
        (SecondWriter("another run is alive", "Wait."), RetryAction.RETRY, "SecondWriter: another run is alive"),
        (Blocked("waited", "End it."), RetryAction.RETRY, "Blocked: waited"),
        (ServerNotReady("x", "Set y."), RetryAction.FAIL, "ServerNotReady, a retry cannot help: x. Set y."),
        (Fenced("x", "y."), RetryAction.FAIL, "Fenced, a retry cannot help: x. y."),
        (GateClosed("x", "y."), RetryAction.FAIL, "GateClosed, a person must look at it first: x. y."),
    ],
)
def test_engine_and_shells_are_judged_alike(error: CdcError, action: RetryAction, reason: str) -> None:
    with pytest.raises(Exception) as caught, airflow_failures():  # noqa: PT011
        raise error

    for each in (error, caught.value, pickle.loads(pickle.dumps(caught.value))):
        decision = CDC_RETRY_POLICY.evaluate(each, 1, 3)
        assert (decision.action, decision.reason) == (action, reason)
    assert isinstance(caught.value, AirflowFailException) is (action is RetryAction.FAIL)
    assert str(caught.value) == f"{error}.\n{error.solution}"


@pytest.mark.parametrize(
    ("solution", "dag"),
    [
        ("Run `airflow-cdc resnapshot --all`.", "the Dag `cdc_resnapshot` with Everything"),
        ("Stop, then run `airflow-cdc resnapshot --table 'a.b'`: so.", "the Dag `cdc_resnapshot` with Tables"),
        ("End it with `airflow-cdc stop`, then `airflow-cdc drop` it.", "the Dag `cdc_drop`"),
        ("Run `airflow-cdc resnapshot --all`, or the Dag cdc_resnapshot.", None),
        ("Start it with `airflow-cdc stream`.", None),
    ],
)
def test_a_remedy_names_the_dag_as_well_as_the_command(solution: str, dag: str | None) -> None:
    with pytest.raises(AirflowFailException) as caught, airflow_failures():
        raise GateClosed("the slot is gone", solution)

    expected = solution if dag is None else f"{solution} In Airflow, trigger {dag}."
    assert str(caught.value) == f"the slot is gone.\n{expected}"


def test_other_errors_are_left_to_airflow() -> None:
    wrapped = RuntimeError("x")
    wrapped.__cause__ = CdcTaskFailed("m", "s", Blocked.retry, "Blocked")

    assert CDC_RETRY_POLICY.evaluate(ValueError("x"), 1, 3).action is RetryAction.DEFAULT
    assert CDC_RETRY_POLICY.evaluate(wrapped, 1, 3).action is RetryAction.RETRY
    assert isinstance(CdcRetryPolicy.deserialize(CDC_RETRY_POLICY.serialize()), CdcRetryPolicy)


def test_an_asset_is_known_by_pipeline_and_table() -> None:
    assert table_asset("shop", "public.orders") == Asset(
        name="shop/public.orders", uri="postgres-cdc://shop/public.orders", group="airflow-cdc"
    )
