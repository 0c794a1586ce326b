"""Copies the tables of a pipeline file and keeps the copy equal to the source."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param, TriggerRule

from airflow_cdc_provider.operators.cdc import (
    CdcPlanOperator,
    CdcPreflightOperator,
    CdcProvisionOperator,
    CdcSnapshotOperator,
    CdcStreamOperator,
    CdcVerifyOperator,
)
from airflow_cdc_provider.sensors.slot import SlotProgressSensor

PIPELINE = "{{ params.pipeline }}"
EPOCH = "{{ ti.xcom_pull(task_ids='provision')['epoch'] }}"

with DAG(
    dag_id="cdc_pipeline",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    tags=["cdc", "postgres", "spark"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Postgres CDC pipeline

Copies the tables of a pipeline file into the sink and applies the changes made meanwhile, each exactly once.

* **preflight** checks servers, privileges and tables, and changes nothing.
* **provision** makes publication and replication slot, or verifies those that exist, and plans the copy.
* **plan** divides the chunks that are not copied yet into groups; **snapshot** copies each group in a Spark job.
* **stream** applies the changes until it has caught up, is stopped, or has reached an LSN.
* **slot_progress** waits until the slot releases WAL on the source; it is skipped if nothing moves for ten minutes.
* **verify** compares source and sink row by row.

Trigger it again to catch up: what was copied is not copied again. Needs a Spark connection `spark_default`.
""",
    params={
        "pipeline": Param(
            os.environ.get("AIRFLOW_CDC_PIPELINE", "/opt/airflow/pipelines/shop.yaml"),
            type="string",
            minLength=1,
            title="Pipeline file",
            description="Path of the pipeline file on the workers.",
        ),
        "until": Param(
            "caught-up",
            type="string",
            pattern="^(caught-up|stopped|(lsn:)?[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})$",
            examples=["caught-up", "stopped"],
            title="Stream until",
            description="caught-up: all that was committed before the stream began is applied; stopped: until "
            "`airflow-cdc stop`; or an LSN such as 0/16B3748.",
        ),
        "groups": Param(
            2,
            type="integer",
            minimum=1,
            maximum=32,
            title="Snapshot groups",
            description="How many Spark jobs copy chunks at the same time, at most.",
        ),
    },
):
    preflight = CdcPreflightOperator(task_id="preflight", pipeline=PIPELINE)
    provision = CdcProvisionOperator(task_id="provision", pipeline=PIPELINE)
    plan = CdcPlanOperator(task_id="plan", pipeline=PIPELINE, groups="{{ params.groups }}")
    snapshot = CdcSnapshotOperator.partial(
        task_id="snapshot",
        pipeline=PIPELINE,
        epoch=EPOCH,
        map_index_template="group {{ task.group }}",
    ).expand(group=plan.output)
    # A snapshot without groups is skipped, which must not skip what follows.
    stream = CdcStreamOperator(
        task_id="stream",
        pipeline=PIPELINE,
        epoch=EPOCH,
        until="{{ params.until }}",
        trigger_rule=TriggerRule.NONE_FAILED,
    )
    slot_progress = SlotProgressSensor(
        task_id="slot_progress",
        pipeline=PIPELINE,
        moved_since="{{ ti.xcom_pull(task_ids='provision')['restart_lsn'] }}",
        timeout=600,
        soft_fail=True,
        trigger_rule=TriggerRule.NONE_FAILED,
    )
    verify = CdcVerifyOperator(task_id="verify", pipeline=PIPELINE)

    preflight >> provision >> plan >> snapshot >> [stream, slot_progress]
    stream >> verify
