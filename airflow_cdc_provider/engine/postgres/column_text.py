"""SQL for the text of a column's values, as Postgres writes it."""

from __future__ import annotations

from psycopg2 import sql

from airflow_cdc_provider.engine.core.table import Column

# bool, "char", name, xml, cidr, inet, bpchar: built-in types whose cast to text differs from their output function.
_CAST_DIFFERS = frozenset({16, 18, 19, 142, 650, 869, 1042})
# Types whose name without a length means a length of one.
UNMODIFIED = {"character": "bpchar", "bit": '"bit"'}


def text_of(column: Column, qualifier: str | None = None) -> sql.Composable:
    """Return an expression for a column's text, exactly as the type's output function writes it and pgoutput sends it.

    A cast to text calls the output function only if the type has no cast function. Cast functions write
    ``true`` for ``t``, cut blanks from ``character(n)``, and add ``/32`` to an ``inet``. ``concat`` always calls the
    output function.
    """
    name = sql.Identifier(column.name) if qualifier is None else sql.Identifier(qualifier, column.name)
    if column.builtin and column.type_oid not in _CAST_DIFFERS:
        return sql.SQL("{}::pg_catalog.text").format(name)
    # IS NOT NULL would be false for a composite value with a null inside.
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.concat({0}) END").format(name)
