"""Reads the rows of a time interval or a range of keys again, and merges them while the stream runs."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, Param

from airflow_cdc_provider.dag import pipeline_param
from airflow_cdc_provider.operators.resnapshot import CdcResnapshotOperator
from airflow_cdc_provider.timetables.backfill import BackfillTimetable

with DAG(
    dag_id="cdc_backfill",
    # Divides a backfill into intervals of this length; does not schedule runs.
    schedule=BackfillTimetable(os.environ.get("AIRFLOW_CDC_BACKFILL_CRON", "0 0 * * *"), timezone="UTC"),
    start_date=datetime(1970, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=4,
    tags=["cdc", "postgres", "backfill"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Backfill of a pipeline

Reads rows of the source again and merges them into the sink. This repairs damaged and missing rows, and deletes rows
that the source does not have. A running stream reads the rows itself between two units; without a stream, the task
reads them in its worker. Intervals may be read in any order, at the same time, and repeatedly.

* **Create backfill** on this page, or `airflow backfill create --dag-id cdc_backfill --from-date 2026-01-01 --to-date
  2026-01-05`: creates one run per day, for the rows whose time column is in that day (UTC).
* **Trigger** a run for one interval: set From and To. You can also select a range of keys, or all rows.

Unpause the Dag to use it. It never starts automatically.
""",
    params={
        **pipeline_param(),
        "tables": Param(
            [name for name in os.environ.get("AIRFLOW_CDC_BACKFILL_TABLES", "").split(",") if name],
            type="array",
            items={"type": "string", "pattern": r"^[^.]+\..+$"},
            uniqueItems=True,
            title="Tables",
            description="As schema.table, one per line; empty for all tables of the pipeline.",
        ),
        "rows": Param(
            "time",
            type="string",
            enum=["time", "key", "all"],
            values_display={
                "time": "Rows of a time interval",
                "key": "Rows of a range of keys",
                "all": "All rows",
            },
            title="Rows",
            description="With all rows, each run reads whole tables: use it for a single run, not for a backfill.",
        ),
        "time_column": Param(
            os.environ.get("AIRFLOW_CDC_TIME_COLUMN", "created_at"),
            type="string",
            minLength=1,
            title="Time column",
            description="For a time interval: a timestamp or date column that all the tables have. Values without a "
            "time zone are interpreted as UTC. Rows without a value are in no interval.",
        ),
        "from": Param(
            None,
            type=["null", "string"],
            format="date-time",
            title="From",
            description="Start of the time interval. Empty for a backfill, whose runs have their own intervals.",
        ),
        "to": Param(
            None,
            type=["null", "string"],
            format="date-time",
            title="To",
            description="End of the time interval, exclusive.",
        ),
        "key_from": Param(
            None,
            type=["null", "string"],
            title="First key",
            description="For a range of keys: the first key, or its first column, such as 1000; empty for no lower "
            "bound.",
        ),
        "key_to": Param(
            None,
            type=["null", "string"],
            title="End before key",
            description="For a range of keys: the end, exclusive; empty for no upper bound.",
        ),
    },
):
    CdcResnapshotOperator(
        task_id="resnapshot",
        pipeline="{{ params.pipeline }}",
        tables="{{ params.tables | tojson }}",
        rows="{{ params.rows }}",
        time_column="{{ params.time_column }}",
        start="{{ (params['from'] if params.rows == 'time' else params.key_from) or '' }}",
        end="{{ (params['to'] if params.rows == 'time' else params.key_to) or '' }}",
        # A stream that hangs must not block a backfill forever; Airflow retries.
        execution_timeout=timedelta(hours=6),
    )
