"""The tables of a pipeline for the page CDC: the state of each, what has changed in it, and its last verification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.state.heartbeat import STREAM, Heartbeat
from airflow_cdc_provider.plugins.ledgers import Ledger, TableChunks
from airflow_cdc_provider.plugins.reports import PipelineReport

JsonObject: TypeAlias = dict[str, Any]

_UNCOUNTED: JsonObject = {"total": None, "per_minute": None, "changed_at": None, "delay": None}
_COPY = ("copying", "restarting", "starting", "reading again")


def list_tables(report: PipelineReport, state: str, error: Mapping[str, Any] | None, counted: bool) -> list[JsonObject]:
    """Return a row for each table that the pipeline has planned to copy.

    Each has its ``state``: ``waiting``, ``copying``, ``copied`` (the stream has not begun), ``reading again``, or the
    state of the pipeline. ``rows`` were found by the last verification, or else written by its last read.

    :param state: that of the pipeline, see :mod:`.conditions`.
    :param counted: whether its stream counts operations; those of topics do not.
    :param error: the pipeline's current error; it is the ``cause`` of the tables that it names.
    """
    if report.ledger is None:
        return []
    activity = activity_of(report.beats)
    streaming = any(beat.alive and beat.part == STREAM for beat in report.beats)
    rows = []
    for chunks, (finished, running) in report.ledger.progress(report.beats):
        verified = report.verified.get(chunks.table)
        changed = activity.get(chunks.table)
        rows.append(
            {
                "table": chunks.table,
                "state": _state(chunks, finished, running, report, state),
                "cause": error["message"] if error and _names(error["message"], chunks.table) else None,
                "chunks": len(chunks.indices),
                "finished": finished,
                "rows": verified.rows if verified is not None else chunks.rows,
                "verified": asdict(verified) if verified is not None else None,
                **(_counts(changed, streaming) if counted else _UNCOUNTED),
            }
        )
    return rows


def show_table(report: PipelineReport, row: JsonObject, views: Iterable[Mapping[str, Any]]) -> JsonObject:
    """Return a table with its chunks, definition, targets, views and errors.

    :param row: its row of :func:`list_tables`.
    :param views: the states of the pipeline's views.
    """
    ledger: Ledger = report.ledger  # type: ignore[assignment]
    table = row["table"]
    errors = (report.history or {}).get("errors", [])
    return row | {
        **ledger.cells(table, report.beats),
        "shape": ledger.shapes.get(table),
        "targets": [f"{kind} {'.'.join(names[table])}".strip() for kind, names in ledger.targets if table in names],
        "views": [{"view": view["view"], "state": view["state"]} for view in views if table in view.get("tables", ())],
        "errors": [error for error in reversed(errors) if _names(error["message"], table)],
    }


def activity_of(beats: Sequence[Heartbeat]) -> Mapping[str, Mapping[str, Any]]:
    """Return by table what the last stream has reported that it applied."""
    streams = [beat for beat in beats if beat.part == STREAM]
    activity: Mapping[str, Mapping[str, Any]] = streams[0].progress.get("activity", {}) if streams else {}
    return activity


def _counts(changed: Mapping[str, Any] | None, streaming: bool) -> JsonObject:
    if changed is None:
        return {"total": [0, 0, 0], "per_minute": [0, 0, 0] if streaming else None, "changed_at": None, "delay": None}
    return {
        "total": [changed["inserts"], changed["updates"], changed["deletes"]],
        "per_minute": changed["per_minute"] if streaming else None,
        "changed_at": changed["changed_at"],
        "delay": max(0.0, round(changed["applied_at"] - changed["changed_at"], 3)),
    }


def _state(chunks: TableChunks, finished: int, running: bool, report: PipelineReport, state: str) -> str:
    if chunks.table in report.rereads and any(beat.alive for beat in report.beats):
        return "reading again"
    if finished == len(chunks.indices):
        return "copied" if state in _COPY else state
    if state not in _COPY:
        return state
    return "copying" if running or finished else "waiting"


def _names(message: str, table: str) -> bool:
    """Return whether an error names a table, and not only one whose name begins or ends like it."""
    return re.search(rf"(?<![\w.]){re.escape(table)}(?!\w)", message) is not None
