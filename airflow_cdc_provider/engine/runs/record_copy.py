"""The copy of the commit record that stands in the state: which chunks are finished, and what the pipeline has made.

Nothing goes on from it. But it vouches for slot and target tables if the sink's record is lost: what is known to be
the pipeline's own may be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import values_hidden
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Record, require_kind
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.state.chunk_progress import chunk_grid
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from airflow_cdc_provider.engine.state.location import take

_FILE = "ledger.json"


@dataclass(frozen=True)
class Ledger:
    """What a pipeline was, as far as the state tells.

    :param identity: the record's.
    :param targets: by label of the source table, schema and name of its target.
    """

    identity: dict[str, Any]
    targets: dict[str, tuple[str, str]]


def write_ledger(pipeline: Pipeline, state: State, record: Record) -> None:
    """Replace the copy by what the record says now, and write down whose state it is.

    :param pipeline: or a branch of it; what is known of other sinks stays.
    """
    chunks = [
        {**_shown(c.chunk), "finished": c.watermark is not None, "rows": c.rows}
        for c in record.chunks
        if c.keys is None
    ]
    failpoint("before-ledger")
    sinks = [_made(branch, record if branch == pipeline else existing_record(branch)) for branch in pipeline.branches]
    known = [sink["sink"] for sink in sinks]
    before = (state.read_sound(_FILE, _as_ledger) or {}).get("sinks", [])
    made = {
        "identity": dict(record.identity),
        "sinks": [*sinks, *(sink for sink in before if sink["sink"] not in known)],
        "epoch": record.epoch,
    }
    take(state, pipeline.name)
    state.write(_FILE, made | {"chunks": chunks})
    failpoint("after-ledger")


def _shown(chunk: Chunk) -> dict[str, Any]:
    """A chunk as it stands in the copy, which needs no bounds but for those who look at it."""
    return chunk.to_dict() | ({"lower": [], "upper": []} if values_hidden() else {})


def _made(branch: Pipeline, record: Record) -> dict[str, Any]:
    targets = {target.table.label: [target.schema, target.name] for target in record.targets}
    return {"sink": sink_of(branch).identity(), "mode": record.identity["mode"], "targets": targets}


def read_grid(state: State) -> list[dict[str, Any]]:
    """How far the tables are, chunk by chunk, as :func:`.chunk_grid` returns it: for those who ask no server.

    The rows of chunks that have been finished since the copy was written are not known here.
    """
    found = state.read_sound(_FILE, _with_chunks)
    if found is None:
        return []
    planned = {(c["table"], c["index"]): (c["finished"], c["rows"]) for c in found["chunks"]}
    return chunk_grid(planned, [beat for beat in read_heartbeats(state) if beat.epoch >= found["epoch"]])


def read_ledger(pipeline: Pipeline, state: State) -> Ledger | None:
    """The copy; ``None`` without one, or when it knows none of the sinks, whatever their addresses.

    :returns: with mode and targets of the first sink that it knows.
    :raises StateDamaged: when it cannot be read: what it vouches for would not be known for the pipeline's own.
    """
    found = state.read_as(_FILE, _as_ledger)
    if found is None:
        return None
    for branch in pipeline.branches:
        identity = sink_of(branch).identity()
        for made in found["sinks"]:
            if made["sink"] == identity:
                targets = {label: (schema, name) for label, (schema, name) in made["targets"].items()}
                return Ledger(found["identity"] | {"mode": made["mode"]}, targets)
    return None


def _as_ledger(values: dict[str, Any]) -> dict[str, Any]:
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
    return _as_ledger(values)


def require_same_source(pipeline: Pipeline, state: State) -> None:
    """Refuse a pipeline of which a sink's record, or the copy of it, was made with another kind of source.

    :raises ConfigError: naming both.
    """
    for branch in pipeline.branches:
        known = sink_of(branch).record() or read_ledger(branch, state)
        if known is not None:
            require_kind(pipeline.source.type, known.identity)


def forget_ledger(state: State) -> None:
    """Remove the copy, so that nothing is taken for the pipeline's own any more."""
    state.remove(_FILE)
