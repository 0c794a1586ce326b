"""Catches up with the source every five minutes."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_cdc_provider.dag import pipeline_param, pipeline_steps, stream_params
from airflow_cdc_provider.engine.core.stream_end import CAUGHT_UP

with DAG(
    dag_id="cdc_incremental",
    schedule="*/5 * * * *",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    tags=["cdc", "postgres", "spark"],
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30)},
    doc_md="""
### Postgres CDC, every five minutes

Applies everything that the source committed before the run started, then ends. The first run copies the tables; later
runs copy tables that were added to the file. Runs do not overlap. Missed runs are not repeated, because each run
catches up completely. An event for each changed table can trigger other Dags.

Scheduled runs use the form's defaults. To use another file, set `AIRFLOW_CDC_PIPELINE` in the environment of the Dag
processor and the scheduler. Between runs, the slot retains the source's log.
""",
    params={**pipeline_param(), "groups": stream_params()["groups"]},
):
    pipeline_steps("{{ params.pipeline }}", until=CAUGHT_UP)
