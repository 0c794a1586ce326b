"""``provision``: what a pipeline needs before its first row is copied."""

from __future__ import annotations

from typing import Any

from airflow_cdc_provider.engine.commands.attention import (
    noting_errors,
)
from airflow_cdc_provider.engine.commands.repair import resnapshot
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.provision.gate import gate
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import PROVISION, is_streaming


def provision(pipeline: Pipeline, takeover: bool = False) -> dict[str, Any]:
    """Create, or verify, publication, slot, target tables, plan and commit record; take the epoch of a run.

    While a stream lives, tables that the file has gained are left to it, and nothing else is done: ``requested`` is
    then the name of the request.

    :param takeover: go on although another run is alive.
    """
    with noting_errors(pipeline, PROVISION):
        return _provision(pipeline, takeover)


def _provision(pipeline: Pipeline, takeover: bool) -> dict[str, Any]:
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka import provisioning as topics

        return _provisioned(topics.provision(pipeline, takeover))
    requested = None
    if not takeover and is_streaming(State(pipeline.state)):
        joining = joining_tables(pipeline)
        if joining:
            requested = resnapshot(pipeline, tables=joining)["requested"]
    if requested is None:
        record, found = provisioning.provision(pipeline, takeover)
    else:
        record = existing_record(pipeline)
        with connected(pipeline.source.dsn) as source:
            found = gate(source, pipeline.source, record).slot
    return _provisioned(record) | {"requested": requested, **found.as_dict()}


def _provisioned(record: Record) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "applied_lsn": format_lsn(record.applied),
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.chunks),
        "requested": None,
    }


def joining_tables(pipeline: Pipeline) -> list[str]:
    """Tables that the file has and a sink's record has not."""
    records = [sink_of(branch).record() for branch in pipeline.branches]
    recorded = [{target.table.label for target in record.targets} for record in records if record is not None]
    if len(recorded) < len(records):
        return []  # a sink joins, which no live stream can do for it
    with connected(pipeline.source.dsn) as source:
        tables = resolve(source, pipeline.source.tables)
    return [table.label for table in tables if not all(table.label in labels for labels in recorded)]
