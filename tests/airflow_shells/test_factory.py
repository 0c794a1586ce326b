"""The task group and the factory: Dags built from a pipeline file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.airflow_support import ROOT

# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.models.taskinstance import TaskInstance
from airflow.sdk import DAG, Asset
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from airflow_cdc_provider import CDC_RETRY_POLICY, CdcTaskGroup
from airflow_cdc_provider.dag import stream_params

pytestmark = pytest.mark.airflow

# Neither the connections nor the variables are known where Dags are parsed.
PIPELINE = """
pipeline: shop
source: {dsn: "postgresql://cdc:${SHOP_PASSWORD}@db/shop", tables: [public.orders, "sales.*"]}
sink: {conn_id: dw_pg, mode: changelog, schema: "copy_${SITE}"}
state: "${CDC_STATE}/shop"
snapshot: {chunk_rows: "${CHUNK_ROWS}"}
"""


def bag_of(directory: Path, pipeline: str = PIPELINE, arguments: str = "") -> DagBag:
    """Return the Dags of a folder with a pipeline file and the three lines."""
    file = directory / "shop.yaml"
    file.write_text(pipeline)
    lines = ("from airflow_cdc_provider import cdc_dag", "", f"dag = cdc_dag({str(file)!r}{arguments})", "")
    (directory / "shop.py").write_text("\n".join(lines))
    return DagBag(str(directory))


def test_three_lines_make_a_dag(tmp_path: Path) -> None:
    bag = bag_of(tmp_path)

    assert bag.import_errors == {}
    dag = bag.dags["cdc_shop"]
    assert dag.tags == {"cdc", "cdc:shop"}
    assert "* `sales.*`" in (dag.doc_md or "")
    assert (dag.max_active_runs, dag.catchup, dag.fileloc) == (1, False, str(tmp_path / "shop.py"))
    assert [task.task_id for task in dag.tasks] == ["preflight", "provision", "plan", "prepare", "snapshot", "stream"]
    assert {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks}["snapshot"] == ["stream"]
    assert dag.task_group.get_task_group_dict().keys() == {None}  # Airflow would show them collapsed
    dag.params.validate()
    DagSerialization.from_dict(DagSerialization.to_dict(dag))


def test_a_relative_path_is_one_next_to_the_dag(tmp_path: Path) -> None:
    """Each version of a Dag bundle has its own folder, from which each process reads Dag and pipeline file."""
    dag = """
from airflow.sdk import DAG, Param
from airflow_cdc_provider import CdcTaskGroup, cdc_dag

own = cdc_dag("pipelines/shop.yaml")
with DAG("group", params={"file": Param("/x.yaml")}):
    CdcTaskGroup("near", pipeline="pipelines/shop.yaml")
    CdcTaskGroup("asked", pipeline="{{ params.file }}")
"""
    asked = "{{ params.file }}"
    for version in ("1", "2"):
        folder = tmp_path / version
        (folder / "pipelines").mkdir(parents=True)
        (folder / "pipelines" / "shop.yaml").write_text(PIPELINE)
        (folder / "dag.py").write_text(dag)
        bag = DagBag(str(folder))

        assert bag.import_errors == {}
        file = str(folder / "pipelines" / "shop.yaml")
        for dag_id, group, path in (("cdc_shop", "", file), ("group", "near.", file), ("group", "asked.", asked)):
            tasks = [task for task in bag.dags[dag_id].tasks if task.task_id.startswith(group)]
            given = [task.partial_kwargs if task.is_mapped else vars(task) for task in tasks]
            assert {values["pipeline"] for values in given if "pipeline" in values} == {path}


def test_the_examples_load(tmp_path: Path) -> None:
    examples = ROOT / "docs" / "examples"
    found = set()
    for path in examples.glob("*_dag.py"):
        file = tmp_path / path.name
        file.write_text(path.read_text().replace("/opt/airflow/pipelines", str(examples)))
        bag = DagBag(str(file))
        assert bag.import_errors == {}
        found |= set(bag.dags)

    alerts = {"shop_lag", "shop_slots", "shop_verify"}
    assert found == {"cdc_shop", "city_report", "orders_report", *alerts}


def test_what_the_caller_says_wins(tmp_path: Path) -> None:
    arguments = ", schedule='@hourly', until='stopped', groups=8, pool='shop_db', dag_id='mine', default_args={}"
    bag = bag_of(tmp_path, arguments=arguments)

    assert bag.import_errors == {}
    dag = bag.dags["mine"]
    assert dag.timetable.can_be_scheduled
    assert {name: dag.params[name] for name in dag.params} == {"until": "forever", "until_lsn": None, "groups": 8}
    pools = {task.task_id: task.pool for task in dag.tasks}
    assert pools.pop("snapshot") == "shop_db"
    assert set(pools.values()) == {"default_pool"}
    for name, bad in (("until", "soon"), ("groups", 0)):
        with pytest.raises(ParamValidationError):
            dag.params.get_param(name).resolve(bad)


@pytest.mark.parametrize(
    ("until", "field", "position"),
    [("caught_up", "caught up", None), ("stopped", "forever", None), ("lsn:0/16b3748", "caught up", "0/16B3748")],
)
def test_the_form_is_one_open_section_with_a_choice_of_ends(until: str, field: str, position: str | None) -> None:
    params = ParamsDict(stream_params(until))

    assert (params["until"], params["until_lsn"]) == (field, position)
    assert not any("section" in params.get_param(name).schema for name in params)
    assert params.get_param("until").schema["enum"] == ["caught up", "forever"]
    params.validate()


def test_an_end_that_is_none_is_an_import_error(tmp_path: Path) -> None:
    (error,) = bag_of(tmp_path, arguments=", until='noon'").import_errors.values()

    assert "--until 'noon' is not valid" in error
    assert "Give `forever`, `caught-up`" in error


@pytest.mark.parametrize(
    ("pipeline", "message", "solution"),
    [
        ("pipeline: [", "is not YAML at line 1", "Correct the file"),
        (PIPELINE.replace("mode: changelog", "mode: mirrored"), "sink.mode: 'mirrored' is not valid", "Give one of"),
        (PIPELINE.replace("conn_id: dw_pg, ", ""), "sink.dsn is missing", "Add the key `sink.dsn`, or `sink.conn_id`."),
        (PIPELINE.replace("pipeline: shop", 'pipeline: "${SITE}"'), "variable SITE, which is not set", "Set SITE"),
    ],
)
def test_a_broken_file_is_an_import_error_in_the_engines_words(
    tmp_path: Path, pipeline: str, message: str, solution: str
) -> None:
    (error,) = bag_of(tmp_path, pipeline).import_errors.values()

    assert message in error
    assert solution in error


def test_a_dag_may_have_several_groups() -> None:
    with DAG("two", schedule=None, default_args={"on_success_callback": print, "outlets": [Asset("a")]}) as dag:
        shop = CdcTaskGroup("shop", pipeline="/shop.yaml", pool="shop_db")
        crm = CdcTaskGroup("crm", pipeline="/crm.yaml", until="0/16B3748", conf={"spark.executor.cores": "2"})
        shop >> crm

    rows = [dag.get_task(f"crm.{step}") for step in ("preflight", "provision", "plan")]
    assert not any(TaskInstance.is_task_schedulable(row) for row in rows)  # they need no process
    assert dag.get_task("shop.stream").downstream_task_ids == {"crm.prepare"}
    stream = vars(dag.get_task("crm.stream"))
    snapshot = dag.get_task("crm.snapshot").partial_kwargs
    assert snapshot["epoch"] == "{{ ti.xcom_pull(task_ids='crm.prepare', key='provision')['epoch'] }}"
    assert snapshot["map_index_template"] == "{{ task.group['label'] }}"
    assert stream["epoch"] is None
    assert (stream["until"], stream["conf"]) == ("0/16B3748", {"spark.executor.cores": "2"})
    assert stream["retry_policy"] is CDC_RETRY_POLICY


def test_a_mapped_task_has_the_retry_policy_when_it_runs() -> None:
    with DAG("mapped", schedule=None) as dag:
        CdcTaskGroup(prefix_group_id=False, pipeline="/shop.yaml")

    task = dag.get_task("snapshot").unmap({"group": "0/1"})

    assert task.retry_policy is CDC_RETRY_POLICY
    assert task.operator_extra_links
