"""A pipeline's steps as tasks of Airflow; as a script, one run of them in this process, as a task runs in its own.

Prints what a command prints with ``--json`` if it fails. Takes what it needs from the environment, since Airflow reads
the file too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

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

errors: list[dict[str, Any]] = []


def note(context: Context) -> None:
    """Keep the engine's error: that of the job, or that of a command in this process."""
    job = getattr(context["task"], "_job", None)
    error = job.result.get("error") if job is not None else None
    cause = getattr(context.get("exception"), "__cause__", None)
    if error is None and isinstance(cause, CdcError):
        error = cause.as_dict()
    if error is not None:
        errors.append(error)


with DAG("torture", schedule=None, default_args={"on_failure_callback": note}) as dag:
    provision = CdcProvisionOperator(task_id="provision", pipeline=PIPELINE, takeover="TORTURED_TAKEOVER" in os.environ)
    plan = CdcPlanOperator(task_id="plan", pipeline=PIPELINE, groups=2)
    snapshot = CdcSnapshotOperator.partial(task_id="snapshot", pipeline=PIPELINE, epoch=EPOCH).expand(group=plan.output)
    stream = CdcStreamOperator(
        task_id="stream", pipeline=PIPELINE, epoch=EPOCH, until="stopped", trigger_rule=TriggerRule.NONE_FAILED
    )
    provision >> plan >> snapshot >> stream

if __name__ == "__main__":
    run = dag.test(logical_date=None)
    if errors:
        print(json.dumps({"error": errors[0]}))
    sys.exit(str(run.state) != "success")
