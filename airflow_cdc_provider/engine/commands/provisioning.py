"""``provision``: creates everything that a pipeline needs before its first row is copied."""

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
from airflow_cdc_provider.engine.runs.record_copy import read_record_copy
from airflow_cdc_provider.engine.runs.sink_checks import require_mode
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import PROVISION, is_streaming
from airflow_cdc_provider.engine.state.location import refuse_others


def provision(pipeline: Pipeline, takeover: bool = False, *, checked: bool = False) -> dict[str, Any]:
    """Create or verify publication, slot, target tables, plan and commit record, and take the epoch of a run.

    While a stream is alive, only tables that were added to the file are handled: the stream is asked to add them, and
    ``requested`` is the name of the request.

    :param takeover: whether to continue even if another run is alive.
    :param checked: whether all checks have just passed, and need not be repeated.
    """
    with noting_errors(pipeline, PROVISION):
        return _provision(pipeline, takeover, checked)


def _provision(pipeline: Pipeline, takeover: bool, checked: bool) -> dict[str, Any]:
    source = source_of(pipeline)
    if not takeover and is_streaming(State(pipeline.state)) and (joining := source.joining()):
        requested = resnapshot(pipeline, tables=joining)["requested"]
        record = existing_record(pipeline)
        return {**_provisioned(record), "requested": requested, **source.facts()}
    _require_ready(pipeline, checked)
    record, facts = source.provision(takeover)
    return {**_provisioned(record), **facts}


def _require_ready(pipeline: Pipeline, checked: bool) -> None:
    """Check everything before anything is created.

    :raises CdcError: the error of the first check that failed.
    """
    state = State(pipeline.state)
    refuse_others(state, pipeline.name)
    for branch in pipeline.branches:
        if read_record_copy(branch, state) is not None:  # there has been a record, which must not be created again
            record = existing_record(branch)
            require_kind(branch.source.type, record.identity)
            require_mode(branch, record.identity)
    if not checked:
        require(checks.preflight(pipeline))


def _provisioned(record: Record) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "applied_lsn": format_lsn(record.applied),
        "tables": [target.table.label for target in record.targets],
        "chunks": len(record.chunks),
        "requested": None,
    }
