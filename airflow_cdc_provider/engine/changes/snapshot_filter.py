"""What a piece of the stream does to a mirror: the chunk filter, and the net effect per key.

A row change touches up to two keys: an update that changes the key takes the row away from
one and puts it at another, and the two may lie in different chunks. So changes are split into
*halves*, ``erase(key)`` and ``write(key)``, each with a transaction and a key of its own, and
a half is dropped if and only if the snapshot of its key's chunk sees its transaction: the row
read from the source contains it already. Most transactions are seen by all snapshots of a
table or by none, which needs no key; only for the rest is the source asked which chunk a key
lies in, because text keys must never be compared by anyone but Postgres.

The halves that stay are collapsed to one row a key, so that a sink applies a piece as one
delete and one upsert. Postgres does not send TOASTed values that an update left alone. They
are those of the row's past, which is followed along its *lineage*: the writes to one key up to
the erase that ends them, joined by moves to the writes at the next key. What no change in the
lineage carries is *missing*, and stands in the sink at the key where the lineage began, its
*origin*. Applying a piece therefore means: read what is missing from the origins, then erase,
then write. The origin is unknown when the filter dropped the erase half of a move; such a
row has to be read again from the source.

The key must be one that Postgres checks at once: a deferrable key may be held by two rows in
the middle of a transaction, and no replica identity index is deferrable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import Changes

_WINDOW = 1 << 31
_MASK = (1 << 32) - 1


class Visibility(Enum):
    """How many of a table's chunk snapshots see a transaction."""

    ALL = "all"
    NONE = "none"
    SOME = "some"


@dataclass(frozen=True)
class Halves:
    """Row changes split by the key they touch, in order; the erase half of a move precedes its write half.

    :param row: index of the change.
    :param erase: True where the key loses its row, False where a row is written.
    :param key: the key touched, one array per key column.
    :param moved_from: for the write half of a move the index of its erase half, otherwise -1.
    """

    row: NDArray[np.int64]
    erase: NDArray[np.bool_]
    key: tuple[pa.Array, ...]
    moved_from: NDArray[np.int64]


@dataclass(frozen=True)
class Collapsed:
    """The net effect of a piece: one row per key touched.

    :param rows: the relation's columns as text; null where NULL, where missing, and outside the key where erased.
    :param erased: True where no row stands at the key in the end.
    :param fresh: True where none stood there before: the first half is an insert, or where a move ends.
    :param missing: by column index, True where the value was not sent and has to come from the origin;
        only columns that miss some value.
    :param origin: the key, before the piece, of the row that has the missing values, one array per key
        column; null where nothing is missing, and where the row must be read again from the source.
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


def split(changes: Changes, key: tuple[int, ...]) -> Halves:
    """Split row changes into halves; truncates have none.

    :param changes: row changes in order.
    :param key: indices of the key columns; none for a table without a key.
    :raises ProtocolError: when a change does not tell its key.
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
    keys = tuple(_take(column, row + np.where(erase, count, 0) if old else row) for column in columns)
    if any(column.null_count for column in keys):
        table = f"{changes.relation.schema}.{changes.relation.name}"
        raise ProtocolError(
            f"a change of {table} does not tell its key",
            "Check the replica identity of the table, and that the server runs the newest minor release.",
        )
    return Halves(row, erase, keys, np.where(arrives, np.arange(len(row)) - 1, -1))


def keep(
    halves: Halves,
    xid: NDArray[np.int64],
    chunk_of: Callable[[Sequence[pa.Array]], NDArray[np.int64]],
    snapshots: Sequence[Snapshot],
) -> NDArray[np.bool_]:
    """Tell which halves the table's chunks do not contain yet.

    :param halves: the halves of some changes.
    :param xid: transaction id of each *change* (low 32 bits).
    :param chunk_of: tells the chunks of keys, as indices into ``snapshots``; called at most once,
        with the key columns of those halves for which it matters.
    :param snapshots: what each chunk was read with; without any, everything is kept.
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
    """Tell what a truncate means: ALL drop it, NONE apply it, SOME read the table again.

    :param snapshots: of the table's chunks while they filter; together they hold the whole table.
    :param reread: of re-reads of single keys. They may hold rows from after the truncate, which must stay, and say
        nothing of all the other rows, which must go.
    """
    xids = np.array([xid])
    seen = seen_by(xids, snapshots)[0]
    if snapshots and seen == len(snapshots):  # whatever was read again was read later, and sees it too
        return Visibility.ALL
    return Visibility.SOME if seen or seen_by(xids, reread)[0] else Visibility.NONE


def collapse(
    changes: Changes, halves: Halves, kept: NDArray[np.bool_], key: tuple[int, ...], truncated_at: int = -1
) -> Collapsed:
    """Work out the net effect of the kept halves of a piece.

    :param changes: the row changes of one relation version in one piece.
    :param halves: the result of :func:`split` for them.
    :param kept: the result of :func:`keep` for them.
    :param key: indices of the key columns, at least one.
    :param truncated_at: index of the last truncate that applies; the sink's rows are to be deleted
        first, and halves before it are ignored.
    """
    chosen = np.flatnonzero(kept & (halves.row > truncated_at))
    row, erase = halves.row[chosen], halves.erase[chosen]
    keys = [_take(column, chosen) for column in halves.key]
    code, distinct = encode(keys)
    last = np.empty(distinct, dtype=np.int64)
    last[code] = np.arange(len(code))  # of the halves of one key the last stays
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
            values.append(_take(keys[key.index(column)], last))
        elif lineages is None or unsent is None:
            values.append(_take(value, row[last], erased))
        else:
            source = lineages.latest(~unsent[row], last)
            unknown = (source < 0) & ~erased
            values.append(_take(value, row[source], erased | unknown))
            if unknown.any():
                missing[column] = unknown

    rows = pa.RecordBatch.from_arrays(values, names=[column.name for column in changes.relation.columns])
    origin = np.full(len(last), -1)
    if lineages is not None and missing:
        origin = np.where(np.logical_or.reduce(list(missing.values())), lineages.origin[last], -1)
    return Collapsed(rows, erased, fresh[last], missing, tuple(_take(column, origin, origin < 0) for column in keys))


def _links(halves: Halves, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Express ``moved_from`` in terms of the chosen halves: -1 where there is no erase half or it was not chosen."""
    index = np.full(len(halves.row) + 1, -1)  # the last entry answers for the -1 of halves that are no moves
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

    A run is what happens to one row at one key, up to the erase that ends it. A move's write half starts
    a run that continues the one its erase half ended; following these links to the first run of each row,
    in doubling steps, gives its lineage. A row from before the piece had the key of its first run; one that
    seems to come out of nothing, after an erase or a truncate, is not trusted to have an origin.
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


def sent(changes: Changes, column: int, key: tuple[int, ...]) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """Return a column's new values and where they were not sent, if that is anywhere; ``None`` if nowhere.

    An unchanged value is in the old row too, and Postgres sends old rows with TOASTed values inline.
    """
    new, unsent = changes.new[column], changes.unchanged.get(column)
    if unsent is None or changes.old is None:
        return new, unsent
    told = unsent & (changes.old_kind == ord("O"))
    if column in key:
        told |= unsent & (changes.old_kind == ord("K"))
    unsent = unsent & ~told
    return pc.if_else(pa.array(told), changes.old[column], new), unsent if unsent.any() else None


def seen_by(xids: NDArray[np.int64], snapshots: Sequence[Snapshot]) -> NDArray[np.int64]:
    """Count, for each 32-bit transaction id, the snapshots that see it.

    A snapshot sees the ids below its xmax but for those it lists, so sorting the bounds and the lists of
    all snapshots counts them for all ids at once; ids outside of all bounds do not even need that.
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


def encode(columns: Sequence[pa.Array]) -> tuple[NDArray[np.int64], int]:
    """Number the distinct rows of some columns, NULLs being equal: the number of each row, and how many there are."""
    code, distinct = _number(columns[0])
    for column in columns[1:]:
        more, factor = _number(column)
        code, distinct = _number(pa.array(code * factor + more))  # both below the row count: no overflow
    return code, distinct


def _number(column: pa.Array) -> tuple[NDArray[np.int64], int]:
    encoded = column.dictionary_encode()
    distinct = len(encoded.dictionary)
    return pc.fill_null(encoded.indices, distinct).to_numpy().astype(np.int64), distinct + bool(column.null_count)


def _take(column: pa.Array, index: NDArray[np.int64], null: NDArray[np.bool_] | None = None) -> pa.Array:
    """Take rows of a column, nulls where told; a column taken as it is costs nothing."""
    if null is not None and null.any():
        return column.take(pa.array(index, mask=null))
    if len(index) == len(column) and np.array_equal(index, np.arange(len(index))):
        return column
    return column.take(pa.array(index))


def _booleans(array: pa.Array) -> NDArray[np.bool_]:
    booleans: NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return booleans
