"""Requests to read tables again, left in the state for the live stream, which carries them out between two units."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict

from airflow_cdc_provider.engine.barriers import Barriers
from airflow_cdc_provider.engine.config import Pipeline, TableRule
from airflow_cdc_provider.engine.drivers import DRIVER_ERRORS, driver_failure, is_outage
from airflow_cdc_provider.engine.errors import (
    Blocked,
    CannotFollow,
    ConfigError,
    ForeignTable,
    MissingPrivilege,
    SchemaChanged,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.reread import read_again
from airflow_cdc_provider.engine.run import Run, existing_record, record_error
from airflow_cdc_provider.engine.sinks.base import Record
from airflow_cdc_provider.engine.state import State

_REQUESTS = "requests"


def request(pipeline: Pipeline, tables: list[str], where: str | None) -> str:
    """Leave a request to read tables again, or for the first time; the live stream takes it between two units.

    The rules of the file go with it, since it may have been edited after the stream began.

    :param where: read only the rows that match this SQL condition on either side.
    :returns: the name of the request.
    """
    name = f"{_REQUESTS}/{time.time():.6f}-{uuid.uuid4().hex[:8]}.json"
    rules = [asdict(rule) for rule in pipeline.source.tables]
    State(pipeline.state).write(name, {"tables": tables, "where": where, "rules": rules})
    return name


def take_requests(run: Run, record: Record, barriers: Barriers) -> tuple[bool, str | None]:
    """Carry out the requests that have been left.

    What older transactions keep from being read stays requested, and so does all of a request that an outage breaks
    off. What cannot be read is given up, and said in the state: the stream must not die of it again and again.

    :returns: whether anything has been read again, and what requests wait for.
    :raises StreamFailed: when a connection is lost, or a server has no room.
    """
    done, waiting = False, None
    for name in run.state.names(_REQUESTS):
        wanted = run.state.read(name)
        blocked = []
        if wanted:
            run.capture(tuple(map(TableRule.from_dict, wanted["rules"])))
        for label in wanted["tables"] if wanted else ():
            try:
                read_again(run, record, label, barriers, wanted["where"] if wanted else None)
                record, done = existing_record(run.pipeline), True
            except (Blocked, SchemaChanged) as e:
                waiting = e.message
                blocked.append(label)
            except DRIVER_ERRORS as e:
                failure = driver_failure(e, f"reading {label} again")
                if is_outage(e):
                    raise failure from e
                record_error(run.state, failure)
            except (ConfigError, CannotFollow, ForeignTable, MissingPrivilege, TargetConflict, ValueRefused) as e:
                record_error(run.state, e)
        if wanted and blocked:
            run.state.write(name, wanted | {"tables": blocked})
        else:
            run.state.remove(name)
    return done, waiting


def requested(run: Run, label: str) -> bool:
    """Whether there is a request to read a table whole, as it is now."""
    wanted = (run.state.read(name) for name in run.state.names(_REQUESTS))
    return any(each["where"] is None and label in each["tables"] for each in wanted if each)
