"""Translates refusals of the target database into errors that name the table, the cause and the remedy.

A target table may have constraints, triggers, foreign keys and indexes that the sink has not created. Their refusals
would recur at every attempt, so they must not look like temporary failures. Causes are identified by SQLSTATE, and if
that is ambiguous, by the server's function that raised the error, because messages may be translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psycopg2

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    LimitExceeded,
    MissingPrivilege,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, quoted
from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure, exceeds_limit, is_outage

_CONSTRAINT = (
    "A unit is applied table by table and may contain changes of many transactions. Declare the constraint DEFERRABLE,"
    " so that it is checked at the unit's end, or drop it. Until `status` reports consistent, rows of different tables"
    " and chunks have different ages, so that only constraints on single rows can hold. Then start again."
)
_TRIGGER = (
    "Triggers of the target run for the sink's writes, with search_path = pg_catalog. Qualify the names in the"
    " function, or run `ALTER TABLE … DISABLE TRIGGER`. Then start again."
)
_NOTHING = "Nothing of the unit was applied."
_PREFLIGHT = "Run `airflow-cdc preflight`, which names the obstacle, and remove it. Then start again."
_TYPE = "Change the column's type (`ALTER TABLE … ALTER COLUMN … TYPE text` accepts any value), then start again."
_ENCODING = (
    "The target database's encoding has no such character. Use a database with the encoding UTF8, or leave the column"
    " out with `columns`. Then start again."
)
_VALUES = {
    "22P02": "Allow the value in the target (`ALTER TYPE … ADD VALUE` for an enum, also if a label was renamed;"
    " `ALTER TABLE … ALTER COLUMN … TYPE text` for any type), then start again.",
    "22001": "Make the column longer: `ALTER TABLE … ALTER COLUMN … TYPE text`. Then start again.",
    "22003": "Make the column wider: `ALTER TABLE … ALTER COLUMN … TYPE numeric`. Then start again.",
    "22021": _ENCODING,
    "22P05": _ENCODING,
}
"""By SQLSTATE, how to make a column accept a value."""
# Errors that a later attempt may resolve: sessions that were too slow, catalogs that change, and missing tables, which
# the next start reports.
_PASSING = ("25", "XX", "3F000", "42P01")
_CAUSES = {
    ("42P10", "infer_arbiter_indexes"): "a target table has lost the unique index on its key",
    ("42P10", "CopyGetAttnums"): "a target table generates a column that the source has",
    ("55000", "ExecCheckIndexConstraints"): "a target table has a deferrable unique constraint on its key",
    ("428C9", "rewriteTargetListIU"): "a target table generates a column that the source has",
    ("0A000", "RewriteQuery"): "a target table has a rule",
    ("55000", "CheckCmdReplicaIdentity"): "a target table is published without a replica identity",
}
"""By SQLSTATE and the server's function."""


@contextmanager
def refusals(
    target: Target, columns: Mapping[str, str] | None = None, find: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Translate the refusal of a value into an error that names the table, the column and the remedy.

    :param columns: names of the target's columns, by those of the staging table.
    :param find: finds the target's column if the error does not name it; it may end the transaction.
    :raises ValueRefused: in place of the server's error.
    """
    try:
        yield
    except psycopg2.Error as e:
        state = e.pgcode or ""
        if _function_of(e) or not (state.startswith("22") or state in ("23502", "23514")):
            raise
        named = re.search(r", column (.+?)(: |$)", e.diag.context or "")
        column = named[1] if named else e.diag.column_name or find()
        column = (columns or {}).get(column, column) if column else None
        where = f"column {column!r} of " if column else ""
        refused = f"{where}the target table {target.schema}.{target.name} cannot hold a value of {target.table.label}"
        raise ValueRefused(
            f"{refused}: {e.diag.message_primary}",
            f"{_NOTHING} {_value_remedy(e, target, column)}",
            f"{refused} (SQLSTATE {state})",
        ) from e


def _value_remedy(error: psycopg2.Error, target: Target, column: str | None) -> str:
    """Return how to make the target accept a row: by changing a type, domain, column, constraint or partition."""
    diagnosis, state = error.diag, error.pgcode or ""
    table = f"{quoted(target.schema)}.{quoted(target.name)}"
    if state.startswith("22"):
        return _VALUES.get(state, _TYPE)
    if diagnosis.datatype_name:
        domain = f"{quoted(diagnosis.schema_name or '')}.{quoted(diagnosis.datatype_name)}"
        drop = "NOT NULL" if state == "23502" else f"CONSTRAINT {quoted(diagnosis.constraint_name or '…')}"
        return (
            f"Relax the domain like the source's: ALTER DOMAIN {domain} DROP {drop}. Or give the column its base type:"
            f" ALTER TABLE {table} ALTER COLUMN {quoted(column or '…')} TYPE …. Then start again."
        )
    if state == "23502":
        alter = f"ALTER TABLE {table} ALTER COLUMN {quoted(column or '…')}"
        if column not in {each.name for each in target.table.columns}:
            return f"The source has no such column: {alter} SET DEFAULT …, or {alter} DROP NOT NULL. Then start again."
        return f"The source allows NULL in it: {alter} DROP NOT NULL. Then start again."
    if diagnosis.constraint_name:
        drop = f"ALTER TABLE {table} DROP CONSTRAINT {quoted(diagnosis.constraint_name)}"
        return f"The source has no such constraint, or had none when the row was written: {drop}. Then start again."
    return (
        f"No partition accepts the row: create one, such as CREATE TABLE … PARTITION OF {table} DEFAULT; or widen the"
        " bounds if the target itself is a partition. Then start again."
    )


def _function_of(error: psycopg2.Error) -> str:
    """Return the function, of a trigger or a default, in which a statement has failed; empty if there is none."""
    first = (error.diag.context or "").partition("\n")[0]
    return first if re.match(r"(PL/\w+|SQL) function", first) else ""


def refusal_of(error: psycopg2.Error, place: str) -> CdcError:
    """Return the engine's error for an error of a statement in the sink.

    :param place: the sink, without user and password.
    """
    diagnosis, state = error.diag, error.pgcode or ""
    table, said = f"{diagnosis.schema_name}.{diagnosis.table_name}", diagnosis.message_primary
    function = _function_of(error)
    cause = _CAUSES.get((state, diagnosis.source_function or ""))
    if (cause is None and is_outage(error)) or (state.startswith(_PASSING) and not function):
        return driver_failure(error, f"sink {place}")
    if state.startswith("54") or exceeds_limit(state, str(error)):
        return _beyond_limits(state, f"{place}: {said}")
    if state.startswith("23") and diagnosis.schema_name != "airflow_cdc" and not function:
        detail = f" ({diagnosis.message_detail})" if diagnosis.message_detail else ""
        refused = f"the target table {table} refuses a change of the source"
        broken = f"{refused}: constraint {diagnosis.constraint_name!r} (SQLSTATE {state})"
        return TargetConflict(f"{refused}: {said}{detail}", _CONSTRAINT, broken)
    if function or state == "P0001":
        failed = "a trigger of the target has failed"
        where = f"({function}, SQLSTATE {state})"
        return TargetConflict(f"{failed}: {said} {where}", _TRIGGER, f"{failed} {where}")
    if state == "42501":
        return MissingPrivilege(f"the sink {place} refuses access: {said}", _PREFLIGHT)
    what = cause or f"the sink {place} refuses a statement"
    detail = f" ({diagnosis.message_detail})" if diagnosis.message_detail else ""
    shown = f"(SQLSTATE {state or 'unknown'})"
    return TargetConflict(f"{what}: {said}{detail} {shown}", _PREFLIGHT, f"{what} {shown}")


def _beyond_limits(state: str, said: str) -> LimitExceeded:
    if state == "54011":
        many = f"a table has more columns than Postgres allows: {said}"
        remedy = "Nothing was applied. Leave columns out with `columns` in the pipeline file, then start again."
        return LimitExceeded(many, remedy, many)
    if re.search('index "airflow_cdc_', said):
        wide = "an index that a view needs cannot hold a value"
        remedy = (
            "No part of the change was applied. Set `indexes: print` on the views that join or group by this column,"
            " and drop the index; or join and group by other columns. Then start again."
        )
        return LimitExceeded(f"{wide}: {said}", remedy, wide)
    return LimitExceeded.by(said)


def is_of_another(error: psycopg2.Error, connection: Connection) -> bool:
    """Return whether an error comes from the server of another connection."""
    return error.cursor is not None and error.cursor.connection is not connection


@contextmanager
def of_sink(connection: Connection, place: str) -> Iterator[None]:
    """Translate errors of statements on a connection to the sink into errors of the engine.

    Errors of other servers pass unchanged, because rows are read at the source while they are written.

    :raises CdcError: in place of the driver's error.
    """
    try:
        yield
    except psycopg2.Error as e:
        if is_of_another(e, connection) or isinstance(e, psycopg2.errors.LockNotAvailable):
            raise
        raise refusal_of(e, place) from e
