"""Estimates how many rows of a view one changed row affects, from the statistics of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Protocol

from airflow_cdc_provider.engine.views.definition import Alias, View


class TableStatistics(Protocol):
    """What a store knows about the rows of a table."""

    def distinct(self, columns: Sequence[str]) -> float | None:
        """Estimate the number of distinct values of some columns; ``None`` without statistics."""

    def rows_for(self, columns: Sequence[str]) -> float | None:
        """Estimate the number of rows with one value of some columns; ``None`` without statistics."""


def rows_per_change(view: View, statistics: Mapping[str, TableStatistics]) -> dict[str, float | None]:
    """Estimate by alias how many rows of the view a change of one row of the table affects.

    A row meets as many rows of another table as there are for each value of the join columns. Conditions other than
    the equalities of the joins are ignored.

    :param statistics: by label of a table.
    """
    return {alias.name: _rows_for(view, alias, statistics) for alias in view.aliases}


def _rows_for(view: View, alias: Alias, statistics: Mapping[str, TableStatistics]) -> float | None:
    path = view.path(alias)
    names = {each.name for each in path}
    factors: list[float | None] = [
        statistics[parent.label].rows_for([theirs for _, theirs in each.equalities]) for each, parent in pairwise(path)
    ]
    if view.grouped:
        groups = statistics[view.root.label].distinct([each.column for each in view.anchor])
        known = _product(factors)
        return None if groups is None or known is None else min(max(1.0, known), groups)
    for other in view.aliases:
        if other.name not in names:
            found = statistics[other.label].rows_for(other.own_columns)
            factors.append(max(1.0, found) if other.join == "left" and found is not None else found)
    return _product(factors)


def _product(factors: Sequence[float | None]) -> float | None:
    known = [factor for factor in factors if factor is not None]
    return prod(known) if len(known) == len(factors) else None
