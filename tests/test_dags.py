"""The Dags that come with the provider, and tasks that are killed while their Spark job runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.airflow_support import ROOT, connection_json, migrate_database, write_pipeline

# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from airflow_cdc_provider.demo.servers import await_condition
from tests.conftest import Databases

pytestmark = pytest.mark.airflow

# A stream that does not want to end: driver and Python worker ignore SIGTERM, and the JVM waits for them.
STUBBORN = """
import os, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession

here = Path(__file__).parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def work(batches):
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / "worker.pid").write_text(str(os.getpid()))
    time.sleep(600)
    yield from batches

spark = SparkSession.builder.getOrCreate()
while True:
    try:
        spark.range(1).mapInArrow(work, "id long").collect()
    except Exception:
        time.sleep(600)
"""

# A stream that ends its unit with the help of Spark when it is asked to.
POLITE = """
import os, signal, sys, threading
from pathlib import Path
from pyspark.sql import SparkSession

here = Path(__file__).parent
spark = SparkSession.builder.getOrCreate()
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
spark.range(3).count()  # the first takes seconds
(here / "worker.pid").write_text(str(os.getpid()))
asked.wait()
assert spark.range(3).count() == 3
spark.stop()
(here / "ended-in-peace").touch()
"""

TASK = """
from pathlib import Path
from tests.airflow_support import install_commands
# isort: split
from airflow.sdk import DAG
from airflow_cdc_provider.operators.cdc import CdcStreamOperator

here = Path(__file__).parent
install_commands()
with DAG("killed", schedule=None) as dag:
    CdcStreamOperator(
        task_id="stream", pipeline=str(here / "shop.yaml"), epoch=7, application=str(here / "application.py")
    )

if __name__ == "__main__":
    run = dag.test(logical_date=None)
    (instance,) = run.get_task_instances()
    (here / "outcome").write_text(str(instance.state))
"""

PIPELINE_TASKS = """
import json, sys
from pathlib import Path
from tests.airflow_support import install_commands
# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow_cdc_provider.sensors.slot import SlotState

here = Path(__file__).parent
chunks = int(sys.argv[1])
install_commands(
    preflight=lambda p: {"findings": []},
    provision=lambda p, takeover: {"epoch": 7, "applied_lsn": "0/2", "tables": [], "chunks": 3,
                                   "restart_lsn": "0/1", "confirmed_flush_lsn": "0/2"},
    unfinished=lambda p: [{"table": "public.orders", "index": i, "title": str(i)} for i in range(chunks)],
    verify=lambda p: {"equal": True, "tables": []},
)
SlotState.read = classmethod(lambda cls, dsn, name: cls(name, "0/9", "0/9", "reserved", None, 0))

if __name__ == "__main__":
    dag = DagBag(sys.argv[2]).dags["cdc_pipeline"]
    for name in ("snapshot", "stream"):
        task = dag.get_task(name)
        kwargs = task.partial_kwargs if name == "snapshot" else vars(task)
        kwargs["application"] = str(here / "application.py")
    run = dag.test(logical_date=None, run_conf={"pipeline": str(here / "shop.yaml"), "groups": 2})
    outcome = {
        f"{instance.task_id}[{instance.map_index}]": [str(instance.state), instance.rendered_map_index]
        for instance in run.get_task_instances()
    }
    (here / "outcome").write_text(json.dumps({"state": str(run.state), "tasks": outcome}))
"""

ARGUMENTS = """
import sys
from pathlib import Path

with (Path(__file__).parent / "arguments").open("a") as file:
    print(*sys.argv[1:], file=file)
"""


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
    code = f"""
import sys, time
import tests.airflow_support
from airflow.sdk import DAG, BaseHook, BaseOperator, BaseSensorOperator
from airflow.dag_processing.dagbag import DagBag
before, start = set(sys.modules), time.process_time()
assert DagBag({str(ROOT / "dags")!r}).import_errors == {{}}
assert time.process_time() - start < 1, time.process_time() - start
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


@pytest.mark.parametrize("until", ["caught-up", "stopped", "0/16B3748", "lsn:FF/FFFFFFFF"])
def test_good_params_are_accepted(dag: DAG, until: str) -> None:
    assert dag.params.get_param("until").resolve(until) == until


def test_every_param_is_described_and_has_a_good_default(dag: DAG) -> None:
    dag.params.validate()

    assert set(dag.params) == {"pipeline", "until", "groups"}
    assert all(dag.params.get_param(name).description for name in dag.params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("until", "16B3748"),
        ("until", "0/16B3748G"),
        ("until", "0/123456789"),
        ("until", "caught-up; rm"),
        ("until", None),
        ("groups", 0),
        ("groups", 33),
        ("groups", "2"),
        ("pipeline", ""),
    ],
)
def test_bad_params_are_refused(dag: DAG, name: str, value: object) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param(name).resolve(value)


class Task:
    """A process that runs a Dag with ``dag.test()``, whose Spark job is a stand-in."""

    def __init__(self, directory: Path, application: str) -> None:
        self.directory = directory
        (directory / "application.py").write_text(application)
        (directory / "task.py").write_text(TASK)
        write_pipeline(directory)
        self.log = (directory / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(directory / "task.py")],
            env=task_environment(directory),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def await_job(self) -> set[psutil.Process]:
        """Wait for the job's last process and return all that run, the task's own included."""
        started = (self.directory / "worker.pid").exists
        await_condition(lambda: started() or self.process.poll() is not None, seconds=120, interval=0.2)
        assert started(), (self.directory / "log").read_text()
        own = psutil.Process(self.process.pid)
        return {own, *own.children(recursive=True)}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


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


def living(processes: set[psutil.Process]) -> list[Any]:
    """The command lines of those that live."""
    return [p.cmdline() for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def task(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Task]:
    migrate_database()
    task = Task(tmp_path, request.param)
    yield task
    task.close()


@pytest.mark.spark
@pytest.mark.parametrize("task", [STUBBORN], indirect=True)
def test_a_task_that_is_asked_to_end_leaves_no_process(task: Task) -> None:
    processes = task.await_job()
    started = time.monotonic()

    task.process.send_signal(signal.SIGTERM)

    job = {process for process in processes if process.pid != task.process.pid}
    assert await_condition(lambda: not living(job), seconds=5), living(job)
    assert time.monotonic() - started < 5
    assert len(job) >= 4  # the guard, the JVM, the driver, the worker
    assert task.process.wait(60) == 0
    assert (task.directory / "outcome").read_text() in ("failed", "up_for_retry")


@pytest.mark.spark
@pytest.mark.parametrize("task", [POLITE], indirect=True)
def test_a_stream_is_given_time_to_end_its_unit_and_is_not_a_success(task: Task) -> None:
    processes = task.await_job()

    task.process.send_signal(signal.SIGTERM)

    job = {process for process in processes if process.pid != task.process.pid}
    assert await_condition(lambda: not living(job), seconds=5), living(job)
    assert (task.directory / "ended-in-peace").exists(), (task.directory / "log").read_text()
    assert task.process.wait(60) == 0
    assert (task.directory / "outcome").read_text() in ("failed", "up_for_retry")


@pytest.mark.spark
@pytest.mark.parametrize("task", [STUBBORN], indirect=True)
def test_a_task_that_is_killed_leaves_no_process(task: Task) -> None:
    processes = task.await_job()

    task.process.kill()
    task.process.wait()

    assert await_condition(lambda: not living(processes), seconds=10), living(processes)


@pytest.mark.spark
@pytest.mark.parametrize(("chunks", "groups"), [(3, ["0/2", "1/2"]), (0, [])])
def test_a_run_goes_through_all_steps(tmp_path: Path, chunks: int, groups: list[str]) -> None:
    migrate_database()
    write_pipeline(tmp_path)
    (tmp_path / "application.py").write_text(ARGUMENTS)
    (tmp_path / "run.py").write_text(PIPELINE_TASKS)

    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(chunks), str(ROOT / "dags")],
        env=task_environment(ROOT / "dags"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "outcome").read_text())
    tasks = outcome["tasks"]
    assert outcome["state"] == "success"
    mapped: dict[str, list[str | None]] = {
        f"snapshot[{i}]": ["success", f"group {group}"] for i, group in enumerate(groups)
    }
    assert {name: tasks.pop(name) for name in list(tasks) if name.startswith("snapshot")} == (
        mapped or {"snapshot[-1]": ["skipped", None]}
    )
    assert {state for state, _ in tasks.values()} == {"success"}
    assert len(tasks) == 6
    common = f"--pipeline {tmp_path}/shop.yaml --epoch 7 --json"
    # dag.test() runs mapped tasks in any order.
    assert sorted((tmp_path / "arguments").read_text().splitlines()) == [
        *(f"snapshot {common} --group {group}" for group in groups),
        f"stream {common} --until caught-up",
    ]


REAL_RUN = """
import json, sys
from pathlib import Path
import tests.airflow_support
# isort: split
from airflow.dag_processing.dagbag import DagBag

here = Path(__file__).parent

if __name__ == "__main__":
    dag = DagBag(sys.argv[1]).dags["cdc_pipeline"]
    run = dag.test(logical_date=None, run_conf={"pipeline": str(here / "shop.yaml")})
    outcome = {instance.task_id: str(instance.state) for instance in run.get_task_instances()}
    (here / "outcome").write_text(json.dumps(outcome))
"""


@pytest.mark.spark
def test_a_run_copies_the_tables_of_real_servers(databases: Databases, tmp_path: Path) -> None:
    migrate_database()
    with psycopg.connect(databases.source) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, body text)")
        connection.execute("INSERT INTO orders SELECT i, 'order ' || i FROM generate_series(1, 1000) i")
    write_pipeline(tmp_path, **{"pipeline: shop": f"pipeline: shop_{os.getpid()}"})
    (tmp_path / "run.py").write_text(REAL_RUN)
    # The servers ask for no password, so any will do to see where it goes.
    dsns = (dsn.replace("@", ":n0tTelling@") for dsn in (databases.pipeline_source, databases.pipeline_target))
    connections = dict(zip(("AIRFLOW_CONN_SHOP_PG", "AIRFLOW_CONN_WAREHOUSE_PG"), dsns, strict=True))

    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(ROOT / "dags")],
        env=task_environment(ROOT / "dags") | connections,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    outcome = json.loads((tmp_path / "outcome").read_text())
    assert set(outcome.values()) == {"success"}, done.stdout
    with psycopg.connect(databases.target) as connection:
        assert connection.execute("SELECT count(*), max(body) FROM orders").fetchone() == (1000, "order 999")
    # Logs of the tasks; Airflow's database with rendered fields and XComs, and its files; state and checkpoint.
    assert "n0tTelling" not in done.stdout
    home = Path(os.environ["AIRFLOW_HOME"])
    shown = [path for place in (tmp_path, home) for path in place.rglob("*") if path.is_file()]
    assert home / "airflow.db" in shown
    assert [path for path in shown if b"n0tTelling" in path.read_bytes()] == []
