"""Explains the upkeep of a view in a Postgres sink: the SELECT that runs, and the server's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import sqlglot
from psycopg2 import sql

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, quoted, rows
from airflow_cdc_provider.engine.views.definition import View

_SIZES = "SELECT nullif(reltuples, -1)::float8 FROM pg_class WHERE oid = to_regclass(%s)"
# A negative n_distinct is a fraction of the rows.
_STATISTICS = """
SELECT attname::text, n_distinct::float8, null_frac::float8 FROM pg_stats
WHERE schemaname = %s AND tablename = %s AND NOT inherited
"""


def anchored_select(view: View, targets: Mapping[str, Target]) -> str:
    """Return the SELECT of the rows of some anchors, which are in a temporary table."""
    tables = {label: f"{quoted(targets[label].schema)}.{quoted(targets[label].name)}" for label in view.columns}
    root = quoted(view.root.name)
    equal = (f"cdc_anchor.a{n} = {root}.{quoted(each.column)}" for n, each in enumerate(view.anchor))
    select = view.select(tables, ("pg_temp.cdc_anchors AS cdc_anchor", " AND ".join(equal)))
    return sqlglot.parse_one(select, read="postgres").sql("postgres", pretty=True)


class ColumnStatistics:
    """The statistics of a table's columns, see :class:`.fan_out.TableStatistics`."""

    def __init__(self, connection: Connection, target: Target) -> None:
        name = sql.Identifier(target.schema, target.name).as_string(connection)
        found = rows(connection, _SIZES, [name])
        self._rows: float | None = found[0][0] if found else None
        self._key = set(target.table.key)
        self._columns = {
            column: (distinct, nulls)
            for column, distinct, nulls in rows(connection, _STATISTICS, [target.schema, target.name])
        }

    def distinct(self, columns: Sequence[str]) -> float | None:
        """Estimate the number of distinct values of some columns; ``None`` without statistics."""
        if self._rows is None or not self._columns.keys() >= set(columns):
            return None
        counts = (self._columns[column][0] for column in columns)
        found: float = prod(n if n > 0 else -n * self._rows for n in counts)
        return max(1.0, min(self._rows, found))

    def rows_for(self, columns: Sequence[str]) -> float | None:
        """Estimate the number of rows with one value of some columns; ``None`` without statistics."""
        if self._key and self._key <= set(columns):
            return 1.0
        distinct = self.distinct(columns)
        if distinct is None or self._rows is None:
            return None
        known: float = min(1 - self._columns[column][1] for column in columns)
        return self._rows * known / distinct
