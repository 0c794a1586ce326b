"""Reads tables or some of their rows again while the stream runs, or all tables with a new slot."""

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
### Read tables again

* **Tables**, whole or only rows that match a condition. A running stream reads them between two units; without a
  stream, the task reads them. Use this also to add a table after you have added it to the pipeline file.
* **Everything**: the repair for a lost slot. Recreates publication and slot. Spark jobs copy all tables; each is
  replaced in one transaction. A user must approve it under required actions. Stop the stream first, and start it again
  (`cdc_pipeline`) afterwards.
""",
    params={
        **pipeline_param(),
        "everything": Param(
            False,
            type="boolean",
            title="Everything, with a new slot",
            description="The repair for a lost slot. Ignores tables and condition.",
        ),
        "tables": Param(
            [],
            type="array",
            items={"type": "string", "pattern": r"^[^.]+\..+$"},
            uniqueItems=True,
            title="Tables",
            description="As schema.table, one per line; empty for all tables of the pipeline, one after the other.",
        ),
        "where": Param(
            None,
            type=["null", "string"],
            title="Condition",
            description="An SQL condition such as id < 1000. Only rows that match it on either side are read again.",
        ),
        "approve": Param(
            True,
            type="boolean",
            title="Ask for approval to read everything again",
            description="Switch off only if the automation that starts the run has already asked.",
        ),
        "groups": Param(
            2,
            type="integer",
            minimum=1,
            maximum=32,
            title="Snapshot groups",
            description="Maximum number of Spark jobs that copy at the same time when everything is read again.",
        ),
    },
):

    @task.branch
    def choose(everything: str) -> str:
        """Return the task to run: re-read tables, or everything after approval."""
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
