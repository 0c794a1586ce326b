"""Decides how to change a Delta table like its source table, and when a re-read is necessary. Pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.errors import CannotFollow
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, arrow_type, to_typed
from airflow_cdc_provider.engine.sinks.delta.table_layout import sql_type
from airflow_cdc_provider.engine.sinks.delta.table_work import Alteration
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded


@dataclass(frozen=True)
class Present:
    """The current form of a table.

    :param columns: names and SQL types.
    :param mapped: columns have ids, so that they can be renamed or dropped.
    :param partitions: the columns by which the table is partitioned.
    """

    columns: Mapping[str, str]
    mapped: bool
    partitions: Collection[str] = ()

    def type_of(self, name: str) -> str | None:
        """Return the type of a column, ignoring the case of its name; ``None`` if there is no such column."""
        return self._types.get(name.lower())

    def renamed(self, old: str, new: str) -> Present:
        """Return the form of the table after a column is renamed."""
        kinds = dict(self._types)
        return replace(self, columns={new.lower(): kinds.pop(old.lower()), **kinds})

    @property
    def _types(self) -> dict[str, str]:
        return {known.lower(): kind for known, kind in self.columns.items()}


@dataclass(frozen=True)
class Plan:
    """The changes of a table's columns, and the values of added columns in existing rows."""

    alterations: tuple[Alteration, ...]
    values: Mapping[str, str]


def plan(before: Target, after: Target, present: Present, mode: Mode, rows_stay: bool) -> Plan:
    """Return the changes that adapt a table to its source.

    :param rows_stay: whether rows stay; otherwise all rows are about to be rewritten. A changelog always keeps its
        history.
    :raises RowsNeeded: when the rows would differ from the source's.
    :raises CannotFollow: when the table cannot be changed like this.
    :raises LimitExceeded: when the value of an added column does not fit its type.
    """
    change = redefinition(before.table, after.table)
    former = {new: old for old, new in change.renamed}
    alterations: list[Alteration] = []
    for old, new in change.renamed:
        _refuse_partition(after, present, old)
        if present.type_of(old) is not None and present.type_of(new) is None and present.mapped:
            alterations.append(Alteration("rename", old, new))
            present = present.renamed(old, new)
        elif rows_stay:
            raise RowsNeeded(f"the target cannot rename {old} to {new}")
        else:
            former.pop(new)
    if mode == "mirror":
        for name in change.dropped:
            _refuse_partition(after, present, name)
            if present.type_of(name) is not None:
                if not present.mapped:
                    raise RowsNeeded(f"the target cannot drop {name}")
                alterations.append(Alteration("drop", name))
    added = {column.name for column in change.added}
    for column in after.table.columns:
        kind, wanted = present.type_of(column.name), sql_type(arrow_type(column))
        if kind is None:
            if column.name not in added and rows_stay:
                raise RowsNeeded(f"the target has no column {column.name}")
            alterations.append(Alteration("add", column.name, wanted))
        elif column.name in added and rows_stay:
            raise RowsNeeded(f"the target already has a column {column.name}")
        elif kind != wanted:
            if _widens(before, former.get(column.name, column.name), column):
                alterations.append(Alteration("widen", column.name, wanted))
            elif rows_stay:
                raise RowsNeeded(f"{column.name} is {kind} at the target, but cannot become {wanted}")
            else:
                raise CannotFollow(
                    f"column {column.name} of the changelog {after.schema}.{after.name} is {kind}, but its history"
                    f" cannot become {wanted}",
                    f"Rename the column there (`ALTER TABLE … RENAME COLUMN`), and start again: a new {column.name} is"
                    " added.",
                )
    values = {column.name: column.missing for column in change.added if column.missing is not None and rows_stay}
    for column in change.added:
        if column.name in values:
            to_typed(pa.array([column.missing], TEXT), arrow_type(column), f"{after.table.label}.{column.name}")
    return Plan(tuple(alterations), values)


def _refuse_partition(after: Target, present: Present, name: str) -> None:
    if name in present.partitions:
        raise CannotFollow(
            f"{name} was removed from {after.table.label}, but {after.schema}.{after.name} is partitioned by it",
            "Undo the change at the source; or remove the column from sink.partition_by, drop the target table,"
            f" and run `airflow-cdc resnapshot --table {after.table.label}`.",
        )


def _widens(before: Target, name: str, column: Column) -> bool:
    """Return whether a decimal has gained digits before its point, with unchanged digits after it."""
    old = next((arrow_type(each) for each in before.table.columns if each.name == name), None)
    new = arrow_type(column)
    return (
        old is not None
        and pa.types.is_decimal(old)
        and pa.types.is_decimal(new)
        and old.scale == new.scale
        and old.precision < new.precision
    )
