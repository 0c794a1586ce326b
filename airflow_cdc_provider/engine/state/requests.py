"""Requests to re-read tables, left in the state for the live stream, which fulfills them between two units.

A request is a file. Its author may choose the name in advance, so that an author that was killed finds it again. The
file remains until the request is fulfilled, and states what the request waits for; then it is replaced by the outcome.
If no process is left to fulfill a request, the author withdraws it and does the work itself. It is harmless if both do
the work at the same time, because rows that are read twice are the source's rows.
"""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import Any

from airflow_cdc_provider.engine.core.errors import StateDamaged
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STREAM, read_heartbeats

REQUESTS = "requests"
OUTCOMES = "outcomes"
_REREADS = 20


class Standing(StrEnum):
    """The state of a request, for processes that wait for it."""

    ENDED = "ended"
    """It has an outcome."""
    BUSY = "busy"
    """A process is working that will fulfill it, or whose end must be awaited."""
    FREE = "free"
    """It does not exist, and can be made: a stream is alive, or no job prevents the author from doing the work."""
    ORPHANED = "orphaned"
    """It exists, and no job is alive that would fulfill it."""


def new_name() -> str:
    """Return a name for a request; later names sort after earlier ones."""
    return f"{time.time():.6f}-{uuid.uuid4().hex[:8]}"


def withdraw(state: State, name: str) -> bool:
    """Withdraw a request; a stream that is already reading for it finishes that table.

    :returns: whether it still existed.
    """
    there = _left(state, name)
    state.remove(request_file(REQUESTS, name))
    return there


def outcome(state: State, name: str) -> dict[str, Any] | None:
    """Return the outcome of a request.

    :returns: ``rows`` by table, ``ended_at`` in seconds since 1970, and ``error`` with kind, message, solution and
        retry if a table could not be read. ``None`` if the request has not ended, or ended long ago: if there are more
        than :data:`MOST_OUTCOMES`, the older half is removed.
    """
    return state.read_sound(request_file(OUTCOMES, name), as_outcome)


def waiting(state: State, name: str) -> str | None:
    """Return what a request waits for, if the stream has reported it."""
    found = state.read_sound(request_file(REQUESTS, name), dict[str, Any])
    return found.get("waiting") if found else None


def standing(state: State, name: str) -> Standing:
    """Return the state of a request."""
    if outcome(state, name) is not None:
        return Standing.ENDED
    alive = [beat.part for beat in read_heartbeats(state) if beat.alive]
    if _left(state, name):
        return Standing.BUSY if alive else Standing.ORPHANED
    return Standing.FREE if STREAM in alive or not alive else Standing.BUSY


def read_requested(state: State) -> frozenset[str]:
    """Return the labels of the tables that requests name and that have not been read again yet."""
    found = [state.read_sound(name, as_request) for name in state.names(REQUESTS)]
    return frozenset(label for each in found if each is not None for label in each["tables"])


def read_rereads(state: State, table: str) -> list[dict[str, Any]]:
    """Return the re-reads of a table among the latest requests to streams, oldest first.

    Those that failed are not among them, because the history has their errors.

    :returns: ``at`` in seconds since 1970, and the number of ``rows``.
    """
    outcomes = (state.read_sound(name, as_outcome) for name in state.names(OUTCOMES)[-_REREADS:])
    return [
        {"at": each["ended_at"], "rows": each["rows"][table]}
        for each in outcomes
        if each is not None and table in each["rows"]
    ]


def request_file(folder: str, name: str) -> str:
    return f"{folder}/{name}.json"


def _left(state: State, name: str) -> bool:
    """Return whether a request exists; a damaged one counts, because the stream writes an outcome for it as well."""
    try:
        return state.read(request_file(REQUESTS, name)) is not None
    except StateDamaged:
        return True


def as_request(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["tables"], list[str], "tables")
    as_type(values["where"], str | None, "where")
    tuple(map(TableRule.from_dict, values["rules"]))
    as_type(values.get("rows", {}), dict[str, int], "rows")
    as_type(values.get("have", {}), dict[str, list[int]], "have")
    as_type(values.get("error"), dict[str, str] | None, "error")
    return values


def as_outcome(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["rows"], dict[str, int], "rows")
    as_type(values["ended_at"], float, "ended_at")
    if "error" in values:
        for name in ("kind", "message", "solution", "retry"):
            as_type(values["error"][name], str, f"error.{name}")
    return values
