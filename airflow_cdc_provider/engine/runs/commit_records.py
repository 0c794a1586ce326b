"""The commit records of a pipeline's sinks; several are accessed as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import sink_plugin
from airflow_cdc_provider.engine.runs.source import attached
from airflow_cdc_provider.engine.sinks.all_records import SeveralRecords, merged
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink


def sink_of(pipeline: Pipeline, part: str = "") -> Sink:
    """Return the sink of a pipeline that has exactly one.

    :param part: the part of a run that works with the sink, and ends only its own sessions; empty for none.
    """
    return sink_plugin(pipeline.sink.type).open(pipeline.sink, pipeline.name, part)


def commit_record_of(pipeline: Pipeline, part: str = "") -> CommitRecord:
    """Return the commit record of all sinks as one; see :func:`sink_of`."""
    if len(pipeline.sinks) == 1:
        return sink_of(pipeline, part)
    return SeveralRecords([sink_of(branch, part) for branch in pipeline.branches])


def record_if_any(pipeline: Pipeline) -> Record | None:
    """Return the merged commit record of those sinks that have one."""
    found = (sink_of(branch).record() for branch in pipeline.branches)
    records = [record for record in found if record is not None]
    return merged(records) if records else None


def existing_record(pipeline: Pipeline) -> Record:
    """Return the pipeline's commit record.

    :raises GateClosed: if the pipeline has never been provisioned.
    """
    record = commit_record_of(pipeline).record()
    if record is None:
        sink = "the sink" if len(pipeline.sinks) == 1 else "one of the sinks"
        raise GateClosed(
            f"{sink} has no commit record of pipeline {pipeline.name!r}",
            attached(pipeline).without_record,
        )
    return record


def identity_of(branch: Pipeline, noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``identity`` of a new record.

    :param noted: the values that the source records about itself.
    """
    return {**noted, "source": branch.source.type, "mode": branch.sink.mode}


def require_targets(pipeline: Pipeline, sink: Sink, record: Record) -> None:
    """Refuse to continue without target tables.

    :raises GateClosed: if any are missing; names them.
    """
    gone = sink.missing(record.targets)
    if gone:
        names = ", ".join(f"{target.schema}.{target.name}" for target in gone)
        raise GateClosed(
            f"target tables of the pipeline no longer exist: {names}", attached(pipeline).without_targets(gone, record)
        )
