"""Builds tables of events, to be encoded as messages, in the layout of a changelog's :class:`.effects.Effect`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.effect import OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target

TEXT = pa.large_string()

_KEY = "K"


def read_rows(target: Target, batch: pa.RecordBatch, lsn: LogPosition, seq: int, now: int) -> pa.Table:
    """Return the events of rows read from the source.

    :param batch: the captured columns as text.
    :param lsn: the applied LSN.
    :param now: microseconds since 1970.
    """
    return _table("r", [batch.column(i) for i in range(batch.num_columns)], lsn, seq, now, batch.num_rows)


def truncate(target: Target, lsn: LogPosition, seq: int, now: int) -> pa.Table:
    """Return the event for an emptied table.

    :param lsn, now: as for :func:`read_rows`.
    """
    return _table("t", [pa.nulls(1, TEXT)] * len(target.table.columns), lsn, seq, now, 1)


def deletes(target: Target, keys: Sequence[tuple[str, ...]], lsn: LogPosition, seq: int, now: int) -> pa.Table:
    """Return the events that delete rows by key.

    :param lsn, now: as for :func:`read_rows`.
    """
    count = len(keys)
    texts = dict(zip(target.table.key, (pa.array(part, TEXT) for part in zip(*keys, strict=True)), strict=True))
    columns = [texts.get(column.name, pa.nulls(count, TEXT)) for column in target.table.columns]
    table = _table("d", columns, lsn, seq, now, count)
    table = table.append_column(OLD_KIND, pa.array([_KEY] * count))
    for i, column in enumerate(columns):
        table = table.append_column(f"b{i}", column)
    return table


def settled(target: Target, rows: pa.Table) -> pa.Table:
    """Return changes that each concern one key: a changed key becomes a delete of the old one and an insert of the new
    one.

    Otherwise consumers that keep the last message of each key would keep the old key. Debezium does the same. Both
    halves have the change's position in the log.
    """
    rows = rows.combine_chunks()
    moved = _moved(target, rows)
    if not moved.any():
        return rows
    doubled = np.repeat(np.arange(len(moved)), moved + 1)
    first = np.append(doubled[1:] == doubled[:-1], False)  # the first of two halves
    second = np.roll(first, 1)
    taken = rows.take(pa.array(doubled)).combine_chunks()
    key = {f"c{i}": f"b{i}" for i in _places(target)}
    columns = {}
    for name in taken.column_names:
        column = _array(taken, name)
        none = pa.scalar(None, column.type)
        if name == OP:
            column = pc.if_else(pa.array(first), "d", pc.if_else(pa.array(second), "i", column))
        elif name == UNCHANGED or (name.startswith("c") and name[1:].isdigit()):
            column = pc.if_else(pa.array(first), _array(taken, key[name]) if name in key else none, column)
        elif name == OLD_KIND or name.startswith("b"):
            column = pc.if_else(pa.array(second), none, column)
        columns[name] = column
    return pa.table(columns)


def _moved(target: Target, rows: pa.Table) -> NDArray[np.bool_]:
    """Return which changes give a row another key."""
    moved = np.zeros(rows.num_rows, dtype=np.bool_)
    if OLD_KIND not in rows.column_names:
        return moved
    updates = pc.equal(_array(rows, OP), "u").to_numpy(zero_copy_only=False)
    for i in _places(target):
        other = pc.not_equal(_array(rows, f"b{i}"), _array(rows, f"c{i}"))
        moved |= pc.fill_null(other, False).to_numpy(zero_copy_only=False)
    found: NDArray[np.bool_] = np.logical_and(moved, updates)
    return found


def _places(target: Target) -> list[int]:
    names = [column.name for column in target.table.columns]
    return [names.index(name) for name in target.table.key]


def _array(rows: pa.Table, name: str) -> pa.Array:
    column = rows.column(name)
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else (pa.array([], column.type))
    )


def _table(op: str, columns: Sequence[pa.Array], lsn: LogPosition, seq: int, now: int, count: int) -> pa.Table:
    numbers = {"commit_lsn": lsn, "seq": seq}
    made = {OP: pa.repeat(op, count)}
    made |= {name: pa.array(np.full(count, number, dtype=np.int64)) for name, number in numbers.items()}
    made |= {"xid": pa.nulls(count, pa.int64()), "commit_ts": pa.array(np.full(count, now, dtype=np.int64))}
    return pa.table(made | {f"c{i}": column.cast(TEXT) for i, column in enumerate(columns)})
