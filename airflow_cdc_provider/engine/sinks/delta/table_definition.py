"""How a Delta table is changed as its source table was, and when it has to be read again. Pure decisions."""

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
    """What a table is like.

    :param columns: names and SQL types.
    :param mapped: columns have identities of their own, so that one can be renamed or dropped.
    :param partitions: the columns that it is partitioned by.
    """

    columns: Mapping[str, str]
    mapped: bool
    partitions: Collection[str] = ()

    def type_of(self, name: str) -> str | None:
        """The type of a column, whose name's case does not matter; ``None`` without it."""
        return self._types.get(name.lower())

    def renamed(self, old: str, new: str) -> Present:
        """What it is like when a column has another name."""
        kinds = dict(self._types)
        return replace(self, columns={new.lower(): kinds.pop(old.lower()), **kinds})

    @property
    def _types(self) -> dict[str, str]:
        return {known.lower(): kind for known, kind in self.columns.items()}


@dataclass(frozen=True)
class Plan:
    """The changes of a table's columns, and what added ones are filled with in the rows that are there."""

    alterations: tuple[Alteration, ...]
    values: Mapping[str, str]


def plan(before: Target, after: Target, present: Present, mode: Mode, rows_stay: bool) -> Plan:
    """Decide how a table becomes what its source is now.

    :param rows_stay: otherwise all are about to be written anew; of a changelog, the history stays all the same.
    :raises RowsNeeded: when the rows would not have the source's values.
    :raises CannotFollow: when the table cannot be changed so.
    :raises LimitExceeded: when what the rows have in an added column is none of its type.
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
            raise RowsNeeded(f"the target has a column {column.name} of its own")
        elif kind != wanted:
            if _widens(before, former.get(column.name, column.name), column):
                alterations.append(Alteration("widen", column.name, wanted))
            elif rows_stay:
                raise RowsNeeded(f"{column.name} is {kind} at the target, and cannot become {wanted}")
            else:
                raise CannotFollow(
                    f"column {column.name} of the changelog {after.schema}.{after.name} is {kind}, and its history"
                    f" cannot become {wanted}",
                    f"Rename the column there (ALTER TABLE … RENAME COLUMN), and start again: a new {column.name} is"
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
            f"{name} is gone from {after.table.label}, but {after.schema}.{after.name} is partitioned by it",
            "Take the change back at the source; or take the column out of sink.partition_by, drop the target table,"
            f" and run `airflow-cdc resnapshot --table {after.table.label}`.",
        )


def _widens(before: Target, name: str, column: Column) -> bool:
    """Whether a decimal has got more digits before its point, and as many behind it as it had."""
    old = next((arrow_type(each) for each in before.table.columns if each.name == name), None)
    new = arrow_type(column)
    return (
        old is not None
        and pa.types.is_decimal(old)
        and pa.types.is_decimal(new)
        and old.scale == new.scale
        and old.precision < new.precision
    )
