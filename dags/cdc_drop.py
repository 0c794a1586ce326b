"""Removes a pipeline, once somebody has approved it."""

from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_cdc_provider.dag import pipeline_param
from airflow_cdc_provider.operators.approval import CdcApprovalOperator
from airflow_cdc_provider.operators.drop import CdcDropOperator

with DAG(
    dag_id="cdc_drop",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["cdc", "postgres"],
    doc_md="""
### End of a pipeline

Removes its slot, publication, state, the record in the sink and all staging; never target tables. Somebody has to
approve it in the required actions, which say what is there. Stop the stream before.
""",
    params={
        **pipeline_param(),
        "approve": Param(
            True,
            type="boolean",
            title="Ask before",
            description="Switch it off only where the run is started by automation that has asked already.",
        ),
    },
):
    approve = CdcApprovalOperator(
        task_id="approve", pipeline="{{ params.pipeline }}", action="drop", required="{{ params.approve }}"
    )
    approve >> CdcDropOperator(task_id="drop", pipeline="{{ params.pipeline }}")
