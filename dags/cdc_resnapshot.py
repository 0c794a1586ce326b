"""Reads tables again: some of them or some of their rows beside the stream, or all of them with a new slot."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param, task

from airflow_cdc_provider.dag import pipeline_param
from airflow_cdc_provider.operators.approval import CdcApprovalOperator
from airflow_cdc_provider.operators.resnapshot import CdcResnapshotOperator
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator

PIPELINE = "{{ params.pipeline }}"

with DAG(
    dag_id="cdc_resnapshot",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["cdc", "postgres", "spark"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Tables read again

* **Tables**, whole or as far as a condition says: the running stream reads them between two units, or the task itself
  where none runs. This is also how a table joins that the pipeline file has gained.
* **Everything**: the repair for a lost slot. Publication and slot are made anew, and all tables are copied by Spark
  jobs; each is replaced in one transaction. Somebody has to approve it in the required actions. Stop the stream before;
  start it again (`cdc_pipeline`) afterwards.
""",
    params={
        **pipeline_param(),
        "everything": Param(
            False,
            type="boolean",
            title="Everything, with a new slot",
            description="The repair for a lost slot; the fields below are not looked at.",
        ),
        "tables": Param(
            [],
            type="array",
            items={"type": "string", "pattern": r"^[^.]+\..+$"},
            uniqueItems=True,
            title="Tables",
            description="As schema.table, one a line; none for all tables of the pipeline, one after the other.",
        ),
        "where": Param(
            None,
            type=["null", "string"],
            title="Condition",
            description="An SQL condition such as id < 1000: only rows that match it on either side are read again.",
        ),
        "approve": Param(
            True,
            type="boolean",
            title="Ask before everything is read again",
            description="Switch it off only where the run is started by automation that has asked already.",
        ),
        "groups": Param(
            2,
            type="integer",
            minimum=1,
            maximum=32,
            title="Snapshot groups",
            description="How many Spark jobs copy at the same time, at most, when everything is read again.",
        ),
    },
):

    @task.branch
    def choose(everything: str) -> str:
        """Which of the two is asked for."""
        return "approve" if everything == "True" else "resnapshot"

    resnapshot = CdcResnapshotOperator(
        task_id="resnapshot",
        pipeline=PIPELINE,
        tables="{{ params.tables | tojson }}",
        rows="{{ 'where' if params.where else 'all' }}",
        where="{{ params.where or '' }}",
        execution_timeout=timedelta(hours=24),
    )
    approve = CdcApprovalOperator(
        task_id="approve", pipeline=PIPELINE, action="resnapshot", required="{{ params.approve }}"
    )
    start_over = CdcResnapshotOperator(task_id="start_over", pipeline=PIPELINE, everything=True)
    plan = CdcPlanOperator(task_id="plan", pipeline=PIPELINE, groups="{{ params.groups }}")
    snapshot = CdcSnapshotOperator.partial(
        task_id="snapshot",
        pipeline=PIPELINE,
        epoch="{{ ti.xcom_pull(task_ids='start_over')['epoch'] }}",
        map_index_template="{{ task.group['label'] }}",
    ).expand(group=plan.output)

    choose("{{ params.everything }}") >> [resnapshot, approve]
    approve >> start_over >> plan >> snapshot
