"""``status``: the state of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from airflow_cdc_provider.engine.commands.attention import (
    NEEDED,
    STARTING,
    problem_in_state,
    starting,
)
from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Record, require_kind
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.runs.view_states import branch_view_states
from airflow_cdc_provider.engine.sinks.all_records import merged
from airflow_cdc_provider.engine.sources.contract import SourceStatus, blocking_error, source_of
from airflow_cdc_provider.engine.state.chunk_progress import chunk_grid
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STREAM, Heartbeat, read_heartbeats


def status(pipeline: Pipeline) -> dict[str, Any]:
    """Return the state of the pipeline; while a job is alive, unreachable servers are part of the result.

    :raises ConnectionFailed: if a server cannot be reached and no job is alive.
    """
    state = State(pipeline.state)
    all_beats = read_heartbeats(state)
    beats = [beat for beat in all_beats if beat.alive]
    unreachable: dict[str, Any] = {}
    record: Record | None = None
    records: dict[str, Record | None] = {}
    readers = []
    views: list[dict[str, Any]] = []
    several = len(pipeline.sinks) > 1
    for branch in pipeline.branches:
        place = branch.sink.place
        try:
            records[place] = sink_of(branch).record()
            if records[place] is not None:
                readers.append(partial(existing_record, branch))
            views += [state | ({"sink": place} if several else {}) for state in branch_view_states(branch)]
        except ConnectionFailed as e:
            unreachable[f"sink {place}" if several else "sink"] = e
    known = [record for record in records.values() if record is not None]
    if len(known) == len(pipeline.sinks):
        record = merged(known)
    foreign = blocking_error(partial(_require_kinds, pipeline, known))
    at_source = SourceStatus(trouble=foreign)
    if foreign is None:
        try:
            at_source = source_of(pipeline).status(record, readers, judge=not beats)  # a job passes the gate itself
        except ConnectionFailed as e:
            unreachable["source"] = e
    if unreachable and not beats:
        raise next(iter(unreachable.values()))
    lag_seconds = at_source.lag_seconds
    if lag_seconds is not None:  # a live stream knows whether there is anything to apply
        reported = (beat.progress.get("lag_seconds") for beat in beats if beat.part == STREAM)
        lag_seconds = next((seconds for seconds in reported if seconds is not None), lag_seconds)
    converting = converting_sinks(pipeline)
    restart = next((beat.progress["restart"] for beat in beats if "restart" in beat.progress), None)
    error = restart["error"] if restart else last_error(state)
    attention = at_source.trouble.as_dict() if at_source.trouble is not None else problem_in_state(state, all_beats)
    condition = _condition(record, beats, restart, bool(starting(state, all_beats)), attention is not None)
    return {
        "pipeline": pipeline.name,
        "state": condition,
        "attention": attention if condition == NEEDED else None,
        "epoch": record.epoch if record else next((beat.epoch for beat in beats), None),
        "consistent": record.consistent if record else False,
        "applied_lsn": format_lsn(record.applied) if record else None,
        "lag_bytes": at_source.lag_bytes,
        "lag_seconds": lag_seconds,
        "slot": at_source.slot,
        "sinks": [
            {
                "sink": place,
                "applied_lsn": format_lsn(each.applied) if each else None,
                "consistent": each.consistent if each else False,
                "converts": place in converting,
            }
            for place, each in records.items()
        ],
        "tables": _tables(record, beats) if record else [],
        "views": views,
        "jobs": [{"part": beat.part, "epoch": beat.epoch, **beat.progress} for beat in beats],
        "restart": restart,
        "waiting": next((beat.progress["waiting"] for beat in beats if "waiting" in beat.progress), None),
        "unreachable": {server: e.message for server, e in unreachable.items()},
        "last_error": error,
        **at_source.facts,
    }


def _tables(record: Record, beats: Sequence[Heartbeat]) -> list[dict[str, Any]]:
    ranges = [c for c in record.chunks if c.keys is None]
    planned = {(c.chunk.table, c.chunk.index): (c.watermark is not None, c.rows) for c in ranges}
    return chunk_grid(planned, [beat for beat in beats if beat.epoch >= record.epoch])


def _require_kinds(pipeline: Pipeline, records: Sequence[Record]) -> None:
    for record in records:
        require_kind(pipeline.source.type, record.identity)


def _condition(
    record: Record | None, beats: Sequence[Heartbeat], restart: dict[str, Any] | None, begins: bool, trouble: bool
) -> str:
    if restart:
        return "restarting"
    if beats:
        return "streaming" if STREAM in [beat.part for beat in beats] else "snapshotting"
    if begins:
        return STARTING
    if trouble:
        return NEEDED
    return "new" if record is None else "stopped"


def converting_sinks(pipeline: Pipeline) -> list[str]:
    """Return the sinks whose target tables may convert the source's values, as configured in the file."""
    return [sink.place for sink in pipeline.sinks if getattr(sink, "types", "keep") == "convert"]
