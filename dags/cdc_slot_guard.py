"""Checks all replication slots of a server every minute, so that none fills the disk."""

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
    # Unpause it when its connection exists.
    is_paused_upon_creation=True,
    dagrun_timeout=timedelta(minutes=5),
    tags=["cdc", "postgres"],
    doc_md="""
### Guard replication slots

Checks all slots of a server once a minute, also slots of other tools. The task fails if a slot is **lost**, about to be
lost, **beyond its budget**, or **without a reader** for too long; use a failure callback as an alert. Warnings name
slots at 80 % of the budget, and long sessions and prepared transactions that hold slots back. The task returns all
findings with their remedies.

To be notified of warnings too, copy this Dag and set `on_findings` of the operator to a function or a notifier.

The **circuit breaker** is off. If you set *Drop slots beyond* to a size, slots that retain more are dropped. Their
pipelines then have to read all tables again, but the source's disk does not fill up.
""",
    params={
        "conn_id": Param(
            os.environ.get("AIRFLOW_CDC_SLOT_GUARD_CONN", "postgres_cdc_default"),
            type="string",
            minLength=1,
            title="Connection",
            description="Type Postgres CDC or Postgres. Only members of pg_monitor see all transactions.",
        ),
        "budget": Param(
            "10GiB",
            type="string",
            pattern=SIZE,
            examples=["1GiB", "10GiB", "100GiB"],
            title="Budget of a slot",
            description="WAL that a slot may retain, such as 10GiB. A warning is given at 80 %.",
        ),
        "dead_minutes": Param(
            60,
            type="integer",
            minimum=1,
            title="Dead after, in minutes",
            description="Minutes that a slot may have no reader. Use more than the time between two scheduled streams.",
        ),
        "transaction_minutes": Param(
            15,
            type="integer",
            minimum=1,
            title="Long transactions, in minutes",
            description="Minutes after which an open transaction is reported, because no slot can advance past it.",
        ),
        "drop_beyond": Param(
            None,
            type=["null", "string"],
            pattern=SIZE,
            title="Drop slots beyond",
            description_md="**Dangerous.** Slots that retain more WAL than this are dropped, and their pipelines lose "
            "all changes not delivered: run `airflow-cdc resnapshot --all` for each. Empty: drop none.",
        ),
        "drop": Param(
            "inactive",
            type="string",
            enum=["inactive", "all"],
            values_display={"inactive": "only slots without a reader", "all": "also slots that are being read"},
            title="Which slots to drop",
            description_md="A slot that is being read can fall behind too. **Its reader is disconnected.**",
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
