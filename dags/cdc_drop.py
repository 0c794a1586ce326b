"""Removes a pipeline after a user has approved it."""

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
### Drop a pipeline

Removes the slot, the publication, the state, the commit record and everything staged; never target tables. Stop the
stream first. A user must approve the run under required actions, which list what will be removed.
""",
    params={
        **pipeline_param(),
        "approve": Param(
            True,
            type="boolean",
            title="Ask for approval",
            description="Switch off only if the automation that starts the run has already asked.",
        ),
    },
):
    approve = CdcApprovalOperator(
        task_id="approve", pipeline="{{ params.pipeline }}", action="drop", required="{{ params.approve }}"
    )
    approve >> CdcDropOperator(task_id="drop", pipeline="{{ params.pipeline }}")
