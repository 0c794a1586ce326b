"""The columns of a target table that others have made, held against those of its source table."""

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
    """A column as the target has it.

    :param type: as SQL.
    """

    type: str
    shape: TypeShape


@dataclass(frozen=True)
class Misfit:
    """A column whose values the target does not keep.

    :param wanted: the source's type, as SQL.
    :param found: the target's; ``None`` without the column.
    :param remedy: a statement for the target.
    """

    column: str
    wanted: str
    found: str | None
    remedy: str

    def __str__(self) -> str:
        found = "missing" if self.found is None else self.found
        return f"column {self.column} is {found}, at the source {self.wanted}"


def target_columns(connection: Connection, target: Target) -> dict[str, TargetColumn]:
    """The columns of a target table by name; empty when it does not exist."""
    table = sql.Identifier(target.schema, target.name).as_string(connection)
    found = rows(connection, _COLUMNS, [table])
    shapes = read_shapes(connection, [(oid, text) for _, oid, text in found])
    return {name: TargetColumn(text, shape) for (name, _, text), shape in zip(found, shapes, strict=True)}


def future_columns(connection: Connection, target: Target) -> dict[str, TargetColumn]:
    """The columns of types that users have made, and that the target has, as a new table would get them."""
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


def misfits(
    connection: Connection,
    target: Target,
    found: Mapping[str, TargetColumn],
    wanted: Mapping[str, str],
    names: Collection[str] | None = None,
) -> list[Misfit]:
    """Compare columns; types that keep every value of the source's are as good as these.

    :param found: the target's columns.
    :param wanted: types that its columns would get, also those that a changelog has beside the source's.
    :param names: compare only these columns of the source, if the target has them.
    """
    table = sql.Identifier(target.schema, target.name).as_string(connection)
    columns = {column.name: column for column in target.table.columns}
    wrong: list[Misfit] = []
    for name, kind in wanted.items():
        column, there = columns.get(name), found.get(name)
        if names is not None and (name not in names or there is None):
            continue
        if there is None:
            added = f"ALTER TABLE {table} ADD COLUMN {sql.Identifier(name).as_string(connection)} {kind};"
            wrong.append(Misfit(name, column.type if column else kind, None, added))
        elif column is None:
            if there.type != kind:
                wrong.append(Misfit(name, kind, there.type, _retyped(connection, table, name, kind)))
        else:
            shape = TypeShape.builtin(column.type) if column.builtin else column.shape
            if shape is not None and not keeps(shape, there.shape):
                remedy = _remedy(connection, table, name, kind, shape, there)
                wrong.append(Misfit(name, column.type, there.type, remedy))
    return wrong


def _remedy(connection: Connection, table: str, name: str, kind: str, shape: TypeShape, there: TargetColumn) -> str:
    source, target = (each.elements[0] if each.sort == "array" else each for each in (shape, there.shape))
    if there.type != kind:
        return _retyped(connection, table, name, kind)
    missing = [sql.Literal(label).as_string(connection) for label in source.labels if label not in target.labels]
    if missing and target.name in there.type:
        enum = there.type.removesuffix("[]")
        return " ".join(f"ALTER TYPE {enum} ADD VALUE {label};" for label in missing)
    return f"/* make the type {there.type} as it is at the source */"


def _retyped(connection: Connection, table: str, name: str, kind: str) -> str:
    quoted = sql.Identifier(name).as_string(connection)
    # By way of text: the table is empty, and not every type has a cast to every other.
    return f"ALTER TABLE {table} ALTER COLUMN {quoted} TYPE {kind} USING {quoted}::text::{kind};"


def require_kept(target: Target, wrong: Sequence[Misfit], convert: bool) -> None:
    """Refuse a target table whose columns would lose something of the source's values.

    :param convert: the pipeline file wants values converted; the columns have to be there all the same.
    :raises ForeignTable: naming columns, both types, and what mends it.
    """
    wrong = [each for each in wrong if each.found is None or not convert]
    if wrong:
        raise ForeignTable(
            f"the target table {target.schema}.{target.name} does not keep the values of {target.table.label} as they"
            f" are: {'; '.join(map(str, wrong))}",
            f"Run at the target: {' '.join(each.remedy for each in wrong)} Or drop the table, so that it is created; or"
            " write `sink.types: convert` into the pipeline file, by which values of other types are rounded, cut or"
            " refused as the target does it.",
        )
