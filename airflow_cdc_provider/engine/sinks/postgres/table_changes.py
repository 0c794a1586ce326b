"""Changes a target table like its source table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.changes.redefinition import Redefinition, redefinition
from airflow_cdc_provider.engine.core.errors import CannotFollow, MissingPrivilege
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.sinks.postgres.column_types import column_type, is_text, no_value
from airflow_cdc_provider.engine.sinks.postgres.prepared_tables import column_mismatches, target_columns
from airflow_cdc_provider.engine.sinks.postgres.target_tables import wanted_columns
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded

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
    convert: bool = False,
) -> None:
    """Change a target table from one definition to another, and record the new one.

    :param rows_stay: rows keep their values, and get those of added columns; otherwise all rows are about to be
        rewritten, and a mirror has none.
    :param convert: see :func:`prepare_target`.
    :raises RowsNeeded: when the target already has an added column, whose values are not the source's; lacks a column
        that it had, for instance after a rename to make room; or cannot convert values like the source.
    :raises CannotFollow: when the target cannot be changed.
    """
    change = redefinition(before.table, after.table)
    with _refusals(after):
        _Change(connection, mode, after, rows_stay).apply(change, before)
    if not convert:
        _require_same_parts(connection, mode, after, {column.name for column in (*change.added, *change.retyped)})
    rows(
        connection,
        "UPDATE airflow_cdc.tables SET definition = %s WHERE pipeline = %s AND source_table = %s",
        [json.dumps(after.table.to_dict()), pipeline, after.table.label],
    )


def _require_same_parts(
    connection: Connection, mode: Literal["mirror", "changelog"], target: Target, names: Collection[str]
) -> None:
    """Refuse types with the source's names but different components.

    :raises CannotFollow: naming columns and types.
    """
    own = {column.name for column in target.table.columns if not column.builtin} & set(names)
    if not own:
        return
    wanted = wanted_columns(connection, mode, target)
    wrong = column_mismatches(connection, target, target_columns(connection, target), wanted, own)
    if wrong:
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be changed like {target.table.label} because types"
            f" of the same names have different components: {'; '.join(map(str, wrong))}",
            "Nothing from this change on has been applied. Change the types at the target like those at the source"
            " (ALTER TYPE), or drop them there, so that the columns become text; then start again.",
        )


@contextmanager
def _refusals(target: Target) -> Iterator[None]:
    """Translate refusals of the target into errors with a remedy.

    :raises CannotFollow: in place of the server's error, or of a missing privilege.
    """
    try:
        yield
    except (*_REFUSALS, MissingPrivilege) as e:
        reason = e.message if isinstance(e, MissingPrivilege) else e.diag.message_primary
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be changed like {target.table.label}: {reason}",
            "Nothing from this change on has been applied. Remove the obstacle at the target, then start again: drop a"
            " view or constraint that uses the column, and recreate it afterwards; or rename a column whose name is"
            " taken, or whose old values cannot be converted.",
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

    def _columns(self) -> dict[str, str]:
        """Return the target's columns and their types."""
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(rows(self._connection, query, [self._table.as_string(self._connection)]))

    def apply(self, change: Redefinition, before: Target) -> None:
        """Change the columns, then the key."""
        if change.key and self._mode == "mirror":
            self._drop_key(before)
        if self._mode == "mirror":
            for name in change.dropped:
                self._alter("DROP COLUMN IF EXISTS {name}", name=sql.Identifier(name))
        else:
            self._end_defaults(change.dropped)
        self._rename(change)
        present = self._columns()
        added = {column.name for column in change.added}
        for column in self._target.table.columns:
            if column.name not in present:
                if column.name not in added:
                    self._refuse_loss(column)
                self._add(column)
            elif column.name in added:
                if self._rows_stay:
                    raise RowsNeeded(f"the target already has a column {column.name}")
                self._retype(column)
        former = {new: old for old, new in change.renamed}
        types = {column.name: column for column in before.table.columns}
        for column in change.retyped:
            known = types[former.get(column.name, column.name)]
            if self._rows_stay and (is_text(column) or is_text(known)):
                raise RowsNeeded(f"only the source can convert {column.name} to {column.type}")
            if column.name in present and not self._takes_all(known, present[column.name]):
                self._retype(column)
        if change.key and self._mode == "mirror" and self._target.table.key:
            key = sql.SQL(", ").join(map(sql.Identifier, self._target.table.key))
            self._alter("ADD PRIMARY KEY ({key})", key=key)

    def _refuse_loss(self, column: Column) -> None:
        """Refuse to leave rows without values of a column that the target had."""
        if self._mode == "mirror" and column.name in self._target.table.key:
            label = f"{self._target.schema}.{self._target.name}"
            raise CannotFollow(
                f"the target table {label} has no column {column.name}, which is part of its key",
                "If the column was renamed, restore its name, then start again.",
            )
        if self._rows_stay:
            raise RowsNeeded(f"the target has no column {column.name}")

    def _end_defaults(self, names: Sequence[str]) -> None:
        """Reset the default of changelog columns that the source has dropped, so that they get no values."""
        present = self._columns()
        for name in names:
            if name in present:
                null = no_value(present[name])
                self._alter("ALTER COLUMN {name} SET DEFAULT {null}", name=sql.Identifier(name), null=null)

    def _takes_all(self, column: Column, kind: str) -> bool:
        """Return whether a column was made text by hand, so that it accepts values that its type refuses."""
        return kind == "text" and column_type(self._connection, self._mode, column).bare != "text"

    def _rename(self, change: Redefinition) -> None:
        """Rename columns, through temporary names if a column takes the name of another one."""
        present = self._columns()
        lost = [old for old, _ in change.renamed if old not in present]
        if lost and self._rows_stay:
            raise RowsNeeded(f"the target has no column {lost[0]}")
        renamed = [(old, new) for old, new in change.renamed if old in present]
        direct = not {new for _, new in renamed} & {old for old, _ in renamed}
        between = [(old, new if direct else f"airflow_cdc_{i}") for i, (old, new) in enumerate(renamed)]
        steps = between if direct else between + [(f"airflow_cdc_{i}", new) for i, (_, new) in enumerate(renamed)]
        for old, new in steps:
            self._alter("RENAME COLUMN {old} TO {new}", old=sql.Identifier(old), new=sql.Identifier(new))

    def _retype(self, column: Column) -> None:
        kind = column_type(self._connection, self._mode, column)
        # A mirror that is read again has no rows to convert, and its types may not be convertible.
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
        """Add a column; existing rows get the value that the source's earlier rows have."""
        kind = column_type(self._connection, self._mode, column)
        name = sql.Identifier(column.name)
        value = no_value(kind.bare)
        if column.missing is not None and self._rows_stay:
            value = sql.SQL("{}::{}").format(sql.Literal(column.missing), sql.SQL(kind.bare))
        # Always stated, because otherwise the rows would get the type's default at the target.
        self._alter("ADD COLUMN {name} {kind} DEFAULT {value}", name=name, kind=sql.SQL(kind.full), value=value)
        self._alter("ALTER COLUMN {name} DROP DEFAULT", name=name)
        if self._mode == "changelog" and column.missing is not None and self._rows_stay:
            # Deletes and truncates carry no values.
            clear = sql.SQL("UPDATE {} SET {} = NULL WHERE _op IN ('d', 't')").format(self._table, name)
            rows(self._connection, clear)

    def _drop_key(self, before: Target) -> None:
        """Drop the unique constraints and indexes on the old key, and NOT NULL of its columns."""
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
