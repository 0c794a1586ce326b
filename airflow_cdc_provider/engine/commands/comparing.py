"""``verify``: source and sink are compared, table by table."""

from __future__ import annotations

from typing import Any

from airflow_cdc_provider.engine.commands.attention import (
    noting_errors,
)
from airflow_cdc_provider.engine.commands.pipeline_status import converting_sinks, lag_of
from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.comparison.compare import compare, ranges_in
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import is_streaming


class _LiveStream:
    """A stream that another process runs, seen through the sink's record."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def passed(self, lsn: int, timeout: float) -> bool:
        return await_condition(lambda: existing_record(self._pipeline).applied >= lsn, timeout)


def verify(pipeline: Pipeline, *, report: Report = silent) -> dict[str, Any]:
    """Compare source and sink, table by table."""
    with noting_errors(pipeline, "verify", ends_run=False):
        return _verify(pipeline, report)


def _verify(pipeline: Pipeline, report: Report) -> dict[str, Any]:
    record, live = existing_record(pipeline), is_streaming(State(pipeline.state))
    results: list[dict[str, Any]] = []
    not_compared: set[str] = set()

    def tell(table: str, done: int, total: int) -> None:
        report("verify", {"table": table, "done": done, "total": total})

    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.verify import verify as verify_topics

        return verify_topics(pipeline, live, tell) | {"converting": converting_sinks(pipeline)}
    with connected(pipeline.source.dsn) as source:
        lag, _ = lag_of(source, record)
        for branch in pipeline.branches:
            targets = existing_record(branch).targets
            compared = [t for t in targets if t.table.key or branch.sink.mode == "mirror"]
            not_compared |= {t.table.label for t in targets} - {t.table.label for t in compared}
            sink = sink_of(branch)
            found = compare(source, compared, sink.compared, _LiveStream(branch) if live else None, tell)
            place = {"sink": branch.sink.place} if len(pipeline.sinks) > 1 else {}
            results += [
                one.as_dict() | ranges_in(sink, target) | place for one, target in zip(found, compared, strict=True)
            ]
    return {
        "equal": all(result["equal"] for result in results),
        "tables": results,
        "live": live,
        "lag_bytes": lag,
        "not_compared": sorted(not_compared),
        "converting": converting_sinks(pipeline),
    }
