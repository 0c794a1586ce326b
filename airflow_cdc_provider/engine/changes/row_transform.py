"""Transforms the rows of a table between its source and its sinks, for stream, chunks and re-reads alike.

The transformation comes after the chunks' filter and the collapse by key, and before the sink. The definitions of
targets and ``verify`` use the transformed table, which is also in the commit record. Rows are read from the source by
that table, too, and keys from a sink are looked up at the source. So names, types and keys stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.core.table import Table

# Columns of an effect with the values of new rows (c), and of old rows (b).
_VALUES = re.compile(r"([cb])(\d+)")


class RowTransform(Protocol):
    """A pure function of a table and its values, picklable: the same row always gives the same row.

    A null stays null, since it also means that a value was not sent.
    """

    def table(self, table: Table) -> Table:
        """Return the table as its targets are defined, with unchanged names, types and key.

        :param table: as it is captured.
        """

    def columns(self, table: Table, columns: Mapping[int, pa.ChunkedArray]) -> Mapping[int, pa.ChunkedArray]:
        """Return values as the sinks get them.

        :param table: as its targets are defined.
        :param columns: some of the columns outside the key, by their index in ``table.columns``, as text.
        :returns: the same indexes, as text.
        """


@dataclass(frozen=True)
class Identity:
    """Leaves rows as they are. No value is looked at, so rows can go from COPY to COPY."""

    def table(self, table: Table) -> Table:
        """See :meth:`RowTransform.table`."""
        return table

    def columns(self, table: Table, columns: Mapping[int, pa.ChunkedArray]) -> Mapping[int, pa.ChunkedArray]:
        """See :meth:`RowTransform.columns`."""
        return columns


def transformed_rows(transform: RowTransform, table: Table, rows: SourceRows) -> SourceRows:
    """Return rows that are read as they go to a sink; the same object for :class:`Identity`.

    :param table: as its targets are defined.
    """
    return rows if transform == Identity() else rows.changed(partial(_transformed_batch, transform, table))


def _transformed_batch(transform: RowTransform, table: Table, batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = dict(enumerate(pa.Table.from_batches([batch]).columns))
    columns |= transform.columns(
        table, {place: column for place, column in columns.items() if place not in _key(table)}
    )
    arrays = [column.combine_chunks() for column in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _key(table: Table) -> set[int]:
    return {place for place, column in enumerate(table.columns) if column.name in table.key}


def transformed_effect(transform: RowTransform, table: Table, effect: Effect) -> Effect:
    """Return an effect on a table as it goes to a sink.

    :param table: as its targets are defined.
    """
    if transform == Identity():
        return effect
    groups: dict[str, dict[int, str]] = {}
    for name in effect.rows.column_names:
        found = _VALUES.fullmatch(name)
        if found and (place := int(found[2])) not in _key(table):
            groups.setdefault(found[1], {})[place] = name
    columns = dict(zip(effect.rows.column_names, effect.rows.columns, strict=True))
    for names in groups.values():
        changed = transform.columns(table, {place: columns[name] for place, name in names.items()})
        columns |= {name: changed[place] for place, name in names.items()}
    return replace(effect, rows=pa.table(columns))
