"""Compares tables of the source with those of the sinks, row by row."""

from __future__ import annotations

import time
from typing import Any

from airflow_cdc_provider.engine.comparison.compare import compare, ranges_in
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import flushed
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sources.contract import TellTable
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings


class _LiveStream:
    """A stream that another process runs, seen through the sink's record."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def passed(self, lsn: Lsn, timeout: float) -> bool:
        return await_condition(lambda: existing_record(self._pipeline).applied >= lsn, timeout)


def verify(pipeline: Pipeline, live: bool, tell: TellTable) -> dict[str, Any]:
    """See :meth:`.Source.verify`."""
    record = existing_record(pipeline)
    results: list[dict[str, Any]] = []
    not_compared: set[str] = set()
    with connected(postgres_settings(pipeline).dsn) as source:
        lag, _ = record.lag(flushed(source), time.time())
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
    }
