"""The state of a pipeline as users say it: live, catching up, idle until the next run, stopped by a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.state.heartbeat import RESNAPSHOT, STREAM, Heartbeat
from airflow_cdc_provider.plugins.dags import CdcDag
from airflow_cdc_provider.plugins.reports import PipelineReport

LIVE_SECONDS = 60.0
"""Seconds of lag beyond which a stream is catching up."""


@dataclass(frozen=True)
class Condition:
    """The state of a pipeline.

    :param state: ``unreadable``, ``restarting``, ``live``, ``catching up``, ``reading again``, ``copying``,
        ``starting``, ``failed``, ``new``, ``paused``, ``stopped`` or ``idle``.
    :param by: the user who has stopped it.
    :param next_run: time of the next scheduled run of the Dag that runs only it, in seconds since 1970.
    """

    state: str
    by: str | None = None
    next_run: float | None = None


def condition(report: PipelineReport, slot: Mapping[str, Any] | None = None, dag: CdcDag | None = None) -> Condition:
    """Return the state of a pipeline.

    :param slot: the known state of its slot.
    :param dag: the Dag that runs only this pipeline.
    """
    if report.unreadable is not None:
        return Condition("unreadable")
    alive = [beat for beat in report.beats if beat.alive]
    if alive:
        return Condition(_at_work(alive))
    if report.starting:
        return Condition("starting")
    if report.error is not None or (slot and slot.get("trouble")):
        return Condition("failed")
    if not report.beats:
        return Condition("new")
    by = report.stop.by if report.stop is not None else None
    if dag is not None and dag.is_paused:
        return Condition("paused", by)
    if dag is not None and dag.next_run is not None:
        return Condition("idle", by, dag.next_run)
    return Condition("stopped" if by is not None else "idle", by)


def _at_work(alive: list[Heartbeat]) -> str:
    if any("restart" in beat.progress for beat in alive):
        return "restarting"
    stream = next((beat for beat in alive if beat.part == STREAM), None)
    if stream is not None:
        return "catching up" if (stream.progress.get("lag_seconds") or 0.0) > LIVE_SECONDS else "live"
    return "reading again" if all(beat.part == RESNAPSHOT for beat in alive) else "copying"
