"""Counts the copies of rows that a piece adds to and removes from a table without a key.

Under REPLICA IDENTITY FULL each change carries the whole old row, including large values. So an update removes one row
and adds another. Rows are equal if all their texts are: the types of a table need not have an equality operator, and if
they have one it may be coarser. The result of a piece is a signed count for each distinct row. The snapshot of a table
without a key is a single chunk, so it contains all changes of a transaction or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.key_halves import encode, sent
from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Changes


@dataclass(frozen=True)
class Counted:
    """The net effect of a piece on a multiset of rows.

    :param rows: the relation's columns as text, each distinct row once.
    :param count: copies to add, or if negative to remove; never zero.
    """

    rows: pa.RecordBatch
    count: NDArray[np.int64]


def count_rows(changes: Changes, kept: NDArray[np.bool_], truncated_at: int = -1) -> Counted:
    """Count how many copies of each row the kept changes add and remove.

    :param changes: row changes under REPLICA IDENTITY FULL, in order.
    :param kept: for each change, whether it applies.
    :param truncated_at: index of the last truncate that applies; the sink's rows are to be deleted first, and changes
        before it are ignored.
    :raises ProtocolError: when a change does not carry the whole row.
    """
    kept = kept & (np.arange(len(changes.op)) > truncated_at)
    lost = np.flatnonzero(kept & np.isin(changes.op, [ord("u"), ord("d")]))
    gained = np.flatnonzero(kept & np.isin(changes.op, [ord("i"), ord("u")]))
    columns = [sent(changes, column, ()) for column in range(len(changes.new))]
    untold = any(unsent is not None and unsent[gained].any() for _, unsent in columns)
    if untold or not np.all(changes.old_kind[lost] == ord("O")):
        table = f"{changes.relation.schema}.{changes.relation.name}"
        raise ProtocolError(
            f"a change of {table} does not carry the whole row",
            f"The table has no key: set REPLICA IDENTITY FULL again, and run `airflow-cdc resnapshot --table {table}`.",
        )
    before, after = pa.array(lost), pa.array(gained)
    values = [
        pa.concat_arrays([*([changes.old[i].take(before)] if changes.old is not None else []), value.take(after)])
        for i, (value, _) in enumerate(columns)
    ]
    code, distinct = encode(values)
    count = np.bincount(code[len(lost) :], minlength=distinct) - np.bincount(code[: len(lost)], minlength=distinct)
    first = np.full(distinct, -1)
    first[code[::-1]] = np.arange(len(code))[::-1]
    stays = np.flatnonzero(count)
    names = [column.name for column in changes.relation.columns]
    rows = pa.RecordBatch.from_arrays(values, names=names).take(pa.array(first[stays]))
    return Counted(rows, count[stays])
