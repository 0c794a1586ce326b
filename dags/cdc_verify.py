"""Compares source and sink every night."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG

from airflow_cdc_provider.dag import pipeline_param
from airflow_cdc_provider.operators.pipeline import CdcVerifyOperator

with DAG(
    dag_id="cdc_verify",
    schedule=os.environ.get("AIRFLOW_CDC_VERIFY_SCHEDULE", "@daily"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["cdc", "postgres"],
    default_args={"retries": 2, "retry_delay": timedelta(minutes=5)},
    doc_md="""
### Compare source and sink

Compares every row of a pipeline's tables, also while the stream runs. If rows differ, the task fails and shows the
first differences; repair them with `cdc_backfill` or `cdc_resnapshot`. Both servers read all tables once, and the task
occupies its worker during that time.
""",
    params=pipeline_param(),
):
    CdcVerifyOperator(task_id="verify", pipeline="{{ params.pipeline }}")
