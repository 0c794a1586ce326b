"""Turns the decoded changes of a piece into their effects on each target table.

Runs on executors. Changes that a chunk or a re-read already contains are dropped. The others are collapsed to one row a
key (mirror), counted for each distinct row (mirror of a table without a key), or kept change by change (changelog).
Values are text throughout; the sink gives them types::

    Changes, by relation --> _by_table: captured columns, leaves of a table in one order
                                 |
                             key_halves.split --> _keep: snapshot_filter.keep, re-reads
                                 |
             +-------------------+----------------------+
             v                   v                      v
         collapse            row_counts            _changelog_rows
        (mirror, by key)   (mirror, no key)         (changelog)
             +-------------------+----------------------+
                                 v
                              Effect
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.collapse import collapse
from airflow_cdc_provider.engine.changes.key_halves import Halves, sent, split
from airflow_cdc_provider.engine.changes.row_counts import count_rows
from airflow_cdc_provider.engine.changes.schema_change import fits
from airflow_cdc_provider.engine.changes.snapshot_filter import Visibility, keep, truncate_visibility
from airflow_cdc_provider.engine.core.effect import COUNT, ERASED, MISSING, OLD_KIND, OP, UNCHANGED, Effect
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.row_changes import Changes
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.table_operations import TableOperations

AskChunks = Callable[[Table, Sequence[tuple[str, ...]], Sequence[pa.Array]], NDArray[np.int64]]
AskMembers = Callable[[Table, Sequence[tuple[str, ...]], Sequence[pa.Array]], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class TableFilter:
    """The filter for changes of a table that its chunks and re-reads already contain.

    :param bounds: lower bounds of all chunks but the first, as key texts, ascending.
    :param snapshots: the chunks' snapshots.
    :param reread: key texts that were read again, with the snapshot of that read.
    """

    bounds: tuple[tuple[str, ...], ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    reread: Mapping[tuple[str, ...], Snapshot] = field(default_factory=dict)

    def truncate(self, xid: int) -> Visibility:
        """Return how much of the table was read after a truncate by a transaction."""
        return truncate_visibility(xid, self.snapshots, tuple(set(self.reread.values())))


@dataclass(frozen=True)
class PieceEffects:
    """The effects of a piece, in the order in which they must be applied.

    :param split_truncates: tables that have to be read again because of a truncate: some of their rows were read after
        it and others before, or it emptied only some of their partitions.
    :param changes: by table, the changes in the piece, before filter and collapse.
    :param operations: by table, which of them are inserts, updates and deletes.
    """

    effects: tuple[Effect, ...]
    split_truncates: frozenset[str]
    changes: Mapping[str, int]
    operations: Mapping[str, TableOperations]


def effects(
    decoded: Sequence[Changes],
    tables: Mapping[int, Sequence[Table]],
    filters: Mapping[str, TableFilter],
    mode: Literal["mirror", "changelog"],
    ask: AskChunks,
    ask_members: AskMembers,
) -> PieceEffects:
    """Return the effects of decoded changes on the target tables.

    :param tables: captured tables by the oid of each of their leaves.
    :param filters: open filters by table label.
    :param ask: returns the chunks of keys, see :func:`.chunk_sql.chunk_of`.
    :param ask_members: matches keys against re-read keys, see :meth:`.sinks.contract.Sink.members`.
    """
    result: list[Effect] = []
    split_truncates: set[str] = set()
    counted: Counter[str] = Counter()
    operations: dict[str, TableOperations] = {}
    for table, changes in _by_table(decoded, tables):
        counted[table.label] += len(changes.op)
        more = TableOperations.of(changes.op, changes.commit_ts)
        operations[table.label] = operations.get(table.label, TableOperations()) + more
        filter_ = filters.get(table.label, TableFilter())
        key = tuple(_index(table, name) for name in table.key)
        truncated_at = -1
        for row in np.flatnonzero(changes.op == ord("t")):
            visibility = filter_.truncate(int(changes.xid[row]))
            if visibility is Visibility.SOME or (visibility is Visibility.NONE and len(table.leaves) > 1):
                split_truncates.add(table.label)
            elif visibility is Visibility.NONE:
                truncated_at = int(row)
        halves = split(changes, key)
        kept = _keep(halves, changes, table, filter_, ask, ask_members)
        fresh = None
        if mode == "mirror" and not key:
            rows = _counted_rows(changes, halves, kept, truncated_at)
        elif mode == "mirror":
            rows, fresh = net_rows(changes, halves, kept, key, truncated_at)
        else:
            rows = _changelog_rows(changes, halves, kept, key, table, filter_)
        if rows.num_rows or truncated_at >= 0:
            result.append(Effect(table.label, truncated_at >= 0, rows, fresh))
    return PieceEffects(tuple(result), frozenset(split_truncates), counted, operations)


def between(changes: Changes, since: LogPosition, before: LogPosition) -> Changes:
    """Return the changes of transactions whose commit record lies in ``[since, before)``."""
    chosen = (changes.commit_lsn >= since) & (changes.commit_lsn < before)
    if chosen.all():
        return changes
    index = np.flatnonzero(chosen)
    take = pa.array(index)

    def columns(arrays: Sequence[pa.Array]) -> tuple[pa.Array, ...]:
        return tuple(column.take(take) for column in arrays)

    return Changes(
        relation=changes.relation,
        order=changes.order[index],
        op=changes.op[index],
        xid=changes.xid[index],
        commit_lsn=changes.commit_lsn[index],
        commit_ts=changes.commit_ts[index],
        seq=changes.seq[index],
        new=columns(changes.new),
        unchanged={column: mask[index] for column, mask in changes.unchanged.items() if mask[index].any()},
        old=None if changes.old is None else columns(changes.old),
        old_kind=changes.old_kind[index],
    )


def _by_table(decoded: Sequence[Changes], tables: Mapping[int, Sequence[Table]]) -> list[tuple[Table, Changes]]:
    """Select the captured columns of changes, and bring the changes of all leaves of a table into one order.

    Tables that are published and not captured are left out. So are changes in another format than the table's: if the
    piece has no :class:`.schema_change.FormatChange`, the table's chunks contain them.
    """
    result: list[tuple[Table, Changes]] = []
    partitioned: dict[str, list[tuple[Table, Changes]]] = {}
    for changes in decoded:
        for table in tables.get(changes.relation.oid, ()):
            if not len(changes.op) or not fits(table, changes.relation):
                continue
            aligned = (table, _align(changes, table))
            if len(table.leaves) > 1:
                partitioned.setdefault(table.label, []).append(aligned)
            else:
                result.append(aligned)
    for parts in partitioned.values():
        result.append((parts[0][0], _interleave([changes for _, changes in parts])))
    return result


def _align(changes: Changes, table: Table) -> Changes:
    """Bring the columns of a relation into the order of the captured columns, and leave out the others."""
    columns = changes.relation.columns
    names = [column.name for column in columns]
    order = [names.index(column.name) for column in table.columns]
    if order == list(range(len(names))):
        return changes
    return replace(
        changes,
        relation=replace(changes.relation, columns=tuple(columns[i] for i in order)),
        new=tuple(changes.new[i] for i in order),
        old=None if changes.old is None else tuple(changes.old[i] for i in order),
        unchanged={place: changes.unchanged[i] for place, i in enumerate(order) if i in changes.unchanged},
    )


def _interleave(parts: Sequence[Changes]) -> Changes:
    """Join the changes of several leaves in the order of the log, by change of transaction and sequence."""
    if len(parts) == 1:
        return parts[0]
    lengths = [len(part.op) for part in parts]
    order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")
    take = pa.array(order)

    def vector(name: str) -> NDArray[np.int64]:
        joined: NDArray[np.int64] = np.concatenate([getattr(part, name) for part in parts])[order]
        return joined

    def columns(arrays: Sequence[tuple[pa.Array, ...]]) -> tuple[pa.Array, ...]:
        return tuple(pa.concat_arrays(column).take(take) for column in zip(*arrays, strict=True))

    width = len(parts[0].new)
    absent = [tuple(pa.nulls(n, pa.large_string()) for _ in range(width)) for n in lengths]
    old = [part.old or nulls for part, nulls in zip(parts, absent, strict=True)]
    unchanged = {}
    for column in sorted({c for part in parts for c in part.unchanged}):
        masks = [
            part.unchanged.get(column, np.zeros(n, dtype=np.bool_)) for part, n in zip(parts, lengths, strict=True)
        ]
        unchanged[column] = np.concatenate(masks)[order]
    return Changes(
        relation=parts[0].relation,
        order=vector("order"),
        op=np.concatenate([part.op for part in parts])[order],
        xid=vector("xid"),
        commit_lsn=vector("commit_lsn"),
        commit_ts=vector("commit_ts"),
        seq=vector("seq"),
        new=columns([part.new for part in parts]),
        unchanged=unchanged,
        old=columns(old) if any(part.old is not None for part in parts) else None,
        old_kind=np.concatenate([part.old_kind for part in parts])[order],
    )


def _letters(codes: NDArray[np.uint8]) -> pa.Array:
    """Return texts of one letter each, from their codes."""
    edges = np.arange(len(codes) + 1, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(codes), [None, pa.py_buffer(edges), pa.py_buffer(codes)])


def _index(table: Table, name: str) -> int:
    return [column.name for column in table.columns].index(name)


def _keep(
    halves: Halves, changes: Changes, table: Table, filter_: TableFilter, ask: AskChunks, ask_members: AskMembers
) -> NDArray[np.bool_]:
    """Return the halves that neither the chunks nor the re-reads contain; re-reads are later and contain more."""
    kept = keep(halves, changes.xid, lambda keys: ask(table, filter_.bounds, keys), filter_.snapshots)
    xids = changes.xid[halves.row]
    members = list(filter_.reread)
    visible = {snapshot: kept & snapshot.visible(xids) for snapshot in set(filter_.reread.values())}
    unsure = np.flatnonzero(np.logical_or.reduce([np.zeros_like(kept), *visible.values()]))
    if unsure.size:
        keys = [column.take(pa.array(unsure)) for column in halves.key]
        for place, member in ask_members(table, members, keys):
            if visible[filter_.reread[members[member]]][unsure[place]]:
                kept[unsure[place]] = False
    return kept


def net_rows(
    changes: Changes, halves: Halves, kept: NDArray[np.bool_], key: tuple[int, ...], truncated_at: int
) -> tuple[pa.Table, NDArray[np.bool_]]:
    """Return the rows of a mirror's :class:`Effect`, and which of them are fresh; see :func:`.collapse`."""
    net = collapse(changes, halves, kept, key, truncated_at)
    columns = {ERASED: pa.array(net.erased)}
    columns |= {f"c{i}": column for i, column in enumerate(net.rows.columns)}
    if net.missing:
        columns[MISSING] = array_literal({str(i): mask for i, mask in net.missing.items()})
        columns |= {f"o{i}": column for i, column in enumerate(net.origin)}
    return pa.table(columns), net.fresh


def _counted_rows(changes: Changes, halves: Halves, kept: NDArray[np.bool_], truncated_at: int) -> pa.Table:
    applies = np.zeros(len(changes.op), dtype=np.bool_)
    applies[halves.row[kept]] = True
    counted = count_rows(changes, applies, truncated_at)
    columns = {f"c{i}": column for i, column in enumerate(counted.rows.columns)}
    return pa.table({COUNT: pa.array(counted.count)} | columns)


def _changelog_rows(
    changes: Changes,
    halves: Halves,
    kept: NDArray[np.bool_],
    key: tuple[int, ...],
    table: Table,
    filter_: TableFilter,
) -> pa.Table:
    """Return one row a change; if a chunk contains one half of a key change, the other half is an insert or delete."""
    count = len(changes.op)
    op = changes.op.copy()
    written, erased = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    written[halves.row[kept & ~halves.erase]] = True
    erased[halves.row[kept & halves.erase]] = True
    moved = np.zeros(count, dtype=np.bool_)
    moved[halves.row[halves.moved_from >= 0]] = True
    op[moved & written & ~erased] = ord("i")
    op[moved & erased & ~written] = ord("d")
    stays = written | erased
    for row in np.flatnonzero(changes.op == ord("t")):
        stays[row] = filter_.truncate(int(changes.xid[row])) is not Visibility.ALL

    deleted = op == ord("d")
    columns = {
        OP: _letters(op),
        "commit_lsn": pa.array(changes.commit_lsn),
        "seq": pa.array(changes.seq),
        "xid": pa.array(changes.xid),
        "commit_ts": pa.array(changes.commit_ts),
    }
    unchanged = {}
    for i in range(len(changes.new)):
        column, unsent = sent(changes, i, key)
        # A delete has its key here; the other columns of its row are only in _before.
        if deleted.any():
            gone = changes.old[i] if i in key and changes.old is not None else pa.scalar(None, pa.large_string())
            column = pc.if_else(pa.array(deleted), gone, column)
        columns[f"c{i}"] = column
        if unsent is not None:
            unchanged[quoted_name(table.columns[i].name)] = unsent & ~deleted
    if unchanged:
        columns[UNCHANGED] = array_literal(unchanged)
    if changes.old is not None:
        kind = pa.array([chr(code) if code else None for code in changes.old_kind], pa.string())
        columns[OLD_KIND] = pc.if_else(pa.array(op == ord("i")), pa.scalar(None, pa.string()), kind)
        columns |= {f"b{i}": column for i, column in enumerate(changes.old)}
    rows = pa.table(columns)
    return rows if stays.all() else rows.take(pa.array(np.flatnonzero(stays)))


def array_literal(masks: Mapping[str, NDArray[np.bool_]]) -> pa.Array:
    """Return for each row the text of the Postgres array of the names whose mask is set; null if none is."""
    any_ = pa.array(np.logical_or.reduce(list(masks.values())))
    parts = [pc.if_else(pa.array(mask), f"{name},", "") for name, mask in masks.items()]
    joined = pc.binary_join_element_wise(*parts, "") if len(parts) > 1 else parts[0]
    literal = pc.binary_join_element_wise("{", pc.utf8_rtrim(joined, ","), "}", "")
    return pc.if_else(any_, literal, pa.scalar(None, pa.string()))


def quoted_name(name: str) -> str:
    """Return a name quoted for the text of an array."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
