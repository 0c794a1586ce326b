"""``provision``: what a pipeline needs before its first row is copied."""

from __future__ import annotations

from typing import Any

from airflow_cdc_provider.engine.commands import checks
from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.commands.repair import resnapshot
from airflow_cdc_provider.engine.core.findings import require
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Record, require_kind
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.record_copy import read_ledger
from airflow_cdc_provider.engine.runs.sink_checks import require_mode
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import PROVISION, is_streaming
from airflow_cdc_provider.engine.state.location import refuse_others


def provision(pipeline: Pipeline, takeover: bool = False) -> dict[str, Any]:
    """Create, or verify, publication, slot, target tables, plan and commit record; take the epoch of a run.

    While a stream lives, tables that the file has gained are left to it, and nothing else is done: ``requested`` is
    then the name of the request.

    :param takeover: go on although another run is alive.
    """
    with noting_errors(pipeline, PROVISION):
        return _provision(pipeline, takeover)


def _provision(pipeline: Pipeline, takeover: bool) -> dict[str, Any]:
    source = source_of(pipeline)
    if not takeover and is_streaming(State(pipeline.state)) and (joining := source.joining()):
        requested = resnapshot(pipeline, tables=joining)["requested"]
        record = existing_record(pipeline)
        return {**_provisioned(record), "requested": requested, **source.facts(record)}
    _require_ready(pipeline)
    record, facts = source.provision(takeover)
    return {**_provisioned(record), **facts}


def _require_ready(pipeline: Pipeline) -> None:
    """Check everything before anything is made.

    :raises CdcError: the first finding that stands in the way.
    """
    state = State(pipeline.state)
    refuse_others(state, pipeline.name)
    for branch in pipeline.branches:
        if read_ledger(branch, state) is not None:  # so that there has been a record, which must not be begun anew
            record = existing_record(branch)
            require_kind(branch.source.type, record.identity)
            require_mode(branch, record.identity)
    require(checks.preflight(pipeline))


def _provisioned(record: Record) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "applied_lsn": format_lsn(record.applied),
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.chunks),
        "requested": None,
    }
