"""Copies the tables of a pipeline file and keeps the copy equal to the source."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.sdk import DAG, TriggerRule
from airflow.sdk.exceptions import AirflowSkipException

from airflow_cdc_provider.dag import pipeline_param, pipeline_steps, stream_params
from airflow_cdc_provider.operators.pipeline import CdcVerifyOperator
from airflow_cdc_provider.sensors.slot import SlotProgressSensor

if TYPE_CHECKING:
    from airflow.sdk import Context

PIPELINE = "{{ params.pipeline }}"


def skip_without_slot(context: Context) -> None:
    """Skip the task if the pipeline reads Kafka topics, which have no slot."""
    if "restart_lsn" not in context["ti"].xcom_pull(task_ids="prepare", key="provision"):
        raise AirflowSkipException("The pipeline reads topics: there is no slot.")


with DAG(
    dag_id="cdc_pipeline",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["cdc", "postgres", "spark"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Postgres CDC pipeline

Copies the tables of a pipeline file into the sink and applies the changes made meanwhile, exactly once.

* **prepare** does three steps, which have rows of their own: **preflight** checks servers, privileges and tables
  without changing anything; **provision** creates or verifies publication and replication slot, and plans the copy;
  **plan** divides the remaining chunks into groups.
* **snapshot** copies each group.
* **stream** applies the changes until it has caught up, reaches an LSN, or is stopped.
* **slot_progress** waits until the slot releases WAL on the source. It is skipped if nothing moves for ten minutes, or
  if the pipeline reads Kafka topics, which have no slot.
* **verify** compares source and sink row by row.

Trigger the Dag again to catch up; tables are not copied twice. It needs a Spark connection `spark_default`.
""",
    params={**pipeline_param(), **stream_params()},
):
    steps = pipeline_steps(PIPELINE)
    slot_progress = SlotProgressSensor(
        task_id="slot_progress",
        pipeline=PIPELINE,
        moved_since="{{ ti.xcom_pull(task_ids='prepare', key='provision').get('restart_lsn') }}",
        pre_execute=skip_without_slot,
        timeout=600,
        soft_fail=True,
        trigger_rule=TriggerRule.NONE_FAILED,
    )
    verify = CdcVerifyOperator(task_id="verify", pipeline=PIPELINE)

    steps.snapshot >> slot_progress
    steps.stream >> verify
