"""The Dags that come with the provider."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.airflow_support import ROOT

# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

pytestmark = pytest.mark.airflow


@pytest.fixture(scope="module")
def dag() -> DAG:
    bag = DagBag(str(ROOT / "dags"))
    assert bag.import_errors == {}
    loaded: DAG = bag.dags["cdc_pipeline"]
    return loaded


def test_every_dag_loads_and_can_be_stored() -> None:
    bag = DagBag(str(ROOT / "dags"))

    assert bag.import_errors == {}
    for dag in bag.dags.values():
        assert dag.doc_md
        assert dag.tags
        DagSerialization.from_dict(DagSerialization.to_dict(dag))


def test_the_example_of_many_pipelines_has_a_dag_for_each_file(tmp_path: Path) -> None:
    shop = (ROOT / "docs" / "examples" / "shop.yaml").read_text(encoding="utf-8")
    for name in ("shop", "stock"):
        (tmp_path / f"{name}.yaml").write_text(shop.replace("pipeline: shop", f"pipeline: {name}"), encoding="utf-8")
    example = (ROOT / "docs" / "examples" / "pipelines_dag.py").read_text(encoding="utf-8")
    (tmp_path / "pipelines_dag.py").write_text(
        example.replace("/opt/airflow/pipelines", str(tmp_path)), encoding="utf-8"
    )

    bag = DagBag(str(tmp_path))

    assert bag.import_errors == {}
    assert sorted(bag.dags) == ["cdc_shop", "cdc_stock"]


def test_reading_the_dags_loads_nothing_heavy() -> None:
    """Searching for providers does not load Airflow or more modules of this package either."""
    code = f"""
import sys, time
clean = set(sys.modules)
import airflow_cdc_provider.get_provider_info
ours = {{name for name in set(sys.modules) - clean if name.startswith(("airflow.", "airflow_cdc_provider."))}}
assert ours == {{"airflow_cdc_provider.get_provider_info"}}, ours
import tests.support.airflow_support
from airflow.sdk import DAG, BaseHook, BaseOperator, BaseSensorOperator
from airflow.dag_processing.dagbag import DagBag
before, start = set(sys.modules), time.process_time()
assert DagBag({str(ROOT / "dags")!r}).import_errors == {{}}
assert time.process_time() - start < 1, time.process_time() - start
from airflow_cdc_provider import cdc_dag
cdc_dag({str(ROOT / "docs" / "examples" / "shop.yaml")!r})
heavy = {{"pyspark", "psycopg2", "psycopg", "pyarrow", "numpy", "adbc_driver_postgresql"}}
assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_scheduler_triggerer_and_api_server_need_no_spark() -> None:
    """Only workers need it; a sink whose record is in Delta Lake needs it in the triggerer, too."""
    code = f"""
import sys
sys.modules["pyspark"] = None  # cannot be imported
import tests.support.airflow_support
from importlib import import_module
from pkgutil import walk_packages
import airflow_cdc_provider
for found in walk_packages(airflow_cdc_provider.__path__, "airflow_cdc_provider."):
    if ".engine." not in found.name:
        import_module(found.name)
from airflow.dag_processing.dagbag import DagBag
assert DagBag({str(ROOT / "dags")!r}).import_errors == {{}}
from airflow_cdc_provider.engine.commands.wait_conditions import create_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.plugins.cdc import CdcPlugin
from airflow_cdc_provider.triggers.readers import RecordReader
assert CdcPlugin().fastapi_apps
create_condition("lag", {{"below_bytes": "64MiB", "below_seconds": None}})
unreachable = {{"dsn": "postgresql://u@127.0.0.1:1/d"}}
document = {{"pipeline": "p", "source": {{**unreachable, "tables": ["a.b"]}}, "sink": unreachable, "state": "file:///s"}}
try:
    RecordReader(Pipeline.parse(document)).read()
except Exception as e:
    assert type(e).__name__ == "ConnectionFailed", repr(e)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_steps_follow_each_other(dag: DAG) -> None:
    edges = {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks}

    assert edges == {
        "prepare": ["plan", "preflight", "provision", "snapshot"],
        "preflight": ["stream"],
        "provision": ["stream"],
        "plan": ["stream"],
        "snapshot": ["slot_progress", "stream"],
        "stream": ["verify"],
        "slot_progress": [],
        "verify": [],
    }
    assert dag.get_task("snapshot").is_mapped
    assert vars(dag.get_task("slot_progress"))["mode"] == "reschedule"


def test_a_run_needs_neither_schedule_nor_company(dag: DAG) -> None:
    assert not dag.timetable.can_be_scheduled
    assert dag.max_active_runs == 1
    assert not dag.catchup


@pytest.mark.parametrize("until", ["caught up", "caught-up", "forever", "stopped", "0/16B3748", "lsn:FF/FFFFFFFF"])
def test_good_params_are_accepted(dag: DAG, until: str) -> None:
    assert dag.params.get_param("until").resolve(until) == until


def test_every_param_is_described_and_has_a_good_default(dag: DAG) -> None:
    dag.params.validate()

    assert set(dag.params) == {"pipeline", "until", "until_lsn", "groups"}
    assert all(dag.params.get_param(name).description for name in dag.params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("until", "16B3748"),
        ("until", "0/16B3748G"),
        ("until", "0/123456789"),
        ("until", "caught-up; rm"),
        ("until", None),
        ("until_lsn", "caught up"),
        ("groups", 0),
        ("groups", 33),
        ("groups", "2"),
        ("pipeline", ""),
    ],
)
def test_bad_params_are_refused(dag: DAG, name: str, value: object) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param(name).resolve(value)
