"""Requests to read tables again, left in the state for the live stream, which carries them out between two units.

A request is a file with a name that its author may have chosen before, so that an author who was killed finds it again.
It stays as long as something of it has not been done, and says what it waits for; in its place comes the outcome, which
says how it ended. An author withdraws what nobody is there to do, and does it himself. That two do the same in between
is harmless: rows that are read twice are the source's rows.
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


class Standing(StrEnum):
    """How a request stands, for who waits for it."""

    ENDED = "ended"
    """It has an outcome."""
    BUSY = "busy"
    """Somebody is at work who will carry it out, or whose end has to be awaited."""
    FREE = "free"
    """It has not been left, and can be: a stream lives, or nobody who is in the way of doing it oneself."""
    ORPHANED = "orphaned"
    """It has been left, and nobody lives who would carry it out."""


def new_name() -> str:
    """A name for a request; later ones sort behind earlier ones."""
    return f"{time.time():.6f}-{uuid.uuid4().hex[:8]}"


def withdraw(state: State, name: str) -> bool:
    """Take a request back; a stream that is reading for it finishes that table.

    :returns: whether it was still there.
    """
    there = _left(state, name)
    state.remove(request_file(REQUESTS, name))
    return there


def outcome(state: State, name: str) -> dict[str, Any] | None:
    """How a request ended: ``rows`` by table, ``ended_at`` in seconds since 1970, and ``error`` with kind, message,
    solution and retry if a table could not be read. ``None`` while it has not ended, and when that is long ago: of
    more than :data:`MOST_OUTCOMES` the older half is forgotten."""
    return state.read_sound(request_file(OUTCOMES, name), as_outcome)


def waiting(state: State, name: str) -> str | None:
    """What a request waits for, as far as the stream has said so."""
    found = state.read_sound(request_file(REQUESTS, name), dict[str, Any])
    return found.get("waiting") if found else None


def standing(state: State, name: str) -> Standing:
    """Tell how a request stands."""
    if outcome(state, name) is not None:
        return Standing.ENDED
    alive = [beat.part for beat in read_heartbeats(state) if beat.alive]
    if _left(state, name):
        return Standing.BUSY if alive else Standing.ORPHANED
    return Standing.FREE if STREAM in alive or not alive else Standing.BUSY


def request_file(folder: str, name: str) -> str:
    return f"{folder}/{name}.json"


def _left(state: State, name: str) -> bool:
    """Whether there is a request of a name, be it a damaged one, to which the stream gives an outcome as well."""
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
