"""What Airflow learns of a task beside its state: retries, assets, lineage, links. In one real run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow_support import ROOT, migrate_database

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
from airflow_cdc_provider.assets import CHANGED_TABLES, announce_changes
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
    (here / "outcome").write_text(json.dumps(outcome))
    DagBag(str(here / "orders_report_dag.py")).dags["orders_report"].test(logical_date=None)
"""


def run_dag(directory: Path, pipeline: PipelineUnderTest) -> dict[str, Any]:
    """What is left by a run of the Dag above, with OpenLineage's events."""
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline.provision()
    migrate_database()
    (directory / "run.py").write_text(RUN)
    consumer = (ROOT / "docs" / "examples" / "orders_report_dag.py").read_text()
    consumer = consumer.replace('table_asset("shop", "shop.orders")', f'table_asset("{pipeline.name}", "public.t")')
    (directory / "orders_report_dag.py").write_text(consumer)
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


def test_a_run_tells_airflow_of_retries_assets_lineage_and_links(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"schema": "copy_of_{schema}"})
    name = pipeline.name

    outcome = run_dag(tmp_path, pipeline)

    # A task is tried again only if its error says so.
    assert outcome["tasks"] == {
        "refused": ["failed", 1],
        "asks": ["failed", 1],
        "waits": ["success", 2],
        "streamed": ["success", 1],
    }, outcome["output"]
    assert "a person has to look first" in outcome["output"]
    # Every changed table has an event with its watermark.
    assert {asset: (uri, extra) for asset, uri, extra in outcome["events"]} == {
        f"{name}/{table}": (
            f"postgres-cdc://{name}/{quoted}",
            {"pipeline": name, "applied_lsn": "0/16B3748", "changes": changes},
        )
        for table, quoted, changes in (("public.t", "public.t", 5), ("we ird.T", "we%20ird.T", 2))
    }
    # And a Dag that is scheduled by it can tell how far the copy is.
    assert "has all that the source had committed before 0/16B3748." in outcome["output"]
    # Lineage leads from source to target.
    (event,) = (
        event
        for event in outcome["lineage"]
        if event["eventType"] == "COMPLETE" and event["job"]["name"].endswith("streamed")
    )
    source, target = (dsn.rpartition("@")[2].rpartition("/")[0] for dsn in (databases.source, databases.target))
    assert [(data["namespace"], data["name"]) for data in event["inputs"]] == [
        (f"postgres://{source}", f"{name}.public.t")
    ]
    assert [(data["namespace"], data["name"]) for data in event["outputs"]] == [
        (f"postgres://{target}", f"{name}.copy_of_public.t")
    ]
    # Tasks lead to their pipeline on the page; the one whose file is missing, to the page.
    page = "http://airflow.example.com/air/plugin/cdc"
    assert set(outcome["links"]) == {page, f"{page}?pipeline={name}"}


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
        (ServerNotReady("x", "Set y."), RetryAction.FAIL, "ServerNotReady, trying again cannot help: x. Set y."),
        (Fenced("x", "y."), RetryAction.FAIL, "Fenced, trying again cannot help: x. y."),
        (GateClosed("x", "y."), RetryAction.FAIL, "GateClosed, a person has to look first: x. y."),
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
