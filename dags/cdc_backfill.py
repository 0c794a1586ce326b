"""Reads the rows of an interval of time again, or a range of keys, and merges them while the stream goes on."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, Param

from airflow_cdc_provider.dag import pipeline_param
from airflow_cdc_provider.operators.resnapshot import CdcResnapshotOperator
from airflow_cdc_provider.timetables.backfill import BackfillTimetable

with DAG(
    dag_id="cdc_backfill",
    # A backfill is divided into intervals of this length; nothing runs unasked.
    schedule=BackfillTimetable(os.environ.get("AIRFLOW_CDC_BACKFILL_CRON", "0 0 * * *"), timezone="UTC"),
    start_date=datetime(1970, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=4,
    tags=["cdc", "postgres", "backfill"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Backfill of a pipeline

Reads rows of the source again and merges them into the sink: rows that are damaged or missing there are healed, rows
that the source does not have are deleted. The stream goes on meanwhile, and reads the rows itself between two of its
units; where no stream runs, the task reads them in its worker. Intervals may be read in any order, at the same time,
and any number of times.

* **Create backfill** in this page, or `airflow backfill create --dag-id cdc_backfill --from-date 2026-01-01 --to-date
  2026-01-05`: a run for each day, whose rows are those with the time column in that day (in UTC).
* **Trigger** for one interval: give From and To. Rows may also be chosen by a range of keys, or whole tables be read.

The Dag has to be active, not paused; it never runs by itself.
""",
    params={
        **pipeline_param(),
        "tables": Param(
            [name for name in os.environ.get("AIRFLOW_CDC_BACKFILL_TABLES", "").split(",") if name],
            type="array",
            items={"type": "string", "pattern": r"^[^.]+\..+$"},
            uniqueItems=True,
            title="Tables",
            description="As schema.table, one a line; none for all tables of the pipeline.",
        ),
        "rows": Param(
            "time",
            type="string",
            enum=["time", "key", "all"],
            values_display={
                "time": "Rows of an interval of time",
                "key": "Rows of a range of keys",
                "all": "All rows",
            },
            title="Rows",
            description="All rows are read again by each run: choose that for a single run, not for a backfill.",
        ),
        "time_column": Param(
            os.environ.get("AIRFLOW_CDC_TIME_COLUMN", "created_at"),
            type="string",
            minLength=1,
            title="Time column",
            description="For an interval of time: a column of type timestamp or date that all the tables have. Without "
            "a time zone it is taken as UTC. Rows without a value are in no interval.",
        ),
        "from": Param(
            None,
            type=["null", "string"],
            format="date-time",
            title="From",
            description="Where the interval of time begins. Empty for a backfill, each run of which has its own.",
        ),
        "to": Param(
            None,
            type=["null", "string"],
            format="date-time",
            title="To",
            description="Where the interval of time ends; rows of this very moment are left out.",
        ),
        "key_from": Param(
            None,
            type=["null", "string"],
            title="First key",
            description="For a range of keys: the key, or the first column of it, such as 1000; empty for all keys "
            "before the last.",
        ),
        "key_to": Param(
            None,
            type=["null", "string"],
            title="End before key",
            description="For a range of keys: the first key that is left out; empty for all keys from the first.",
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
        # A stream that stands still must not hold a backfill for ever; Airflow tries again.
        execution_timeout=timedelta(hours=6),
    )
