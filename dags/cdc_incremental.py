"""Catches up with the source every five minutes, and ends."""

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

Applies what the source has committed until the run began, and ends. The first run copies the tables; so do later ones
with tables that the file has gained. While a run is under way no other begins, and none is made up for: each catches up
with all there is. An event for each changed table lets other Dags run.

The schedule takes the form's defaults; `AIRFLOW_CDC_PIPELINE` in the environment of Dag processor and scheduler names
another file. Between runs the slot keeps the source's log.
""",
    params={**pipeline_param(), "groups": stream_params()["groups"]},
):
    pipeline_steps("{{ params.pipeline }}", until=CAUGHT_UP)
