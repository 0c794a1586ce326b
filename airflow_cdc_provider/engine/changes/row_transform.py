"""What is done to the rows of a table between its source and its sinks: one place for stream, chunks and re-reads.

It comes after the chunks' filter and the collapse by key, and before a sink sees anything. The definitions of targets
and ``verify`` see the table as it is after it, which is also what the commit record holds. Rows are read by that table,
too, and keys that a sink names are looked for at the source: so names, types and keys stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.table import Table

# Columns of an effect that hold values of new rows, and of old ones.
_VALUES = re.compile(r"([cb])(\d+)")


class RowTransform(Protocol):
    """A pure function of a table and its values, picklable: the same row gives the same row, wherever and whenever.

    A null stays null, since it also stands for what was not sent.
    """

    def table(self, table: Table) -> Table:
        """The table as its targets are defined, with the names, types and key that it has.

        :param table: as it is captured.
        """

    def columns(self, table: Table, columns: Mapping[int, pa.ChunkedArray]) -> Mapping[int, pa.ChunkedArray]:
        """Values as the sinks get them.

        :param table: as its targets are defined.
        :param columns: some of the columns beside the key, by their place in ``table.columns``, as text.
        :returns: the same places, as text.
        """


@dataclass(frozen=True)
class Identity:
    """Rows as they are. Nobody looks at values for it: what is copied as the source writes it stays so."""

    def table(self, table: Table) -> Table:
        """See :meth:`RowTransform.table`."""
        return table

    def columns(self, table: Table, columns: Mapping[int, pa.ChunkedArray]) -> Mapping[int, pa.ChunkedArray]:
        """See :meth:`RowTransform.columns`."""
        return columns


def transformed_rows(
    transform: RowTransform, table: Table, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Rows that have been read, as they go to a sink.

    :param table: as its targets are defined.
    :param batches: its columns as text, in order; given back as they are for :class:`Identity`.
    """
    if transform == Identity():
        return batches
    return (_transformed_batch(transform, table, batch) for batch in batches)


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
    """What a piece of the log does to a table, as it goes to a sink.

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
