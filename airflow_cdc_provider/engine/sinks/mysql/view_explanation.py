"""Explains the upkeep of a view in a MySQL sink: the SELECT that runs, and what a change costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlglot

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.view_definition import quoted_tables
from airflow_cdc_provider.engine.sinks.mysql.view_rows import equal
from airflow_cdc_provider.engine.views.definition import View


def anchored_select(view: View, targets: Mapping[str, Target]) -> str:
    """Return the SELECT of the rows of some anchors, which are in a temporary table."""
    root = quoted(view.root.name)
    anchor = [f"{root}.{quoted(each.column)}" for each in view.anchor]
    match = equal([f"cdc_anchor.a{n}" for n in range(len(anchor))], anchor)
    select = view.select(quoted_tables(targets), ("airflow_cdc.cdc_anchors AS cdc_anchor", match))
    return sqlglot.parse_one(select, read="mysql").sql("mysql", pretty=True)


class IndexStatistics:
    """The statistics of a table's indexes, see :class:`.fan_out.TableStatistics`; the server has no others."""

    def __init__(self, session: Session, target: Target) -> None:
        where = [target.schema, target.name]
        condition = "WHERE table_schema = %s AND table_name = %s"
        (size,) = session.one(f"SELECT MAX(table_rows) FROM information_schema.tables {condition}", where)
        self._rows = None if size is None else float(size)
        self._key = set(target.table.key)
        self._distinct: dict[frozenset[str], float] = {}
        columns: dict[str, list[str]] = {}
        for index, column, cardinality in session.rows(
            f"SELECT index_name, column_name, cardinality FROM information_schema.statistics {condition}"
            " ORDER BY index_name, seq_in_index",
            where,
        ):
            columns.setdefault(str(index), []).append(str(column))
            if cardinality:
                self._distinct[frozenset(columns[str(index)])] = float(cardinality)

    def distinct(self, columns: Sequence[str]) -> float | None:
        return self._distinct.get(frozenset(columns))

    def rows_for(self, columns: Sequence[str]) -> float | None:
        if self._key <= set(columns):
            return 1.0
        distinct = self.distinct(columns)
        return None if distinct is None or self._rows is None else max(1.0, self._rows / distinct)
