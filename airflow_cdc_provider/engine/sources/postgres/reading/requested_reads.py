"""Carries out requests to read tables again, between two units of the stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure, is_outage
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import read_again
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.requests import (
    OUTCOMES,
    REQUESTS,
    as_outcome,
    as_request,
    new_name,
    request_file,
)

MOST_OUTCOMES = 200


def request(pipeline: Pipeline, tables: list[str], where: str | None, name: str | None = None) -> str:
    """Leave a request to read tables again, or for the first time; the live stream takes it between two units.

    The rules of the file go with it, since it may have been edited after the stream began.

    :param where: read only the rows that match this SQL condition on either side.
    :param name: one of :func:`new_name`; leaving it twice is leaving it once.
    :returns: the name of the request.
    """
    name = name or new_name()
    rules = [asdict(rule) for rule in postgres_settings(pipeline).tables]
    State(pipeline.state).write(request_file(REQUESTS, name), {"tables": tables, "where": where, "rules": rules})
    failpoint("after-request")
    return name


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
    for file in run.state.names(REQUESTS):
        try:
            wanted = run.state.read_as(file, as_request)
        except StateDamaged as e:
            _end(run.state, file, {"rows": {}, "error": _give_up(run, e)})
            continue
        if wanted is None:  # withdrawn
            continue
        rules = tuple(map(TableRule.from_dict, wanted["rules"]))
        run.read_from(replace(postgres_settings(run.pipeline), tables=rules))
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
    state.write(f"{OUTCOMES}/{file.rpartition('/')[2]}", {**told, "ended_at": time.time()})
    failpoint("after-outcome")
    state.remove(file)
    outcomes = state.names(OUTCOMES)
    if len(outcomes) > MOST_OUTCOMES:
        # Not by their names, which say when they were left: who waits for the last one would not find it.
        outcomes.sort(key=lambda name: (state.read_sound(name, as_outcome) or {}).get("ended_at", 0.0))
        for old in outcomes[: -MOST_OUTCOMES // 2]:
            state.remove(old)


def requested(run: Run, label: str) -> bool:
    """Whether there is a request to read a table whole, as it is now."""
    wanted = (run.state.read_sound(name, as_request) for name in run.state.names(REQUESTS))
    return any(each["where"] is None and label in each["tables"] for each in wanted if each)
