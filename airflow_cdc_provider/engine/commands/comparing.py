"""``verify``: compares source and sink, table by table, and each view with its SELECT."""

from __future__ import annotations

import logging
from typing import Any

from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.commands.pipeline_status import converting_sinks
from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sources.contract import TellTable, source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import is_streaming
from airflow_cdc_provider.engine.state.verification import write_verification

log = logging.getLogger(__name__)


def verify(pipeline: Pipeline, *, report: Report = silent) -> dict[str, Any]:
    """Compare source and sink, table by table, and each view with its SELECT over the mirror."""

    def report_progress(table: str, done: int, total: int) -> None:
        report("verify", {"table": table, "done": done, "total": total})

    with noting_errors(pipeline, "verify", ends_run=False):
        existing_record(pipeline)  # without a record there is nothing to compare
        state = State(pipeline.state)
        live = is_streaming(state)
        result = source_of(pipeline).verify(live, report_progress)
        try:
            write_verification(state, result["tables"])
        except StateUnwritable as e:  # it is only shown, and comparing takes long
            log.warning("The result is not shown on the page CDC: %s", e.message)
        views = _compare_views(pipeline, report_progress)
        return {
            **result,
            "equal": result["equal"] and all(view["equal"] for view in views),
            "views": views,
            "converting": converting_sinks(pipeline),
        }


def _compare_views(pipeline: Pipeline, report: TellTable) -> list[dict[str, Any]]:
    """Compare the views of all sinks with their SELECTs over the mirrors."""
    views = []
    for branch in pipeline.branches:
        sink = sink_of(branch)
        place = {"sink": branch.sink.place} if len(pipeline.sinks) > 1 else {}
        for result in sink.compare_views() if isinstance(sink, KeepsViews) else ():
            report(result.view, 1, 1)
            views.append(result.as_dict() | place)
    return views
