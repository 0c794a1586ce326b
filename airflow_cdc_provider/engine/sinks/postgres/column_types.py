"""Determines the types of columns in the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psycopg2 import sql

from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.connection import Connection, row, rows, scalar

# Values of these types name objects and roles of one server, or no input function accepts them, so elsewhere they are
# text.
_TEXT_ONLY = frozenset(
    {
        *("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regcollation", "regconfig"),
        *("regdictionary", "regnamespace", "regrole", "regtype", "aclitem"),
        *("gtsvector", "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"),
        *("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"),
    }
)
_KNOWN = """
WITH RECURSIVE beneath AS (
    SELECT typbasetype AS type, typtypmod AS modifier FROM pg_type WHERE oid = to_regtype(%(type)s) AND typtype = 'd'
    UNION ALL
    SELECT t.typbasetype, t.typtypmod FROM beneath b JOIN pg_type t ON t.oid = b.type AND t.typtype = 'd'
)
SELECT to_regtype(%(type)s) IS NOT NULL, (
    SELECT format_type(b.type, b.modifier) FROM beneath b JOIN pg_type t ON t.oid = b.type WHERE t.typtype <> 'd'
)
"""
"""Whether a type is known, and its base type if it is a domain."""


@dataclass(frozen=True)
class ColumnType:
    """A column's type in the target as SQL; ``bare`` has no collation."""

    bare: str
    collation: str | None

    @property
    def full(self) -> str:
        return self.bare if self.collation is None else f"{self.bare} COLLATE {self.collation}"


def is_text(column: Column) -> bool:
    """Return whether a column is text in every target."""
    return column.builtin and column.type.removesuffix("[]") in _TEXT_ONLY


def column_type(connection: Connection, mode: Literal["mirror", "changelog"], column: Column) -> ColumnType:
    """Return the source's type of a column; text if the target lacks the type or could not accept its values.

    In a changelog, a domain becomes its base type, because deletes and truncates have NULL, which a domain may forbid.
    """
    bare = column.type
    known = not is_text(column)
    if not column.builtin:
        known, beneath = row(connection, _KNOWN, {"type": column.type})
        if mode == "changelog" and beneath is not None:
            bare = beneath
    if not known:
        return ColumnType("text", None)
    collation = column.collation
    if collation is not None and scalar(connection, "SELECT to_regcollation(%s)", [collation]) is None:
        collation = None
    return ColumnType(bare, collation)


def column_definition(connection: Connection, mode: Literal["mirror", "changelog"], column: Column) -> sql.Composable:
    return sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(column_type(connection, mode, column).full))


def no_value(kind: str) -> sql.Composable:
    """Return NULL as a column's default; a plain NULL would keep the default of the column's type, if it has one."""
    return sql.SQL("coalesce(NULL::{})").format(sql.SQL(kind))


def domain_bases(connection: Connection, table: sql.Composable, modifiers: bool = True) -> dict[str, str]:
    """Return by column of a table the base type of its domain, with or without its modifier."""
    query = (
        "WITH RECURSIVE bases AS ("
        " SELECT a.attname::text AS name, t.typbasetype AS type, t.typtypmod AS modifier FROM pg_attribute a"
        " JOIN pg_type t ON t.oid = a.atttypid AND t.typtype = 'd'"
        " WHERE a.attrelid = to_regclass(%s) AND NOT a.attisdropped"
        " UNION ALL SELECT b.name, t.typbasetype, t.typtypmod FROM bases b"
        " JOIN pg_type t ON t.oid = b.type AND t.typtype = 'd'"
        ") SELECT b.name, format_type(b.type, CASE WHEN %s THEN b.modifier ELSE -1 END) FROM bases b"
        " JOIN pg_type t ON t.oid = b.type WHERE t.typtype <> 'd'"
    )
    return dict(rows(connection, query, [table.as_string(connection), modifiers]))
