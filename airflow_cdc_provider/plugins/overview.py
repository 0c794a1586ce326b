"""What the page CDC shows of a pipeline, put together from what its jobs have left in its state.

LSNs are strings, since JavaScript rounds large integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.budget import Budget
from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.grid import Place, chunk_grid, places
from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.engine.run import STREAM
from airflow_cdc_provider.engine.state import Heartbeat
from airflow_cdc_provider.plugins.pipeline_files import PipelineFile
from airflow_cdc_provider.plugins.reports import Report
from airflow_cdc_provider.plugins.slot_polls import Poll

Values: TypeAlias = dict[str, Any]

FRESH_SECONDS = 30.0
"""What a job has said of its slot for so long is taken for what is."""
CELLS = 240
"""Cells of a table's grid; tables of more chunks have several in a cell."""
_TREND_POINTS = 32
_OF_SLOT = ("restart_lsn", "confirmed_flush_lsn", "retained_bytes")


def condition(report: Report) -> str:
    """The state of a pipeline in a word: that of ``airflow-cdc status``, and ``lost`` when its job is gone unheard."""
    if report.unreadable is not None:
        return "unreadable"
    alive = _alive(report)
    if alive:
        if any("restart" in beat.progress for beat in alive):
            return "restarting"
        return "streaming" if any(beat.part == STREAM for beat in alive) else "snapshotting"
    if report.error is not None:
        return "failed"
    if not report.beats:
        return "new"
    latest = max(report.beats, key=lambda beat: (beat.epoch, beat.at))
    return "stopped" if latest.ended else "lost"


def wants_poll(report: Report, now: float) -> bool:
    """Whether a server must be asked for the slot, as no job says how it is."""
    slot = _reported_slot(report)
    return bool(report.beats) and (slot is None or now - slot["at"] > FRESH_SECONDS)


def summarize(file: PipelineFile, report: Report, poll: Poll | None, now: float) -> Values:
    """A pipeline as a line among others.

    :param poll: what its server has said of the slot.
    :param now: seconds since 1970.
    """
    pipeline = file.pipeline
    common: Values = {"name": file.name, "file": str(file.path), "state": "invalid"}
    if pipeline is None:
        return common | {"error": file.error.as_dict() if file.error else None}
    alive = _alive(report)
    samples = report.history["samples"] if report.history else []
    last = samples[-1] if samples else {}
    slot = _slot(pipeline, report, poll, last)
    fresh = bool(alive) and bool(samples) and now - last["at"] <= FRESH_SECONDS
    snapshot = _snapshot(alive)
    return common | {
        "state": condition(report),
        "epoch": max((beat.epoch for beat in report.beats), default=None),
        "seen_at": max((beat.at for beat in report.beats), default=None),
        "rows_per_second": snapshot["rows_per_second"] if snapshot else last["rows_per_second"] if fresh else None,
        "lag_seconds": _progress(alive, "lag_seconds"),
        "lag_messages": _progress(alive, "lag_messages"),
        "lag_bytes": slot["lag_bytes"] if slot and slot["lag_bytes"] is not None else _progress(alive, "lag_bytes"),
        "slot": slot,
        "trend": _trend([sample["retained_bytes"] for sample in samples if sample["retained_bytes"] is not None]),
        "snapshot": snapshot,
        "waiting": _progress(alive, "waiting"),
        "restart": _progress(alive, "restart"),
        "error": _error(report),
    }


def describe(file: PipelineFile, report: Report, poll: Poll | None, now: float) -> Values:
    """A pipeline with all that is known of it; see :func:`summarize`."""
    summary = summarize(file, report, poll, now)
    pipeline = file.pipeline
    if pipeline is None:
        return summary
    history = report.history or {"samples": [], "batches": [], "errors": []}
    return summary | {
        "captured": list(pipeline.captured),
        "reads_topics": pipeline.topics is not None,
        "sinks": [f"{sink.type} ({sink.mode})" for sink in pipeline.sinks],
        "series": _series(history["samples"]),
        "batches": history["batches"][::-1],
        "errors": history["errors"][::-1],
        "tables": _tables(report),
        "jobs": [
            {
                "part": beat.part,
                "owner": str(beat.owner),
                "epoch": beat.epoch,
                "at": beat.at,
                "state": "alive" if beat.alive else "ended" if beat.ended else "lost",
            }
            for beat in sorted(report.beats, key=lambda beat: -beat.at)
        ],
    }


def _alive(report: Report) -> list[Heartbeat]:
    return [beat for beat in report.beats if beat.alive]


def _progress(beats: Iterable[Heartbeat], key: str) -> Any:
    """The first that one of the jobs says of something."""
    return next((beat.progress[key] for beat in beats if beat.progress.get(key) is not None), None)


def _error(report: Report) -> Mapping[str, Any] | None:
    if report.unreadable is not None:
        return report.unreadable.as_dict()
    return next(
        (beat.progress["restart"]["error"] for beat in _alive(report) if "restart" in beat.progress), report.error
    )


# -- the slot ----------------------------------------------------------------------------------------


def _reported_slot(report: Report) -> Values | None:
    """What the jobs have last said of the slot."""
    found = [
        {"at": beat.at, **beat.progress["slot"], "applied_lsn": beat.progress.get("applied_lsn")}
        for beat in _alive(report)
        if beat.progress.get("slot")
    ]
    found += [sample for sample in (report.history or {}).get("samples", ())[-1:] if sample["restart_lsn"]]
    return max(found, key=lambda each: float(each["at"]), default=None)


def _slot(pipeline: Pipeline, report: Report, poll: Poll | None, last: Mapping[str, Any]) -> Values | None:
    """The slot's present state, as the one says who saw it last, and where it stands in the log."""
    if pipeline.topics is not None:
        return None
    name = {"name": pipeline.source.slot}
    reported = _reported_slot(report)
    if poll is not None and (reported is None or poll.at > reported["at"]):
        if poll.error is not None:
            trouble = {"error": poll.error.as_dict()}
            return name | (_placed(pipeline, reported) if reported else {"at": poll.at, "lag_bytes": None}) | trouble
        if poll.slot is None:
            return name | {"at": poll.at, "lag_bytes": None, "missing": True}
        applied = reported["applied_lsn"] if reported else None
        return name | _placed(pipeline, {"at": poll.at, **poll.slot.as_dict(), "applied_lsn": applied})
    return name | _placed(pipeline, reported) if reported else None


def _placed(pipeline: Pipeline, slot: Mapping[str, Any]) -> Values:
    """A slot with its budget, and the bytes of log between its positions."""
    budget = Budget(pipeline.stream.max_retained_wal, pipeline.stream.on_max_retained_wal)
    retained = slot["retained_bytes"] or 0
    restart = parse_lsn(slot["restart_lsn"])
    confirmed = max(restart, parse_lsn(slot["confirmed_flush_lsn"] or slot["restart_lsn"]))
    applied = max(confirmed, parse_lsn(slot["applied_lsn"])) if slot.get("applied_lsn") else confirmed
    end = max(applied, restart + retained)
    return {
        "at": slot["at"],
        **{key: slot[key] for key in _OF_SLOT},
        "applied_lsn": slot.get("applied_lsn"),
        "wal_status": slot.get("wal_status"),
        "active": slot.get("active"),
        "acknowledged_bytes": confirmed - restart,
        "applied_bytes": applied - confirmed,
        "lag_bytes": end - applied,
        "budget_bytes": budget.limit,
        "budget_action": budget.action,
        "level": budget.level(retained),
    }


# -- history -----------------------------------------------------------------------------------------


def _trend(values: Sequence[int]) -> list[int]:
    """Evenly chosen values, the last one included."""
    step = max(1, math.ceil(len(values) / _TREND_POINTS))
    return list(values[::-1][::step][::-1])


def _series(samples: Sequence[Mapping[str, Any]]) -> Values:
    """The samples that charts draw, as columns."""
    names = ("at", "retained_bytes", "lag_bytes", "lag_seconds", "rows_per_second")
    return {name: [sample[name] for sample in samples] for name in names}


# -- the snapshot ------------------------------------------------------------------------------------


def _snapshot(alive: Sequence[Heartbeat]) -> Values | None:
    """How far the jobs are that copy chunks at present; ``eta`` in seconds."""
    parts = [beat.progress for beat in alive if beat.progress.get("chunks")]
    if not parts:
        return None
    etas = [part["eta_seconds"] for part in parts if part.get("eta_seconds") is not None]
    return {
        **{key: sum(part[key] for part in parts) for key in ("chunks", "finished", "rows", "rows_per_second")},
        "eta": max(etas, default=None),
    }


def _tables(report: Report) -> list[Values]:
    """The chunks of each table, as a grid of a bounded number of cells."""
    if report.ledger is None:
        return []
    chunks = {(chunk["table"], chunk["index"]): chunk for chunk in report.ledger["chunks"]}
    planned = {place: (chunk["finished"], chunk["rows"]) for place, chunk in chunks.items()}
    beats = [beat for beat in report.beats if beat.epoch >= report.ledger["epoch"]]
    return [
        {key: grid[key] for key in ("table", "chunks", "finished", "rows")} | {"cells": _cells(grid, chunks)}
        for grid in chunk_grid(planned, beats)
    ]


def _cells(grid: Values, chunks: Mapping[Place, Mapping[str, Any]]) -> list[Values]:
    """A cell for each chunk, or for several in a row: the part of them that is ``done``, and whether one is running."""
    table = grid["table"]
    finished, running = (
        places([table, *each] for each in grid[name]) for name in ("finished_chunks", "running_chunks")
    )
    found = [place for place in chunks if place[0] == table]
    width = math.ceil(len(found) / CELLS)
    groups = [found[i : i + width] for i in range(0, len(found), width)]
    return [
        {
            "title": _title([chunks[place] for place in group]),
            "done": round(len(finished.intersection(group)) / len(group), 3),
            "running": bool(running.intersection(group)),
        }
        for group in groups
    ]


def _title(group: Sequence[Mapping[str, Any]]) -> str:
    first, last = Chunk.from_dict(group[0]), Chunk.from_dict(group[-1])
    return first.title if len(group) == 1 else f"{first.table}[{first.index} .. {last.index}]"
