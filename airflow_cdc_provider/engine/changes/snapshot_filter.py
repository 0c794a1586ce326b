"""Filters the changes that a table's chunks already contain.

A row change touches up to two keys: an update that changes the key removes the row from one key and writes it at
another, and the two may lie in different chunks. So changes are split into *halves*, ``erase(key)`` and ``write(key)``,
each with its own transaction and key. A half is dropped if and only if the snapshot of its key's chunk sees its
transaction: then the row that was read from the source already contains it. Most transactions are seen by all snapshots
of a table or by none, so that no key is needed. Only for the others the source is asked in which chunk a key lies,
because only Postgres may compare text keys.

The halves that are kept are collapsed to one row a key (:mod:`.collapse`), so that a sink applies a piece as one delete
and one upsert. Postgres does not send TOASTed values that an update left unchanged. Such a value is an earlier value of
the row, which is followed along its *lineage*: the writes to one key up to the erase that ends them, joined by moves to
the writes at the next key. A value that no change in the lineage carries is *missing*. The sink has it at the key where
the lineage began, its *origin*. So applying a piece means: read missing values from the origins, then erase, then
write. The origin is unknown when the filter dropped the erase half of a move; such a row has to be read again from the
source.

The key must be one that Postgres checks immediately: two rows may have the same deferrable key in the middle of a
transaction. No replica identity index is deferrable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.key_halves import Halves
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot

_WINDOW = 1 << 31
_MASK = (1 << 32) - 1


class Visibility(Enum):
    """The share of a table's chunk snapshots that see a transaction."""

    ALL = "all"
    NONE = "none"
    SOME = "some"


def keep(
    halves: Halves,
    xid: NDArray[np.int64],
    chunk_of: Callable[[Sequence[pa.Array]], NDArray[np.int64]],
    snapshots: Sequence[Snapshot],
) -> NDArray[np.bool_]:
    """Return which halves the table's chunks do not contain yet.

    :param halves: the halves of some changes.
    :param xid: transaction id of each *change* (low 32 bits).
    :param chunk_of: returns the chunks of keys, as indices into ``snapshots``; called at most once, with the key
        columns of those halves for which it matters.
    :param snapshots: the snapshot of each chunk; without any, everything is kept.
    """
    xids = xid[halves.row]
    distinct, which = np.unique(xids, return_inverse=True)
    seen = seen_by(distinct, snapshots)[which]
    kept: NDArray[np.bool_] = seen == 0
    unsure = np.flatnonzero((seen > 0) & (seen < len(snapshots)))
    if unsure.size:
        chunk = chunk_of([column.take(pa.array(unsure)) for column in halves.key])
        if chunk.min() < 0:
            raise ValueError("every key lies in a chunk, but chunk_of() returned a negative index")
        order = np.argsort(chunk, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(chunk[order])) + 1):
            some = unsure[members]
            kept[some] = ~snapshots[chunk[members[0]]].visible(xids[some])
    return kept


def truncate_visibility(xid: int, snapshots: Sequence[Snapshot], reread: Sequence[Snapshot] = ()) -> Visibility:
    """Return what to do about a truncate: ALL drop it, NONE apply it, SOME read the table again.

    :param snapshots: of the table's chunks while they filter; together they cover the whole table.
    :param reread: of re-reads of single keys. They may contain rows from after the truncate, which must stay. All other
        rows must be removed.
    """
    xids = np.array([xid])
    seen = seen_by(xids, snapshots)[0]
    if snapshots and seen == len(snapshots):  # whatever was read again was read later, and sees it too
        return Visibility.ALL
    return Visibility.SOME if seen or seen_by(xids, reread)[0] else Visibility.NONE


def seen_by(xids: NDArray[np.int64], snapshots: Sequence[Snapshot]) -> NDArray[np.int64]:
    """Count, for each 32-bit transaction id, the snapshots that see it.

    A snapshot sees the ids below its xmax except those that it lists. So sorting the bounds and the lists of all
    snapshots counts them for all ids at once. Ids outside of all bounds do not even need that.
    """
    seen = np.zeros(len(xids), dtype=np.int64)
    if not snapshots:
        return seen
    lowest, highest = min(s.xmin for s in snapshots), max(s.xmax for s in snapshots)
    distance = ((xids - lowest + _WINDOW) & _MASK) - _WINDOW
    seen[distance < 0] = len(snapshots)
    between = (distance >= 0) & (distance < highest - lowest)
    if between.any():
        full = lowest + distance[between]
        xmax = np.sort(np.fromiter((s.xmax for s in snapshots), dtype=np.int64))
        running = np.sort(np.fromiter(chain.from_iterable(s.xip for s in snapshots), dtype=np.int64))
        listed = np.searchsorted(running, full, "right") - np.searchsorted(running, full, "left")
        seen[between] = len(snapshots) - np.searchsorted(xmax, full, "right") - listed
    return seen
