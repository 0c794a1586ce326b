"""What the target database refuses, said as errors that name the table and what helps.

A target table may carry more than we have put there: constraints, triggers, foreign keys, indexes. What they refuse
would be refused again at every try, so that it must not look like a failure that goes away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psycopg2

from airflow_cdc_provider.engine.errors import TargetConflict, ValueRefused
from airflow_cdc_provider.engine.sinks.base import Target

_CONSTRAINT = (
    "A unit is applied table by table and may hold changes of many transactions: declare the constraint DEFERRABLE, so"
    " that it is checked at the unit's end, or drop it. Until `status` says consistent, rows of different tables and"
    " chunks are of different ages, so that only constraints on a row alone can hold. Then start again."
)
_TRIGGER = (
    "Triggers of the target fire for our writes, with search_path = pg_catalog: qualify the names in the function, or"
    " ALTER TABLE … DISABLE TRIGGER. Then start again."
)
_INDEX = "Give the table a unique index, neither partial nor deferrable, on the key's columns, then start again."


@contextmanager
def refusals(
    target: Target, columns: Mapping[str, str] | None = None, find: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Say of a value that the target refuses where it should have gone and what helps.

    :param columns: names of the target's columns by those of the staging table.
    :param find: looks for the target's column, if the error does not name it; it may end the transaction.
    :raises ValueRefused: in place of the server's error.
    """
    try:
        yield
    except (psycopg2.DataError, psycopg2.errors.CheckViolation, psycopg2.errors.NotNullViolation) as e:
        named = re.search(r", column (.+?)(: |$)", e.diag.context or "")
        column = named[1] if named else e.diag.column_name or find()
        where = f"column {(columns or {}).get(column, column)!r} of " if column else ""
        raise ValueRefused(
            f"{where}the target table {target.schema}.{target.name} cannot hold a value of {target.table.label}:"
            f" {e.diag.message_primary}",
            "Nothing of the unit was applied. Make the target take the value (ALTER TYPE … ADD VALUE for an enum, also"
            " where a label has been renamed; ALTER TABLE … ALTER COLUMN … TYPE text for any type), then start again.",
        ) from e


def target_conflict(error: psycopg2.Error) -> TargetConflict | None:
    """What a constraint, a trigger or a lost index of a target table has to do with an error; ``None`` if nothing."""
    diagnosis = error.diag
    state, table = error.pgcode or "", f"{diagnosis.schema_name}.{diagnosis.table_name}"
    said = diagnosis.message_primary
    if state.startswith("23") and diagnosis.schema_name != "airflow_cdc":
        detail = f" ({diagnosis.message_detail})" if diagnosis.message_detail else ""
        return TargetConflict(f"the target table {table} refuses a change of the source: {said}{detail}", _CONSTRAINT)
    if state == "P0001" or re.match(r"(PL/\w+|SQL) function", diagnosis.context or ""):
        where = (diagnosis.context or "").partition("\n")[0]
        return TargetConflict(f"a trigger of the target has failed: {said} ({where})", _TRIGGER)
    if state == "42P10":
        return TargetConflict(f"a target table has lost the unique index on its key: {said}", _INDEX)
    return None
