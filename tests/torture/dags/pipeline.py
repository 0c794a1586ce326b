"""The steps of a pipeline as Airflow tasks, which report their processes and errors to a file."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
from airflow.sdk import DAG, TriggerRule

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.submission import read
from airflow_cdc_provider.operators.pipeline import CdcProvisionOperator
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.retry import CdcTaskFailed, CdcTaskRefused

if TYPE_CHECKING:
    from airflow.sdk import Context

PIPELINE = os.environ["TORTURED_PIPELINE"]
EPOCH = "{{ ti.xcom_pull(task_ids='provision')['epoch'] }}"


def say(context: Context, **what: Any) -> None:
    """Add a line to the file of this run."""
    with open(f"{PIPELINE}.{context['run_id']}", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def note_start(context: Context) -> None:
    """Report the process of the task, and that of its supervisor."""
    process = psutil.Process()
    say(context, task=context["ti"].task_id, pids=[process.pid, process.ppid()], born=process.create_time())


def note_failure(context: Context) -> None:
    """Report the engine's error: that of the job, or that of a command in this process."""
    job: Any = context["task_state_store"].get("spark_job")
    submission = read(State(Pipeline.load(PIPELINE).state), job["submission"]) if job else None
    error = submission.error if submission is not None else None
    failed = context.get("exception")
    if error is None and isinstance(failed, CdcTaskFailed | CdcTaskRefused):
        error = {"kind": failed.kind, "message": failed.message, "solution": failed.solution}
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
    # Tasks that wait in the worker can be killed at any time.
    snapshot = CdcSnapshotOperator.partial(task_id="snapshot", pipeline=PIPELINE, epoch=EPOCH, deferrable=False).expand(
        group=plan.output
    )
    stream = CdcStreamOperator(
        task_id="stream",
        pipeline=PIPELINE,
        epoch=EPOCH,
        until="stopped",
        deferrable=False,
        trigger_rule=TriggerRule.NONE_FAILED,
    )
    provision >> plan >> snapshot >> stream
