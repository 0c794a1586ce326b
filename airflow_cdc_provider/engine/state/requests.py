"""Requests to read tables again, left in the state for the live stream, which carries them out between two units.

A request is a file with a name that its author may have chosen before, so that an author who was killed finds it again.
It stays as long as something of it has not been done, and says what it waits for; in its place comes the outcome, which
says how it ended. An author withdraws what nobody is there to do, and does it himself. That two do the same in between
is harmless: rows that are read twice are the source's rows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    CannotFollow,
    CdcError,
    ConfigError,
    ForeignTable,
    LimitExceeded,
    MissingPrivilege,
    SchemaChanged,
    StateDamaged,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline, TableRule
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure, is_outage
from airflow_cdc_provider.engine.runs.run import STREAM, Run
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import read_again
from airflow_cdc_provider.engine.state.files import State, read_heartbeats

MOST_OUTCOMES = 200

_REQUESTS = "requests"
_OUTCOMES = "outcomes"


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


def request(pipeline: Pipeline, tables: list[str], where: str | None, name: str | None = None) -> str:
    """Leave a request to read tables again, or for the first time; the live stream takes it between two units.

    The rules of the file go with it, since it may have been edited after the stream began.

    :param where: read only the rows that match this SQL condition on either side.
    :param name: one of :func:`new_name`; leaving it twice is leaving it once.
    :returns: the name of the request.
    """
    name = name or new_name()
    rules = [asdict(rule) for rule in pipeline.source.tables]
    State(pipeline.state).write(_file(_REQUESTS, name), {"tables": tables, "where": where, "rules": rules})
    failpoint("after-request")
    return name


def withdraw(state: State, name: str) -> bool:
    """Take a request back; a stream that is reading for it finishes that table.

    :returns: whether it was still there.
    """
    there = _left(state, name)
    state.remove(_file(_REQUESTS, name))
    return there


def outcome(state: State, name: str) -> dict[str, Any] | None:
    """How a request ended: ``rows`` by table, ``ended_at`` in seconds since 1970, and ``error`` with kind, message,
    solution and retry if a table could not be read. ``None`` while it has not ended, and when that is long ago: of
    more than :data:`MOST_OUTCOMES` the older half is forgotten."""
    return state.read_sound(_file(_OUTCOMES, name), _as_outcome)


def waiting(state: State, name: str) -> str | None:
    """What a request waits for, as far as the stream has said so."""
    found = state.read_sound(_file(_REQUESTS, name), dict[str, Any])
    return found.get("waiting") if found else None


def standing(state: State, name: str) -> Standing:
    """Tell how a request stands."""
    if outcome(state, name) is not None:
        return Standing.ENDED
    alive = [beat.part for beat in read_heartbeats(state) if beat.alive]
    if _left(state, name):
        return Standing.BUSY if alive else Standing.ORPHANED
    return Standing.FREE if STREAM in alive or not alive else Standing.BUSY


def _file(folder: str, name: str) -> str:
    return f"{folder}/{name}.json"


def _left(state: State, name: str) -> bool:
    """Whether there is a request of a name, be it a damaged one, to which the stream gives an outcome as well."""
    try:
        return state.read(_file(_REQUESTS, name)) is not None
    except StateDamaged:
        return True


def _as_request(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["tables"], list[str], "tables")
    as_type(values["where"], str | None, "where")
    tuple(map(TableRule.from_dict, values["rules"]))
    as_type(values.get("rows", {}), dict[str, int], "rows")
    as_type(values.get("have", {}), dict[str, list[int]], "have")
    as_type(values.get("error"), dict[str, str] | None, "error")
    return values


def _as_outcome(values: dict[str, Any]) -> dict[str, Any]:
    as_type(values["rows"], dict[str, int], "rows")
    as_type(values["ended_at"], float, "ended_at")
    if "error" in values:
        for name in ("kind", "message", "solution", "retry"):
            as_type(values["error"][name], str, f"error.{name}")
    return values


_IN_VAIN = (
    CannotFollow,
    ConfigError,
    ForeignTable,
    LimitExceeded,
    MissingPrivilege,
    TargetConflict,
    ValueRefused,
)
"""Of errors those that another attempt meets as well."""


def take_requests(run: Run, branches: Sequence[tuple[Run, Barriers]]) -> tuple[bool, str | None]:
    """Carry out the requests that have been left.

    What older transactions keep from being read stays requested, and so does all of a request that an outage breaks
    off. What cannot be read is given up, and said in the state: the stream must not die of it again and again.

    :param branches: the run's, each with the barriers of its re-reads.
    :returns: whether anything has been read again, and what requests wait for.
    :raises StreamFailed: when a connection is lost, or a server has no room.
    """
    done, waits = False, None
    for file in run.state.names(_REQUESTS):
        try:
            wanted = run.state.read_as(file, _as_request)
        except StateDamaged as e:
            _end(run.state, file, {"rows": {}, "error": _give_up(run, e)})
            continue
        if wanted is None:  # withdrawn
            continue
        run.capture(tuple(map(TableRule.from_dict, wanted["rules"])))
        rows, error, blocked = dict(wanted.get("rows", {})), wanted.get("error"), []
        have: dict[str, list[int]] = {label: list(sinks) for label, sinks in wanted.get("have", {}).items()}
        for label in wanted["tables"]:
            try:
                for number, (branch, barriers) in enumerate(branches):
                    if number not in have.setdefault(label, []):  # else while it waited for another sink
                        rows[label] = read_again(branch, label, barriers, wanted["where"])
                        have[label].append(number)
                        done = True
            except (Blocked, SchemaChanged) as e:
                waits = e.message
                blocked.append(label)
            except DRIVER_ERRORS as e:
                failure = driver_failure(e, f"reading {label} again")
                if is_outage(e):
                    raise failure from e
                error = _give_up(run, failure)
            except _IN_VAIN as e:
                error = _give_up(run, e)
        told = {"rows": rows} | ({"error": error} if error else {})
        if not blocked:
            _end(run.state, file, told)
        elif run.state.read(file) == wanted:  # else it has been withdrawn, or left again
            have = {label: have[label] for label in blocked if have[label]}
            postponed = wanted | told | {"tables": blocked, "waiting": waits, "have": have}
            if postponed != wanted:
                run.state.write(file, postponed)
    return done, waits


def _give_up(run: Run, error: CdcError) -> dict[str, str]:
    """Say in the state that a table cannot be read; what an outcome says of it."""
    run.record_error(error)
    return error.as_dict() | {"retry": error.retry.value}


def _end(state: State, file: str, told: Mapping[str, Any]) -> None:
    """Put the outcome in the place of a request, and forget those that ended long ago."""
    failpoint("before-outcome")
    state.write(f"{_OUTCOMES}/{file.rpartition('/')[2]}", {**told, "ended_at": time.time()})
    failpoint("after-outcome")
    state.remove(file)
    outcomes = state.names(_OUTCOMES)
    if len(outcomes) > MOST_OUTCOMES:
        # Not by their names, which say when they were left: who waits for the last one would not find it.
        outcomes.sort(key=lambda name: (state.read_sound(name, _as_outcome) or {}).get("ended_at", 0.0))
        for old in outcomes[: -MOST_OUTCOMES // 2]:
            state.remove(old)


def requested(run: Run, label: str) -> bool:
    """Whether there is a request to read a table whole, as it is now."""
    wanted = (run.state.read_sound(name, _as_request) for name in run.state.names(_REQUESTS))
    return any(each["where"] is None and label in each["tables"] for each in wanted if each)
