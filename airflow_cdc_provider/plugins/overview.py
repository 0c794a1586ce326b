"""Prepares the data of a pipeline for the page CDC, from the reports of its jobs in the state.

LSNs are strings, because JavaScript rounds large integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.core.errors import GateClosed, StateDamaged
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.slot_budget import Budget
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.sources.postgres.settings import has_slot, postgres_settings
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat
from airflow_cdc_provider.engine.state.submission import Submission
from airflow_cdc_provider.hooks.views import views_of
from airflow_cdc_provider.plugins.conditions import condition
from airflow_cdc_provider.plugins.dags import CdcDag
from airflow_cdc_provider.plugins.pipeline_files import PipelineFile
from airflow_cdc_provider.plugins.reports import PipelineReport
from airflow_cdc_provider.plugins.slot_polls import SlotAnswer
from airflow_cdc_provider.plugins.tables import list_tables, show_table
from airflow_cdc_provider.remedy import in_airflow

JsonObject: TypeAlias = dict[str, Any]

FRESH_SECONDS = 30.0
"""Seconds for which a slot position reported by a job counts as current."""
_TREND_POINTS = 32
_OF_SLOT = ("restart_lsn", "confirmed_flush_lsn", "retained_bytes")


Telling: TypeAlias = Callable[[PipelineFile, PipelineReport, SlotAnswer | None, float, CdcDag | None], JsonObject]


def guarded(
    tell: Telling,
    file: PipelineFile,
    report: PipelineReport,
    poll: SlotAnswer | None,
    now: float,
    dag: CdcDag | None = None,
) -> JsonObject:
    """Describe a pipeline; one with unexpected contents in its state is ``unreadable`` and does not affect others.

    :param tell: :func:`summarize` or :func:`describe`.
    """
    try:
        return tell(file, report, poll, now, dag)
    except Exception as e:  # the files of a state may have any contents
        place = f"{file.pipeline.state}/{_culprit(tell, file, report, now)}" if file.pipeline else str(file.path)
        damaged = StateDamaged(
            f"{place} has a structure that the page does not know: {type(e).__name__} {e}",
            "Delete that file; jobs write it again. If a job of another version writes it, install the same version of"
            " the provider everywhere.",
        )
        return tell(file, PipelineReport(unreadable=damaged), None, now, dag)


def _culprit(tell: Telling, file: PipelineFile, report: PipelineReport, now: float) -> str:
    """Return the file of a state that causes the failure."""
    parts = {f"jobs/{beat.part}.json": PipelineReport((beat,)) for beat in report.beats}
    parts |= {"error.json": PipelineReport(error=report.error), "history": PipelineReport(history=report.history)}
    for name, alone in parts.items():
        try:
            tell(file, alone, None, now, None)
        except Exception:
            return name
    return "ledger.json"


def wants_poll(report: PipelineReport, now: float) -> bool:
    """Return whether the server must be asked for the slot, because no job reports it."""
    try:
        slot = _reported_slot(report)
        return bool(report.beats) and (slot is None or now - slot["at"] > FRESH_SECONDS)
    except (LookupError, TypeError, ValueError):  # `guarded` reports these
        return False


def summarize(
    file: PipelineFile, report: PipelineReport, poll: SlotAnswer | None, now: float, dag: CdcDag | None = None
) -> JsonObject:
    """Return a summary of a pipeline for the list.

    :param poll: the answer of its server about the slot.
    :param now: seconds since 1970.
    :param dag: the Dag that runs only this pipeline.
    """
    pipeline = file.pipeline
    common: JsonObject = {"name": file.name, "file": str(file.path), "state": "invalid"}
    common["dag_id"] = dag.dag_id if dag is not None else None
    if pipeline is None:
        return common | {"error": file.error.as_dict() if file.error else None}
    alive = _alive(report)
    samples = report.history["samples"] if report.history else []
    last = samples[-1] if samples else {}
    slot = _slot(pipeline, report, poll, last)
    fresh = bool(alive) and bool(samples) and now - last["at"] <= FRESH_SECONDS
    snapshot = _snapshot(alive)
    errors = report.history["errors"] if report.history else []
    return common | {
        **asdict(condition(report, slot, dag)),
        "captured": list(pipeline.source.captured),
        "sinks": [{"type": sink.type, "mode": sink.mode} for sink in pipeline.sinks],
        "last_error": errors[-1] if errors else None,
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
        "error": _error(report, slot),
    }


def describe(
    file: PipelineFile, report: PipelineReport, poll: SlotAnswer | None, now: float, dag: CdcDag | None = None
) -> JsonObject:
    """Return a pipeline with all information on it; see :func:`summarize`."""
    summary = summarize(file, report, poll, now, dag)
    pipeline = file.pipeline
    if pipeline is None:
        return summary
    history = report.history or {"samples": [], "batches": [], "errors": []}
    return summary | {
        "has_slot": has_slot(pipeline),
        "series": _series(history["samples"]),
        "batches": history["batches"][::-1],
        "errors": [_for_readers(error) for error in history["errors"][::-1]],
        "tables": list_tables(report, summary["state"], summary["error"], has_slot(pipeline)),
        "stops": [{"at": stop.at, "by": stop.by, "parts": stop.parts} for stop in reversed(report.stops)],
        "views": _views(pipeline, report),
        "jobs": [
            {
                "part": beat.part,
                "owner": str(beat.owner),
                "epoch": beat.epoch,
                "at": beat.at,
                "state": "alive" if beat.alive else "ended" if beat.ended else "lost",
                **_submitted(report.submissions.get(beat.submission or "")),
            }
            for beat in sorted(report.beats, key=lambda beat: -beat.at)
        ],
    }


def describe_table(summary: JsonObject, report: PipelineReport, label: str) -> JsonObject | None:
    """Return a table of a pipeline, or ``None`` if the pipeline has no such table.

    :param summary: the pipeline as :func:`describe` returns it.
    """
    row = next((row for row in summary.get("tables", ()) if row["table"] == label), None)
    if row is None:
        return None
    shown = show_table(report, row, summary["views"])
    return shown | {"errors": [_for_readers(error) for error in shown["errors"]]}


def _submitted(submission: Submission | None) -> JsonObject:
    """Return the links of a job: its submission, the task that submitted it, and the place of its log."""
    if submission is None:
        return {"submission": None, "task": None, "log": None}
    task = asdict(submission.task) if submission.task is not None else None
    host = submission.keeper.host.partition("/")[0] if submission.keeper is not None else ""
    log = f"{submission.log} on {host}" if submission.log else None
    return {"submission": submission.id, "task": task, "log": log}


def _views(pipeline: Pipeline, report: PipelineReport) -> Sequence[JsonObject]:
    """Return the states of the views that the last stream has reported; before one has, those of the file wait."""
    beats = [beat for beat in report.beats if "views" in beat.progress]
    if not beats:
        return [{"view": view, "state": "waiting", "built_percent": 0.0} for view in views_of(pipeline)]
    views: Sequence[JsonObject] = max(beats, key=lambda beat: beat.at).progress["views"]
    return views


def _alive(report: PipelineReport) -> list[Heartbeat]:
    return [beat for beat in report.beats if beat.alive]


def _progress(beats: Iterable[Heartbeat], key: str) -> Any:
    """Return the first value that one of the jobs reports for a key."""
    return next((beat.progress[key] for beat in beats if beat.progress.get(key) is not None), None)


def _error(report: PipelineReport, slot: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if report.unreadable is not None:
        return report.unreadable.as_dict()
    waiting = (beat.progress["restart"]["error"] for beat in _alive(report) if "restart" in beat.progress)
    error = next(waiting, report.error) or (slot or {}).get("trouble")
    return None if error is None else _for_readers(error)


def _for_readers(error: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**error, "solution": in_airflow(error["solution"])}


# -- the slot ----------------------------------------------------------------------------------------


def _reported_slot(report: PipelineReport) -> JsonObject | None:
    """Return the last state of the slot that the jobs have reported."""
    found = [
        {"at": beat.at, **beat.progress["slot"], "applied_lsn": beat.progress.get("applied_lsn")}
        for beat in _alive(report)
        if beat.progress.get("slot")
    ]
    found += [sample for sample in (report.history or {}).get("samples", ())[-1:] if sample["restart_lsn"]]
    return max(found, key=lambda each: float(each["at"]), default=None)


def _slot(
    pipeline: Pipeline, report: PipelineReport, poll: SlotAnswer | None, last: Mapping[str, Any]
) -> JsonObject | None:
    """Return the slot's current state according to the latest observation, with its position in the log."""
    if not has_slot(pipeline):
        return None
    name = {"name": postgres_settings(pipeline).slot}
    reported = _reported_slot(report)
    if poll is not None and (reported is None or poll.at > reported["at"]):
        if poll.error is not None:
            unknown = {"error": poll.error.as_dict()}
            return name | (_placed(pipeline, reported) if reported else {"at": poll.at, "lag_bytes": None}) | unknown
        trouble = _trouble(pipeline, poll.slot)
        if poll.slot is None:
            return name | {"at": poll.at, "lag_bytes": None, "missing": True, "trouble": trouble}
        applied = reported["applied_lsn"] if reported else None
        seen = {"at": poll.at, **poll.slot.as_dict(), "applied_lsn": applied}
        return name | _placed(pipeline, seen) | {"trouble": trouble}
    return name | _placed(pipeline, reported) if reported else None


def _trouble(pipeline: Pipeline, slot: SlotState | None) -> Mapping[str, str] | None:
    """Return why a slot cannot continue the copy; a slot that was removed after a finished copy is not a problem."""
    name = postgres_settings(pipeline).slot
    if slot is None and pipeline.snapshot.mode != "only":
        what = f"the source has no replication slot {name}"
    elif slot is not None and slot.lost:
        what = f"the source has removed log that the replication slot {name} needs"
    else:
        return None
    return GateClosed(
        what,
        "If the pipeline is to continue, run `airflow-cdc resnapshot --all`, which recreates the slot and reads all"
        " tables again.",
    ).as_dict()


def _placed(pipeline: Pipeline, slot: Mapping[str, Any]) -> JsonObject:
    """Return a slot with its budget, and the bytes of log between its positions."""
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
    """Return evenly spaced values, the last one included."""
    step = max(1, math.ceil(len(values) / _TREND_POINTS))
    return list(values[::-1][::step][::-1])


def _series(samples: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Return the samples for the charts as columns."""
    names = ("at", "retained_bytes", "lag_bytes", "lag_seconds", "rows_per_second")
    return {name: [sample[name] for sample in samples] for name in names}


# -- the snapshot ------------------------------------------------------------------------------------


def _snapshot(alive: Sequence[Heartbeat]) -> JsonObject | None:
    """Return the progress of the jobs that are copying chunks; ``eta`` is in seconds."""
    parts = [beat.progress for beat in alive if beat.progress.get("chunks")]
    if not parts:
        return None
    etas = [part["eta_seconds"] for part in parts if part.get("eta_seconds") is not None]
    return {
        **{key: sum(part[key] for part in parts) for key in ("chunks", "finished", "rows", "rows_per_second")},
        "eta": max(etas, default=None),
    }
