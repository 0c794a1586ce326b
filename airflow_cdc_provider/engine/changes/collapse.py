"""Collapses changes to their net effect on each key; see :mod:`.snapshot_filter` for halves and lineages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.key_halves import Halves, encode, sent, take
from airflow_cdc_provider.engine.core.row_changes import Changes


@dataclass(frozen=True)
class Collapsed:
    """The net effect of a piece: one row per key touched.

    :param rows: the relation's columns as text; null where NULL, where missing, and outside the key where erased.
    :param erased: true where no row is at the key in the end.
    :param fresh: true where no row was at the key before: the first half is an insert, or the end of a move.
    :param missing: by column index, true where the value was not sent and has to come from the origin; only columns
        that miss some value.
    :param origin: the key, before the piece, of the row that has the missing values, one array per key column; null
        where nothing is missing, and where the row must be read again from the source.
    """

    rows: pa.RecordBatch
    erased: NDArray[np.bool_]
    fresh: NDArray[np.bool_]
    missing: dict[int, NDArray[np.bool_]]
    origin: tuple[pa.Array, ...]


@dataclass(frozen=True)
class _Lineages:
    """The halves of a piece, sorted so that those of one source row are adjacent and in order.

    :param order: halves, lineage by lineage.
    :param start: for each place in ``order``, the place where its lineage starts.
    :param place: for each half, its place in ``order``.
    :param origin: for each half, a half whose key its row had before the piece, or -1 if unknown.
    """

    order: NDArray[np.int64]
    start: NDArray[np.int64]
    place: NDArray[np.int64]
    origin: NDArray[np.int64]

    def latest(self, sent: NDArray[np.bool_], halves: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the last half, up to and including each of ``halves``, that sent a value, or -1."""
        reached = np.maximum.accumulate(np.where(sent[self.order], np.arange(len(sent)), -1))
        place = self.place[halves]
        return np.where(reached[place] >= self.start[place], self.order[reached[place]], -1)


def collapse(
    changes: Changes, halves: Halves, kept: NDArray[np.bool_], key: tuple[int, ...], truncated_at: int = -1
) -> Collapsed:
    """Return the net effect of the kept halves of a piece.

    :param changes: the row changes of one relation version in one piece.
    :param halves: the result of :func:`split` for them.
    :param kept: the result of :func:`keep` for them.
    :param key: indices of the key columns, at least one.
    :param truncated_at: index of the last truncate that applies; the sink's rows are to be deleted first, and halves
        before it are ignored.
    """
    chosen = np.flatnonzero(kept & (halves.row > truncated_at))
    row, erase = halves.row[chosen], halves.erase[chosen]
    keys = [take(column, chosen) for column in halves.key]
    code, distinct = encode(keys)
    last = np.empty(distinct, dtype=np.int64)
    last[code] = np.arange(len(code))  # the last half of each key wins
    first = np.empty(distinct, dtype=np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    begun = ~erase & ((changes.op[row] == ord("i")) | (halves.moved_from[chosen] >= 0))
    fresh = begun[first][code]
    last.sort()
    erased = erase[last]

    columns = [sent(changes, column, key) for column in range(len(changes.new))]
    lineages = None
    if any(column not in key and unsent is not None for column, (_, unsent) in enumerate(columns)):
        lineages = _trace(code, erase, _links(halves, chosen), halves.moved_from[chosen] >= 0, truncated_at)
    missing: dict[int, NDArray[np.bool_]] = {}
    values = []
    for column, (value, unsent) in enumerate(columns):
        if column in key:
            values.append(take(keys[key.index(column)], last))
        elif lineages is None or unsent is None:
            values.append(take(value, row[last], erased))
        else:
            source = lineages.latest(~unsent[row], last)
            unknown = (source < 0) & ~erased
            values.append(take(value, row[source], erased | unknown))
            if unknown.any():
                missing[column] = unknown

    rows = pa.RecordBatch.from_arrays(values, names=[column.name for column in changes.relation.columns])
    origin = np.full(len(last), -1)
    if lineages is not None and missing:
        origin = np.where(np.logical_or.reduce(list(missing.values())), lineages.origin[last], -1)
    return Collapsed(rows, erased, fresh[last], missing, tuple(take(column, origin, origin < 0) for column in keys))


def _links(halves: Halves, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Express ``moved_from`` in terms of the chosen halves: -1 where there is no erase half or it was not chosen."""
    index = np.full(len(halves.row) + 1, -1)  # the last entry serves the -1 of halves that are not moves
    index[chosen] = np.arange(len(chosen))
    return index[halves.moved_from[chosen]]


def _trace(
    code: NDArray[np.int64],
    erase: NDArray[np.bool_],
    link: NDArray[np.int64],
    moved: NDArray[np.bool_],
    truncated_at: int,
) -> _Lineages:
    """Trace source rows through the halves.

    A run is the sequence of halves of one row at one key, up to the erase that ends it. A move's write half starts a
    run that continues the one that its erase half ended. Following these links to the first run of each row, in
    doubling steps, gives its lineage. A row from before the piece had the key of its first run. A row that appears
    after an erase or a truncate is treated as one without an origin.
    """
    count = len(code)
    order = np.argsort(code, kind="stable")
    first = np.ones(count, dtype=np.bool_)
    first[1:] = code[order[1:]] != code[order[:-1]]
    starts = first.copy()
    starts[1:] |= erase[order[:-1]]
    run = np.empty(count, dtype=np.int64)
    run[order] = np.cumsum(starts) - 1
    head = order[starts]

    root = np.where(link[head] >= 0, run[link[head]], np.arange(len(head)))
    while not np.array_equal(root, further := root[root]):
        root = further
    lineage = root[run]
    from_before = first[starts] & ~moved[head] & (truncated_at < 0)
    origin = np.where(from_before, head, -1)[lineage]

    order = np.argsort(lineage, kind="stable")
    start = np.searchsorted(lineage[order], lineage[order])
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    return _Lineages(order, start, place, origin)
