"""``verify``: compares source and sink, table by table."""

from __future__ import annotations

from typing import Any

from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.commands.pipeline_status import converting_sinks
from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import is_streaming


def verify(pipeline: Pipeline, *, report: Report = silent) -> dict[str, Any]:
    """Compare source and sink, table by table."""

    def report_progress(table: str, done: int, total: int) -> None:
        report("verify", {"table": table, "done": done, "total": total})

    with noting_errors(pipeline, "verify", ends_run=False):
        existing_record(pipeline)  # without a record there is nothing to compare
        live = is_streaming(State(pipeline.state))
        return source_of(pipeline).verify(live, report_progress) | {"converting": converting_sinks(pipeline)}
