"""The copy of the commit record in the state: the finished chunks, and the objects that the pipeline has created.

A pipeline never continues from the copy. But if the sink's record is lost, the copy proves that slot and target tables
are the pipeline's own, so that they may be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import values_hidden
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Record, require_kind
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.state.chunk_progress import chunk_grid
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from airflow_cdc_provider.engine.state.location import take

_FILE = "ledger.json"


@dataclass(frozen=True)
class RecordCopy:
    """The last known record of a pipeline, according to the state.

    :param identity: the ``identity`` of the record.
    :param targets: schema and name of each target, by label of the source table.
    """

    identity: dict[str, Any]
    targets: dict[str, tuple[str, str]]


def write_record_copy(pipeline: Pipeline, state: State, record: Record) -> None:
    """Replace the copy by the current record, and note which pipeline the state belongs to.

    :param pipeline: the pipeline, or a branch of it; information on other sinks is kept.
    """
    chunks = [
        {**_shown(c.chunk), "finished": c.watermark is not None, "rows": c.rows}
        for c in record.chunks
        if c.keys is None
    ]
    failpoint("before-ledger")
    sinks = [_made(branch, record if branch == pipeline else existing_record(branch)) for branch in pipeline.branches]
    known = [sink["sink"] for sink in sinks]
    before = (state.read_sound(_FILE, _as_record_copy) or {}).get("sinks", [])
    made = {
        "identity": dict(record.identity),
        "sinks": [*sinks, *(sink for sink in before if sink["sink"] not in known)],
        "epoch": record.epoch,
    }
    take(state, pipeline.name)
    shapes = {target.table.label: _shape(target.table) for target in record.targets}
    state.write(_FILE, made | {"tables": shapes, "chunks": chunks})
    failpoint("after-ledger")


def _shown(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as written to the copy; its bounds are only information for users."""
    return chunk.to_dict() | ({"lower": [], "upper": []} if values_hidden() else {})


def _made(branch: Pipeline, record: Record) -> dict[str, Any]:
    targets = {target.table.label: [target.schema, target.name] for target in record.targets}
    mode = record.identity["mode"]
    return {"sink": sink_of(branch).identity(), "type": branch.sink.type, "mode": mode, "targets": targets}


def _shape(table: Table) -> dict[str, Any]:
    """Return a table's definition; only information for users."""
    columns = [[column.name, column.type, column.not_null] for column in table.columns]
    return {"columns": columns, "key": list(table.key), "replica_identity": table.replica_identity}


def read_grid(state: State) -> list[dict[str, Any]]:
    """Return the progress of the tables chunk by chunk, as :func:`.chunk_grid` does, without querying a server.

    The rows of chunks that were finished after the copy was written are unknown.
    """
    found = state.read_sound(_FILE, _with_chunks)
    if found is None:
        return []
    planned = {(c["table"], c["index"]): (c["finished"], c["rows"]) for c in found["chunks"]}
    return chunk_grid(planned, [beat for beat in read_heartbeats(state) if beat.epoch >= found["epoch"]])


def read_record_copy(pipeline: Pipeline, state: State) -> RecordCopy | None:
    """Read the copy.

    :returns: the copy with mode and targets of the first sink that it has; ``None`` if there is no copy, or if it has
        none of the sinks, whatever their addresses are.
    :raises StateDamaged: if it cannot be read, so that the pipeline's own objects cannot be recognized.
    """
    found = state.read_as(_FILE, _as_record_copy)
    if found is None:
        return None
    for branch in pipeline.branches:
        identity = sink_of(branch).identity()
        for made in found["sinks"]:
            if made["sink"] == identity:
                targets = {label: (schema, name) for label, (schema, name) in made["targets"].items()}
                return RecordCopy(found["identity"] | {"mode": made["mode"]}, targets)
    return None


def _as_record_copy(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["identity"], dict[str, Any], "identity")
    as_type(values["identity"]["source"], str, "identity.source")
    as_type(values["epoch"], int, "epoch")
    for sink in values["sinks"]:
        as_type(sink["sink"], dict[str, Any], "sink")
        as_type(sink["mode"], str, "mode")
        as_type(sink["targets"], dict[str, tuple[str, str]], "targets")
    return values


def _with_chunks(values: dict[str, Any]) -> dict[str, Any]:
    names = {"table": str, "index": int, "finished": bool, "rows": int}
    for chunk in values["chunks"]:
        for name, kind in names.items():
            as_type(chunk[name], kind, f"chunks.{name}")
    return _as_record_copy(values)


def require_same_source(pipeline: Pipeline, state: State) -> None:
    """Refuse a pipeline if a sink's record, or the copy of it, was written for another kind of source.

    :raises ConfigError: if it was; names both kinds.
    """
    for branch in pipeline.branches:
        known = sink_of(branch).record() or read_record_copy(branch, state)
        if known is not None:
            require_kind(pipeline.source.type, known.identity)


def forget_record_copy(state: State) -> None:
    """Remove the copy, so that no object is recognized as the pipeline's own any more."""
    state.remove(_FILE)
