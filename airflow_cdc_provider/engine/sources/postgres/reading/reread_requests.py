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

    The rules of the pipeline file go with it, since the file may have been edited after the stream began.

    :param where: read only the rows that match this SQL condition on either side.
    :param name: one of :func:`new_name`; a request that is left twice is carried out once.
    :returns: the name of the request.
    """
    name = name or new_name()
    rules = [asdict(rule) for rule in postgres_settings(pipeline).tables]
    State(pipeline.state).write(request_file(REQUESTS, name), {"tables": tables, "where": where, "rules": rules})
    failpoint("after-request")
    return name


_PERMANENT = (
    CannotFollow,
    ConfigError,
    ForeignTable,
    LimitExceeded,
    MissingPrivilege,
    TargetConflict,
    ValueRefused,
)
"""Errors that another attempt would meet as well."""


def take_requests(run: Run, branches: Sequence[tuple[Run, Barriers]]) -> tuple[bool, str | None]:
    """Carry out the requests that have been left.

    Tables that cannot be read yet because of older transactions stay requested. So does the whole of a request that an
    outage interrupts. A table that cannot be read at all is given up, with the reason in the state: otherwise the
    stream would fail because of it again and again.

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
                    if number not in have.setdefault(label, []):  # else it was read while another sink had to wait
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
            except _PERMANENT as e:
                error = _give_up(run, e)
        outcome = {"rows": rows} | ({"error": error} if error else {})
        if not blocked:
            _end(run.state, file, outcome)
        elif run.state.read(file) == wanted:  # else it has been withdrawn, or left again
            have = {label: have[label] for label in blocked if have[label]}
            postponed = wanted | outcome | {"tables": blocked, "waiting": waits, "have": have}
            if postponed != wanted:
                run.state.write(file, postponed)
    return done, waits


def _give_up(run: Run, error: CdcError) -> dict[str, str]:
    """Record in the state that a table cannot be read; return the error as an outcome has it."""
    run.record_error(error)
    return error.as_dict() | {"retry": error.retry.value}


def _end(state: State, file: str, outcome: Mapping[str, Any]) -> None:
    """Replace a request by its outcome, and remove outcomes of requests that ended long ago."""
    failpoint("before-outcome")
    state.write(f"{OUTCOMES}/{file.rpartition('/')[2]}", {**outcome, "ended_at": time.time()})
    failpoint("after-outcome")
    state.remove(file)
    outcomes = state.names(OUTCOMES)
    if len(outcomes) > MOST_OUTCOMES:
        # Not by their names, which begin with the time of the request: a caller may wait for one that has just ended.
        outcomes.sort(key=lambda name: (state.read_sound(name, as_outcome) or {}).get("ended_at", 0.0))
        for old in outcomes[: -MOST_OUTCOMES // 2]:
            state.remove(old)


def requested(run: Run, label: str) -> bool:
    """Return whether there is a request to read a table as a whole, as it is now."""
    wanted = (run.state.read_sound(name, as_request) for name in run.state.names(REQUESTS))
    return any(each["where"] is None and label in each["tables"] for each in wanted if each)
