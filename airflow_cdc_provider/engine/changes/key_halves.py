"""Splits each change into its old and its new half, and numbers their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Changes


@dataclass(frozen=True)
class Halves:
    """Row changes split by the key that they touch, in order; the erase half of a move precedes its write half.

    :param row: index of the change.
    :param erase: true where the key loses its row, false where a row is written.
    :param key: the key that is touched, one array per key column.
    :param moved_from: for the write half of a move the index of its erase half, otherwise -1.
    """

    row: NDArray[np.int64]
    erase: NDArray[np.bool_]
    key: tuple[pa.Array, ...]
    moved_from: NDArray[np.int64]


def split(changes: Changes, key: tuple[int, ...]) -> Halves:
    """Split row changes into halves; truncates have none.

    :param changes: row changes in order.
    :param key: indices of the key columns; none for a table without a key.
    :raises ProtocolError: when a change does not carry its key.
    """
    count = len(changes.op)
    new = [sent(changes, column, key)[0] for column in key]
    old = [changes.old[column] for column in key] if changes.old is not None else []
    moved = np.zeros(count, dtype=np.bool_)
    for before, after in zip(old, new, strict=False):
        moved |= _booleans(pc.fill_null(pc.not_equal(before, after), False))

    row = np.repeat(np.arange(count), np.where(changes.op == ord("t"), 0, np.where(moved, 2, 1)))
    arrives = np.zeros(len(row), dtype=np.bool_)
    arrives[1:] = row[1:] == row[:-1]
    erase = (changes.op == ord("d"))[row] | (moved[row] & ~arrives)
    columns = [pa.concat_arrays(pair) for pair in zip(new, old, strict=True)] if erase.any() and old else new
    keys = tuple(take(column, row + np.where(erase, count, 0) if old else row) for column in columns)
    if any(column.null_count for column in keys):
        table = f"{changes.relation.schema}.{changes.relation.name}"
        raise ProtocolError(
            f"a change of {table} does not carry its key",
            "Check the replica identity of the table, and that the server runs the newest minor release.",
        )
    return Halves(row, erase, keys, np.where(arrives, np.arange(len(row)) - 1, -1))


def sent(changes: Changes, column: int, key: tuple[int, ...]) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """Return a column's new values, and a mask of those that were not sent, ``None`` if all were.

    An unchanged value is in the old row, too, and Postgres sends old rows with TOASTed values inline.
    """
    new, unsent = changes.new[column], changes.unchanged.get(column)
    if unsent is None or changes.old is None:
        return new, unsent
    logged = unsent & (changes.old_kind == ord("O"))
    if column in key:
        logged |= unsent & (changes.old_kind == ord("K"))
    unsent = unsent & ~logged
    return pc.if_else(pa.array(logged), changes.old[column], new), unsent if unsent.any() else None


def encode(columns: Sequence[pa.Array]) -> tuple[NDArray[np.int64], int]:
    """Return the number of each row among the distinct rows of some columns, and their count; NULLs are equal."""
    code, distinct = _number(columns[0])
    for column in columns[1:]:
        more, factor = _number(column)
        code, distinct = _number(pa.array(code * factor + more))  # both below the row count: no overflow
    return code, distinct


def _number(column: pa.Array) -> tuple[NDArray[np.int64], int]:
    encoded = column.dictionary_encode()
    distinct = len(encoded.dictionary)
    return pc.fill_null(encoded.indices, distinct).to_numpy().astype(np.int64), distinct + bool(column.null_count)


def take(column: pa.Array, index: NDArray[np.int64], null: NDArray[np.bool_] | None = None) -> pa.Array:
    """Take rows of a column, nulls where ``null`` is set; a column that is taken as it is costs nothing."""
    if null is not None and null.any():
        return column.take(pa.array(index, mask=null))
    if len(index) == len(column) and np.array_equal(index, np.arange(len(index))):
        return column
    return column.take(pa.array(index))


def _booleans(array: pa.Array) -> NDArray[np.bool_]:
    booleans: NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return booleans
