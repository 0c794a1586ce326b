"""Compares the columns of an existing target table with those of its source table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ForeignTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.type_shape import TypeShape
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.postgres.type_shapes import read_shapes
from airflow_cdc_provider.engine.sinks.postgres.kept_types import keeps

_COLUMNS = """
SELECT attname::text, atttypid::int8, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target.

    :param type: its type as SQL.
    """

    type: str
    shape: TypeShape


@dataclass(frozen=True)
class ColumnMismatch:
    """A column whose values the target does not keep.

    :param wanted: the source's type, as SQL.
    :param found: the target's type; ``None`` if the column is missing.
    :param remedy: a statement for the target.
    """

    column: str
    wanted: str
    found: str | None
    remedy: str

    def __str__(self) -> str:
        found = "missing" if self.found is None else self.found
        return f"column {self.column} is {found}, but {self.wanted} at the source"


def target_columns(connection: Connection, target: Target) -> dict[str, TargetColumn]:
    """Return the columns of a target table by name; none if the table does not exist."""
    table = sql.Identifier(target.schema, target.name).as_string(connection)
    found = rows(connection, _COLUMNS, [table])
    shapes = read_shapes(connection, [(oid, text) for _, oid, text in found])
    return {name: TargetColumn(text, shape) for (name, _, text), shape in zip(found, shapes, strict=True)}


def future_columns(connection: Connection, target: Target) -> dict[str, TargetColumn]:
    """Return the columns of user-defined types that exist in the target, as in a new table."""
    own = [column for column in target.table.columns if not column.builtin]
    asked = rows(
        connection,
        "SELECT t.name, to_regtype(t.type)::oid::int8, t.type"
        " FROM ROWS FROM (unnest(%s::text[]), unnest(%s::text[])) AS t (name, type)"
        " WHERE to_regtype(t.type) IS NOT NULL",
        [[column.name for column in own], [column.type for column in own]],
    )
    shapes = read_shapes(connection, [(oid, text) for _, oid, text in asked])
    return {name: TargetColumn(text, shape) for (name, _, text), shape in zip(asked, shapes, strict=True)}


def column_mismatches(
    connection: Connection,
    target: Target,
    found: Mapping[str, TargetColumn],
    wanted: Mapping[str, str],
    names: Collection[str] | None = None,
) -> list[ColumnMismatch]:
    """Return columns that do not fit; types that keep every value of the source are accepted.

    :param found: the target's columns.
    :param wanted: types of columns in a new table, including those that only a changelog has.
    :param names: compare only these columns of the source, if the target has them.
    """
    table = sql.Identifier(target.schema, target.name).as_string(connection)
    columns = {column.name: column for column in target.table.columns}
    wrong: list[ColumnMismatch] = []
    for name, kind in wanted.items():
        column, there = columns.get(name), found.get(name)
        if names is not None and (name not in names or there is None):
            continue
        if there is None:
            added = f"ALTER TABLE {table} ADD COLUMN {sql.Identifier(name).as_string(connection)} {kind};"
            wrong.append(ColumnMismatch(name, column.type if column else kind, None, added))
        elif column is None:
            if there.type != kind:
                wrong.append(ColumnMismatch(name, kind, there.type, _retyped(connection, table, name, kind)))
        else:
            shape = TypeShape.builtin(column.type) if column.builtin else column.shape
            if shape is not None and not keeps(shape, there.shape):
                remedy = _remedy(connection, table, name, kind, shape, there)
                wrong.append(ColumnMismatch(name, column.type, there.type, remedy))
    return wrong


def _remedy(connection: Connection, table: str, name: str, kind: str, shape: TypeShape, there: TargetColumn) -> str:
    source, target = (each.elements[0] if each.sort == "array" else each for each in (shape, there.shape))
    if there.type != kind:
        return _retyped(connection, table, name, kind)
    missing = [sql.Literal(label).as_string(connection) for label in source.labels if label not in target.labels]
    if missing and target.name in there.type:
        enum = there.type.removesuffix("[]")
        return " ".join(f"ALTER TYPE {enum} ADD VALUE {label};" for label in missing)
    return f"/* change the type {there.type} to its definition at the source */"


def _retyped(connection: Connection, table: str, name: str, kind: str) -> str:
    quoted = sql.Identifier(name).as_string(connection)
    # Converted through text: the table is empty, and not every type can be cast to every other.
    return f"ALTER TABLE {table} ALTER COLUMN {quoted} TYPE {kind} USING {quoted}::text::{kind};"


def require_kept(target: Target, wrong: Sequence[ColumnMismatch], convert: bool) -> None:
    """Refuse a target table whose columns do not keep all of the source's values.

    :param convert: the pipeline file requests conversion of values; the columns must exist nevertheless.
    :raises ForeignTable: naming columns, both types, and the remedy.
    """
    wrong = [each for each in wrong if each.found is None or not convert]
    if wrong:
        raise ForeignTable(
            f"the target table {target.schema}.{target.name} does not keep the values of {target.table.label}"
            f" unchanged: {'; '.join(map(str, wrong))}",
            f"Run at the target: {' '.join(each.remedy for each in wrong)} Or drop the table, so that it is created. Or"
            " set `sink.types: convert` in the pipeline file; values of other types are then rounded, truncated or"
            " refused by the target.",
        )
