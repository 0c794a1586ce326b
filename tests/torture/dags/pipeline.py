"""A pipeline's steps as tasks of Airflow, which say to a file what they are and what has ended them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
from airflow.sdk import DAG, TriggerRule

from airflow_cdc_provider.engine.errors import CdcError
from airflow_cdc_provider.operators.cdc import (
    CdcPlanOperator,
    CdcProvisionOperator,
    CdcSnapshotOperator,
    CdcStreamOperator,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

PIPELINE = os.environ["TORTURED_PIPELINE"]
EPOCH = "{{ ti.xcom_pull(task_ids='provision')['epoch'] }}"


def say(context: Context, **what: Any) -> None:
    """Add a line to the file of this run."""
    with open(f"{PIPELINE}.{context['run_id']}", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def note_start(context: Context) -> None:
    """Say which process the task is, and which supervises it."""
    process = psutil.Process()
    say(context, task=context["ti"].task_id, pids=[process.pid, process.ppid()], born=process.create_time())


def note_failure(context: Context) -> None:
    """Say the engine's error: that of the job, or that of a command in this process."""
    job = getattr(context["task"], "_job", None)
    error = job.result.get("error") if job is not None else None
    cause = getattr(context.get("exception"), "__cause__", None)
    if error is None and isinstance(cause, CdcError):
        error = cause.as_dict()
    if error is not None:
        say(context, error=error)


with DAG(
    "torture",
    schedule=None,
    default_args={
        "retries": 5,
        "retry_delay": timedelta(seconds=2),
        "on_execute_callback": note_start,
        "on_failure_callback": note_failure,
        "on_retry_callback": note_failure,
    },
) as dag:
    provision = CdcProvisionOperator(task_id="provision", pipeline=PIPELINE)
    plan = CdcPlanOperator(task_id="plan", pipeline=PIPELINE, groups=2)
    snapshot = CdcSnapshotOperator.partial(task_id="snapshot", pipeline=PIPELINE, epoch=EPOCH).expand(group=plan.output)
    stream = CdcStreamOperator(
        task_id="stream", pipeline=PIPELINE, epoch=EPOCH, until="stopped", trigger_rule=TriggerRule.NONE_FAILED
    )
    provision >> plan >> snapshot >> stream
