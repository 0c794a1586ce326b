"""The Dags that come with the provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest

from tests.support.airflow_support import ROOT, connection_json, migrate_database, write_pipeline

# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from tests.conftest import Databases

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


def test_reading_the_dags_loads_nothing_heavy() -> None:
    """And looking for providers loads neither Airflow nor more of this package."""
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


def test_the_steps_follow_each_other(dag: DAG) -> None:
    edges = {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks}

    assert edges == {
        "preflight": ["provision"],
        "provision": ["plan"],
        "plan": ["snapshot"],
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


def task_environment(dags: Path) -> dict[str, str]:
    """The variables of a process that runs a Dag; ``dag.test()`` insists on finding it in Airflow's folder."""
    return {
        **os.environ,
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "PYTHONPATH": str(ROOT),
        "AIRFLOW_CONN_SHOP_PG": "postgresql://cdc@db/shop",
        "AIRFLOW_CONN_WAREHOUSE_PG": "postgresql://cdc@dw/dw",
        "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host="local[1]"),
    }


REAL_RUN = """
import json, sys
from pathlib import Path
import tests.support.airflow_support
# isort: split
from airflow.dag_processing.dagbag import DagBag

here = Path(__file__).parent

if __name__ == "__main__":
    dag = DagBag(sys.argv[1]).dags["cdc_pipeline"]
    conf = {"pipeline": sys.argv[2]}
    run = dag.test(logical_date=None, run_conf=conf, mark_success_pattern=sys.argv[3] or None)
    outcome = {
        f"{instance.task_id} {instance.rendered_map_index or ''}".strip(): str(instance.state)
        for instance in run.get_task_instances()
    }
    (here / "outcome").write_text(json.dumps(outcome))
"""


def run_dag(
    directory: Path, pipeline: Path, left_out: str = "", connections: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    """Run the Dag in a process of its own; the state of every task, and what was printed.

    :param left_out: a pattern of tasks.
    """
    (directory / "run.py").write_text(REAL_RUN)
    dags = ROOT / "dags"
    done = subprocess.run(
        [sys.executable, str(directory / "run.py"), str(dags), str(pipeline), left_out],
        env=task_environment(dags) | dict(connections or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((directory / "outcome").read_text()), done.stdout


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_run_copies_the_tables_of_real_servers(databases: Databases, tmp_path: Path) -> None:
    migrate_database()
    with psycopg.connect(databases.source) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, body text)")
        connection.execute("INSERT INTO orders SELECT i, 'order ' || i FROM generate_series(1, 1000) i")
    file = write_pipeline(tmp_path, **{"pipeline: shop": f"pipeline: shop_{os.getpid()}"})
    # The servers ask for no password, so any will do to see where it goes.
    dsns = (dsn.replace("@", ":n0tTelling@") for dsn in (databases.pipeline_source, databases.pipeline_target))
    connections = dict(zip(("AIRFLOW_CONN_SHOP_PG", "AIRFLOW_CONN_WAREHOUSE_PG"), dsns, strict=True))

    # The tests with a whole Airflow have the steps that follow the snapshot.
    outcome, printed = run_dag(tmp_path, file, "stream|slot_progress|verify", connections)

    assert set(outcome.values()) == {"success"}, printed
    assert "snapshot public.orders all rows, 1 chunk" in outcome
    with psycopg.connect(databases.target) as connection:
        assert connection.execute("SELECT count(*), max(body) FROM orders").fetchone() == (1000, "order 999")
    # Logs of the tasks; Airflow's database with rendered fields and XComs, and its files; state and checkpoint.
    assert "n0tTelling" not in printed
    home = Path(os.environ["AIRFLOW_HOME"])
    shown = [path for place in (tmp_path, home) for path in place.rglob("*") if path.is_file()]
    assert home / "airflow.db" in shown
    assert [path for path in shown if b"n0tTelling" in path.read_bytes()] == []
