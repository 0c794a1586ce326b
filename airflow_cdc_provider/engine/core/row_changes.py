"""Row changes as the log describes them, column by column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Octets = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Bytes = bytes | bytearray | memoryview
"""A buffer that has messages in it."""


@dataclass(frozen=True)
class RelationColumn:
    """A column as a Relation message describes it.

    :param key: whether it is part of the replica identity.
    """

    name: str
    type_oid: int
    type_modifier: int
    key: bool


@dataclass(frozen=True)
class Relation:
    """A table as a Relation message describes it.

    :param replica_identity: d(efault), n(othing), f(ull) or i(ndex).
    """

    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, eq=False)
class Changes:
    """The row changes of one version of a relation within one piece, in order.

    If the piece describes a relation again and differently, the relation has a ``Changes`` for each description.

    :param order: index of each row's message within the piece; a TRUNCATE gives each of its relations a row.
    :param op: ``i``, ``u``, ``d`` or ``t``, as byte values.
    :param xid: transaction id (32 bits).
    :param commit_lsn: the LSN of the transaction's commit record.
    :param commit_ts: microseconds since the Unix epoch.
    :param seq: 1, 2, 3 and so on within the transaction, across relations and pieces.
    :param new: the new row, one array of large strings for each column; null for deletes and truncates, and for
        TOASTed values that were not sent because they did not change.
    :param unchanged: by index of the column, the rows whose TOASTed value was not sent; only columns that have any.
    :param old: the old key or row, like ``new``; None if no row carries one.
    :param old_kind: ``K`` (only columns of the replica identity have values), ``O`` (the whole row) or 0 (none).
    """

    relation: Relation
    order: Ints
    op: Octets
    xid: Ints
    commit_lsn: Ints
    commit_ts: Ints
    seq: Ints
    new: tuple[pa.Array, ...]
    unchanged: dict[int, Flags]
    old: tuple[pa.Array, ...] | None
    old_kind: Octets
