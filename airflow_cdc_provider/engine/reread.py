"""Reading rows again while the stream goes on: repair, and values that the log does not carry.

A re-read is a unit of its own between two units of the stream. Its snapshot must
see every transaction that the stream has already passed; from then on its rows
are filtered like those of a chunk, until the stream has passed its H. So a reader
of the sink never sees a row go back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.chunks import keys_condition, read_query, text_of
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import Connection, condition, connected, rows
from airflow_cdc_provider.engine.errors import Blocked, ConfigError, GateClosed
from airflow_cdc_provider.engine.reading import DRIVER_ERRORS, SnapshotReader, driver_failure, plan_read
from airflow_cdc_provider.engine.run import Run, record_error
from airflow_cdc_provider.engine.sinks.base import Record, Target
from airflow_cdc_provider.engine.slot import barrier, visible_in_current, wait_until
from airflow_cdc_provider.engine.state import State

_REQUESTS = "requests"
_VISIBLE_SECONDS = 60.0
_BARRIER_SECONDS = 5.0


def request(state: State, tables: list[str], where: str | None) -> str:
    """Leave a request to read tables again; the live stream takes it between two units.

    :param where: read only the rows that match this SQL condition on either side.
    :returns: the name of the request.
    """
    name = f"{_REQUESTS}/{time.time():.6f}-{uuid.uuid4().hex[:8]}.json"
    state.write(name, {"tables": tables, "where": where})
    return name


def take_requests(run: Run, record: Record) -> bool:
    """Carry out the requests that have been left; true if anything has been read again.

    What older transactions keep from being read stays requested. What cannot be read is given up, and said in the
    state: the stream must not die of it again and again.
    """
    done = False
    for name in run.state.names(_REQUESTS):
        wanted = run.state.read(name)
        blocked = []
        for label in wanted["tables"] if wanted else ():
            try:
                read_again(run, record, label, wanted["where"] if wanted else None)
                done = True
            except Blocked:
                blocked.append(label)
            except DRIVER_ERRORS as e:
                record_error(run.state, driver_failure(e, f"reading {label} again"))
            except ConfigError as e:
                record_error(run.state, e)
        if wanted and blocked:
            run.state.write(name, wanted | {"tables": blocked})
        else:
            run.state.remove(name)
    return done


def check(pipeline: Pipeline, record: Record, label: str, where: str | None) -> None:
    """Refuse a re-read that cannot be done, before anything is touched.

    :raises ConfigError: when the table is unknown or has no key, or the condition is not valid on either side.
    :raises GateClosed: when the table has not been read yet.
    """
    target = target_of(record, label)
    if any(chunk.table == label for chunk in record.unfinished):
        raise GateClosed(f"the snapshot of {label} is not finished", "Run `airflow-cdc snapshot` first.")
    if where is None:
        return
    if not target.table.key:
        raise ConfigError(f"{label} has no key by which rows could be read again", "Leave --where out.")
    try:
        with connected(pipeline.source.dsn) as source:
            explain = sql.SQL("EXPLAIN ") + _matching_query(target.table, where)
            rows(source, explain)
    except psycopg2.Error as e:
        raise ConfigError(
            f"--where {where!r} is not a condition on {label}: {str(e).splitlines()[0]}",
            "Give an SQL condition on its columns.",
        ) from e


def read_again(run: Run, record: Record, label: str, where: str | None = None) -> int:
    """Read a table again, or those of its rows that match a condition on either side, and commit them as a unit.

    :returns: rows written.
    :raises Blocked: when transactions older than the stream's position do not end.
    :raises ConfigError: when the pipeline has no such table.
    """
    target = target_of(record, label)
    with connected(run.pipeline.source.dsn) as source:
        # Everything that the stream has passed has an id below the barrier's.
        barrier(source, _BARRIER_SECONDS)
        if where is None:
            query, keys = read_query(target.table, None), None
        else:
            keys = _matching_keys(source, target.table, where) | run.sink.matching_keys(target, where)
            query = _keys_query(target.table, keys)
        read = plan_read(source, run.pipeline.source.dsn, target.table, query, int(record.identity["timeline"]))
    reader = SnapshotReader(read)
    try:
        return run.sink.replace(run.epoch, target, keys, reader.batches(), reader.finish)
    finally:
        reader.close()


def read_keys_again(
    run: Run, record: Record, keys: Mapping[str, frozenset[tuple[str, ...]]], xids: npt.NDArray[np.uint32]
) -> None:
    """Read rows again whose values the unit at hand lacks, in a snapshot that sees all its transactions.

    :param xids: the unit's transactions.
    :raises Blocked: when they do not become visible.
    """
    with connected(run.pipeline.source.dsn) as source:
        if not wait_until(lambda: bool(visible_in_current(source).visible(xids).all()), _VISIBLE_SECONDS):
            raise Blocked(
                f"rows of {', '.join(sorted(keys))} have to be read again, but transactions that the stream has"
                f" delivered have not become visible at the source for {_VISIBLE_SECONDS:g} seconds",
                "They probably wait for a synchronous standby: bring it back, or change synchronous_standby_names.",
            )
        reads = {
            label: plan_read(
                source,
                run.pipeline.source.dsn,
                target_of(record, label).table,
                _keys_query(target_of(record, label).table, members),
                int(record.identity["timeline"]),
            )
            for label, members in keys.items()
        }
    for label, members in keys.items():
        reader = SnapshotReader(reads[label])
        try:
            run.sink.replace(run.epoch, target_of(record, label), members, reader.batches(), reader.finish)
        finally:
            reader.close()


def _matching_keys(connection: Connection, table: Table, where: str) -> frozenset[tuple[str, ...]]:
    """The keys of the source's rows that match a condition."""
    return frozenset(tuple(found) for found in rows(connection, _matching_query(table, where)))


def _matching_query(table: Table, where: str) -> sql.Composable:
    key = sql.SQL(", ").join(text_of(column) for column in table.key_columns)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(key, sql.Identifier(leaf.schema, leaf.name), condition(where))
        for leaf in table.leaves
    )


def _keys_query(table: Table, keys: frozenset[tuple[str, ...]]) -> sql.Composable:
    """The SELECT of the rows with given keys, every captured column as text."""
    columns = sql.SQL(", ").join(text_of(column) for column in table.columns)
    where = condition(table.where) if table.where is not None else sql.SQL("true")
    members = keys_condition(table, keys)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {} AND {}").format(
            columns, sql.Identifier(leaf.schema, leaf.name), where, members
        )
        for leaf in table.leaves
    )


def target_of(record: Record, label: str) -> Target:
    """The target of a source table.

    :raises ConfigError: when the pipeline has no such table.
    """
    for target in record.targets:
        if target.table.label == label:
            return target
    known = ", ".join(target.table.label for target in record.targets)
    raise ConfigError(f"the pipeline has no table {label!r}", f"Name one of: {known}.")
