"""The error that ended the last run, and requests to stop, as stored in the state."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    Fenced,
)
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.announcement import announcements
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import (
    PROVISION,
    Owner,
    read_heartbeats,
)
from airflow_cdc_provider.engine.state.history import History
from airflow_cdc_provider.engine.state.stops import note_stop

STOP_FILE = "stop.json"
ERROR_FILE = "error.json"


def record_error(state: State, part: str, error: CdcError) -> None:
    """Write an error into the state for ``status`` and Airflow; for a part or command without a :class:`Run`."""
    note_error(state, part, error)
    state.write(ERROR_FILE, as_recorded(error, part))


def note_error(state: State, part: str, error: CdcError) -> None:
    """Write an error only into the history, for a command that the pipeline does not depend on."""
    history = History(state, part)
    history.error(error)
    history.write()
    error.noted = True


def is_of_later_run(state: State, epoch: int, error: CdcError) -> bool:
    """Return whether an error only means that another run has taken over, which then owns the state."""
    return isinstance(error, Fenced) and any(beat.epoch > epoch for beat in read_heartbeats(state))


def as_recorded(error: CdcError, part: str) -> dict[str, Any]:
    return error.as_dict() | {"retry": error.retry.value, "part": part, "at": round(time.time(), 3)}


def last_error(state: State) -> dict[str, Any] | None:
    """Return the error that ended the last run or a later command, with its ``part`` and ``at``, if there is one."""
    return state.read_sound(ERROR_FILE, _recorded)


def _recorded(values: dict[str, Any]) -> dict[str, Any]:
    for name in ("kind", "message", "solution"):
        as_type(values[name], str, name)
    return values


def forget_error(state: State, part: str) -> None:
    """Remove the last error if it belongs to a part or command that works now; provisioning begins a new run."""
    error = last_error(state)
    if error is not None and part in (PROVISION, error.get("part")):
        state.remove(ERROR_FILE)


def stop_requested(state: State, owner: Owner) -> bool:
    """Return whether :func:`request_stop` has asked a process that was not submitted."""
    return asdict(owner) in (state.read_sound(STOP_FILE, _owners) or ())


def _owners(values: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = as_type(values["owners"], list[dict[str, Any]], "owners")
    return found


def request_stop(state: State, by: str) -> list[str]:
    """Ask the jobs that are alive to end after their current unit, and Airflow not to restart those that died.

    Later jobs are not affected.

    :param by: the user who asks.
    :returns: the parts that were asked.
    """
    alive = [beat for beat in read_heartbeats(state) if beat.alive]
    working = {beat.owner for beat in alive}
    alive += [beat for beat in announcements(state) if beat.owner not in working]
    owners = [asdict(beat.owner) for beat in alive if beat.submission is None]
    if owners:
        state.write(STOP_FILE, {"owners": owners})
    submitted = {each.id: each.part for each in submission.awaited(state)}
    # A job that is alive need not be the latest of its part: another Dag may have started one that failed.
    submitted |= {beat.submission: beat.part for beat in alive if beat.submission is not None}
    for id_ in submitted:
        submission.ask_to_stop(state, id_, submission.Asker.USER)
    parts = sorted({*(beat.part for beat in alive), *submitted.values()})
    if parts:
        note_stop(state, by, parts, [beat.owner for beat in alive])
    return parts
