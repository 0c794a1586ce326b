"""Looks at all replication slots of a server every minute, so that none fills its disk."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_cdc_provider.operators.slot_guard import CdcSlotGuardOperator

SIZE = r"^[1-9][0-9]* *(B|KiB|MiB|GiB)$"

with DAG(
    dag_id="cdc_slot_guard",
    schedule="* * * * *",
    catchup=False,
    max_active_runs=1,
    # It needs a connection: unpause it when that is there.
    is_paused_upon_creation=True,
    dagrun_timeout=timedelta(minutes=5),
    tags=["cdc", "postgres"],
    doc_md="""
### Guard of replication slots

Looks once a minute at all slots of a server, whoever made them, and fails when one is **lost**, about to be lost,
**beyond its budget**, or **read by nobody** for too long; so a callback for failures is an alert. Warnings name the
slots at four fifths of the budget, and the sessions and prepared transactions that have been open for long and hold
slots back. The findings, each with what to do, are the task's result.

To be told of warnings too, copy this Dag and give the operator `on_findings`, a function or a notifier.

The **circuit breaker** is off. Give *Drop slots beyond* a size, and slots that retain more are dropped: their pipelines
have to read all tables again, but the source's disk does not fill, and the source does not stop.
""",
    params={
        "conn_id": Param(
            os.environ.get("AIRFLOW_CDC_SLOT_GUARD_CONN", "postgres_cdc_default"),
            type="string",
            minLength=1,
            title="Connection",
            description="Of type Postgres CDC or Postgres. Only members of pg_monitor see all transactions.",
        ),
        "budget": Param(
            "10GiB",
            type="string",
            pattern=SIZE,
            examples=["1GiB", "10GiB", "100GiB"],
            title="Budget of a slot",
            description="WAL that a slot may keep, such as 10GiB. From four fifths on there is a warning.",
        ),
        "dead_minutes": Param(
            60,
            type="integer",
            minimum=1,
            title="Dead after, in minutes",
            description="How long a slot may be without a reader. Longer than the time between two scheduled streams.",
        ),
        "transaction_minutes": Param(
            15,
            type="integer",
            minimum=1,
            title="Long transactions, in minutes",
            description="From which age on a transaction is named, as no slot passes the oldest one.",
        ),
        "drop_beyond": Param(
            None,
            type=["null", "string"],
            pattern=SIZE,
            title="Drop slots beyond",
            description_md="**Dangerous.** Slots that retain more WAL than this are dropped, and what they have not "
            "delivered is lost to their pipelines: run `airflow-cdc resnapshot --all` for each. Empty: none are.",
        ),
        "drop": Param(
            "inactive",
            type="string",
            enum=["inactive", "all"],
            values_display={"inactive": "only slots without a reader", "all": "also slots that are being read"},
            title="Which slots to drop",
            description_md="Also a slot that is being read can fall behind. **Its reader is disconnected.**",
        ),
    },
):
    CdcSlotGuardOperator(
        task_id="look",
        conn_id="{{ params.conn_id }}",
        budget="{{ params.budget }}",
        dead_seconds="{{ params.dead_minutes * 60 }}",
        transaction_seconds="{{ params.transaction_minutes * 60 }}",
        drop_beyond="{{ params.drop_beyond or '' }}",
        drop_active="{{ params.drop == 'all' }}",
    )
