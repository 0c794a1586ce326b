"""Composes conditions for a range of rows: by time, in a column that holds it, or by key.

A range is half-open, so that the ranges of a backfill adjoin and no row is in two of them. The conditions are texts, as
``resnapshot`` takes them, and are valid for all tables that were given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from psycopg import sql

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.table import Column, Table

_TIMES = re.compile(r"date|timestamp(\(\d\))?( with(out)? time zone)?")


def time_condition(tables: Sequence[Table], column: str, start: datetime, end: datetime) -> str:
    """Return the condition for rows whose time lies in ``[start, end)``; a column without time zone is in UTC.

    :param start: in UTC if it has no time zone; so is ``end``.
    :raises ConfigError: when the range is empty, or a table's column does not exist or holds no times.
    """
    if start >= end:
        raise ConfigError(
            f"there is no time between {start.isoformat()} and {end.isoformat()}", "Give an end that is later."
        )
    for table in tables:
        found = _column(table, column)
        if not _TIMES.fullmatch(found.beneath or found.type):
            raise ConfigError(
                f"the time column {column!r} of {table.label} is of type {found.type}",
                "Name a column of type timestamp, timestamp with time zone, or date.",
            )
    # Typed, so that the server compares moments: a literal of the column's own type would lose the zone, or the hour.
    return _between(column, f"timestamptz {_literal(start.isoformat())}", f"timestamptz {_literal(end.isoformat())}")


def key_condition(tables: Sequence[Table], start: str | None, end: str | None) -> str:
    """Return the condition for rows whose key, or its first column, lies in ``[start, end)``.

    :param start: a value as SQL reads it; ``None`` for no bound. The same for ``end``, but not for both.
    :raises ConfigError: when there is no bound or no table, or a table has no key or another one than the first table.
    """
    if start is None and end is None:
        raise ConfigError("the key range has no bound", "Give the first key, the key to end before, or both.")
    if not tables:
        raise ConfigError(
            "a key range is not possible because the pipeline has copied none of these tables",
            "Name tables that it has copied, as schema.table, or read whole tables.",
        )
    columns = {table.label: table.key[0] if table.key else None for table in tables}
    names = set(columns.values())
    if len(names) != 1 or None in names:
        keys = ", ".join(f"{label}: {name or 'none'}" for label, name in columns.items())
        raise ConfigError(
            f"a key range is not possible because the keys of the tables differ: {keys}",
            "Choose one table that has a key.",
        )
    (column,) = (name for name in names if name is not None)
    return _between(column, *(None if bound is None else _literal(bound) for bound in (start, end)))


def nullable(tables: Sequence[Table], column: str) -> list[str]:
    """Return the tables that may have rows without a value in a column; such rows are in no range."""
    return [table.label for table in tables if not _column(table, column).not_null]


def parse_time(text: str) -> datetime:
    """Parse a time in ISO 8601; one without a time zone is in UTC.

    :raises ConfigError: when it cannot be parsed.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError as e:
        raise ConfigError(f"{text!r} is not a time", "Give one such as 2026-01-31T00:00:00+00:00.") from e
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _between(column: str, start: str | None, end: str | None) -> str:
    name = sql.Identifier(column).as_string(None)
    bounds = [f"{name} >= {start}"] if start is not None else []
    return " AND ".join([*bounds, f"{name} < {end}"] if end is not None else bounds)


def _literal(text: str) -> str:
    return sql.Literal(text).as_string(None)


def _column(table: Table, name: str) -> Column:
    for column in table.columns:
        if column.name == name:
            return column
    raise ConfigError(
        f"{table.label} has no column {name!r}",
        f"Name one of: {', '.join(column.name for column in table.columns)}.",
    )
