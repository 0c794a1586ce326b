"""Changing a target table of the Postgres sink as its source table has been changed.

In a mirror the target has the source's columns. In a changelog the history stays: a column that the source has
dropped is left as it is, and gets no values any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Column
from airflow_cdc_provider.engine.connection import Connection, rows
from airflow_cdc_provider.engine.errors import CannotFollow, MissingPrivilege
from airflow_cdc_provider.engine.evolution import Redefinition, redefinition
from airflow_cdc_provider.engine.sinks.base import RowsNeeded, Target
from airflow_cdc_provider.engine.sinks.postgres_tables import allow_null, column_type

_REFUSALS = (
    psycopg2.DataError,
    psycopg2.IntegrityError,
    psycopg2.InternalError,
    psycopg2.NotSupportedError,
    psycopg2.ProgrammingError,
    psycopg2.errors.ObjectInUse,
)


def redefine(
    connection: Connection,
    pipeline: str,
    mode: Literal["mirror", "changelog"],
    before: Target,
    after: Target,
    rows_stay: bool,
) -> None:
    """Change a target table from one definition to another, and record the new one.

    :param rows_stay: the rows keep their values, and get those of added columns; otherwise all are about to be
        written anew, and a mirror has none.
    :raises RowsNeeded: when the target has an added column already, whose values are not the source's.
    :raises CannotFollow: when the target does not let it be changed.
    """
    change = redefinition(before.table, after.table)
    with _refusals(after):
        _Change(connection, mode, after, rows_stay).apply(change, before)
    rows(
        connection,
        "UPDATE airflow_cdc.tables SET definition = %s WHERE pipeline = %s AND source_table = %s",
        [json.dumps(after.table.to_dict()), pipeline, after.table.label],
    )


@contextmanager
def _refusals(target: Target) -> Iterator[None]:
    """Say what the target refuses, and what helps.

    :raises CannotFollow: in place of the server's error, and of what this role lacks.
    """
    try:
        yield
    except (*_REFUSALS, MissingPrivilege) as e:
        reason = e.message if isinstance(e, MissingPrivilege) else e.diag.message_primary
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be changed as {target.table.label} was: {reason}",
            "Nothing from this change on has been applied. Remove what stands in the way at the target (a view or"
            " constraint that uses the column; a column whose name is taken, or whose old values cannot be converted:"
            " rename it), then start again.",
        ) from e


class _Change:
    """The statements that change one target table."""

    def __init__(
        self, connection: Connection, mode: Literal["mirror", "changelog"], target: Target, rows_stay: bool
    ) -> None:
        self._connection = connection
        self._mode = mode
        self._target = target
        self._rows_stay = rows_stay
        self._table = sql.Identifier(target.schema, target.name)

    def _alter(self, text: str, **parts: sql.Composable) -> None:
        rows(self._connection, sql.SQL("ALTER TABLE {table} " + text).format(table=self._table, **parts))

    def _columns(self) -> set[str]:
        query = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        return {name for (name,) in rows(self._connection, query, [self._table.as_string(self._connection)])}

    def apply(self, change: Redefinition, before: Target) -> None:
        """Change the columns, then the key."""
        if change.key and self._mode == "mirror":
            self._drop_key(before)
        if self._mode == "mirror":
            for name in change.dropped:
                self._alter("DROP COLUMN IF EXISTS {name}", name=sql.Identifier(name))
        self._rename(change)
        present = self._columns()
        for column in change.retyped:
            if column.name in present:
                self._retype(column)
            else:
                self._add(column)
        for column in change.added:
            if column.name not in present:
                self._add(column)
            elif self._rows_stay:
                raise RowsNeeded(f"the target has a column {column.name} of its own")
            else:
                self._retype(column)
        if change.key and self._mode == "mirror" and self._target.table.key:
            key = sql.SQL(", ").join(map(sql.Identifier, self._target.table.key))
            self._alter("ADD PRIMARY KEY ({key})", key=key)
        if self._mode == "changelog":
            allow_null(self._connection, self._table)

    def _rename(self, change: Redefinition) -> None:
        """By way of names of our own, since a column may take the name that another one leaves."""
        present = self._columns()
        renamed = [(old, new) for old, new in change.renamed if old in present]
        direct = not {new for _, new in renamed} & {old for old, _ in renamed}
        between = [(old, new if direct else f"airflow_cdc_{i}") for i, (old, new) in enumerate(renamed)]
        steps = between if direct else between + [(f"airflow_cdc_{i}", new) for i, (_, new) in enumerate(renamed)]
        for old, new in steps:
            self._alter("RENAME COLUMN {old} TO {new}", old=sql.Identifier(old), new=sql.Identifier(new))

    def _retype(self, column: Column) -> None:
        kind = column_type(self._connection, column)
        # In a mirror that is read again there are no rows to convert, and types that nothing converts.
        name = sql.Identifier(column.name)
        empty = self._mode == "mirror" and not self._rows_stay
        value = sql.SQL("NULL") if empty else sql.SQL("{}::{}").format(name, sql.SQL(kind.bare))
        self._alter(
            "ALTER COLUMN {name} DROP DEFAULT, ALTER COLUMN {name} TYPE {kind} USING {value}",
            name=name,
            kind=sql.SQL(kind.full),
            value=value,
        )

    def _add(self, column: Column) -> None:
        """Add a column; rows that stay get what the source's rows from before have in it."""
        kind = column_type(self._connection, column)
        name = sql.Identifier(column.name)
        if column.missing is None or not self._rows_stay:
            self._alter("ADD COLUMN {name} {kind}", name=name, kind=sql.SQL(kind.full))
            return
        value = sql.SQL("{}::{}").format(sql.Literal(column.missing), sql.SQL(kind.bare))
        self._alter("ADD COLUMN {name} {kind} DEFAULT {value}", name=name, kind=sql.SQL(kind.full), value=value)
        self._alter("ALTER COLUMN {name} DROP DEFAULT", name=name)
        if self._mode == "changelog":  # deletes and truncates carry no values
            clear = sql.SQL("UPDATE {} SET {} = NULL WHERE _op IN ('d', 't')").format(self._table, name)
            rows(self._connection, clear)

    def _drop_key(self, before: Target) -> None:
        """Drop the unique constraints and indexes on the old key, and what they demanded of its columns."""
        query = (
            "SELECT i.indexrelid::regclass::text, c.conname FROM pg_index i"
            " LEFT JOIN pg_constraint c ON c.conindid = i.indexrelid AND c.conrelid = i.indrelid"
            " WHERE i.indrelid = to_regclass(%s) AND i.indisunique"
            " AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_attribute a"
            " WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)) = %s::text[]"
        )
        table = self._table.as_string(self._connection)
        for index, constraint in rows(self._connection, query, [table, sorted(before.table.key)]):
            if constraint is not None:
                self._alter("DROP CONSTRAINT {name}", name=sql.Identifier(constraint))
            else:
                rows(self._connection, sql.SQL("DROP INDEX {}").format(sql.SQL(index)))
        for name in before.table.key:
            self._alter("ALTER COLUMN {name} DROP NOT NULL", name=sql.Identifier(name))
