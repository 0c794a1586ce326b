"""Decodes Postgres's logical replication stream into Arrow, a whole piece of it at a time.

The format is protocol version 1 of the ``pgoutput`` plugin with values as text (Postgres documentation, "Logical
Replication Message Formats"). A Python loop over rows would be slower than the server sends. So each step here works
on all messages of a piece, or on one column of all rows of a relation, at once. A row's values lie one behind the
other with their lengths between them, so the positions of a column in *all* rows give those of the next column.

Nothing is interpreted: values stay text, and relations are as the server describes them. A piece carries the context
that its messages need (relations, open transaction), so pieces can be decoded anywhere and in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn
from airflow_cdc_provider.engine.core.row_changes import Changes, Flags, Ints, Octets, Relation, RelationColumn
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput_tuples import tuples
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput_wire import REPORT, Wire, int32, octet, refuse
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece

_EPOCH = 946_684_800_000_000  # 2000-01-01, where Postgres counts from, in microseconds since the Unix epoch
_B, _C, _R, _I, _U, _D, _T = b"BCRIUDT"
_KEY, _OLD, _NEW = b"KON"
# Rows that a message changes, by its kind. A TRUNCATE changes one for each relation it lists; these are counted later.
_CHANGES = np.zeros(256, np.int64)
_CHANGES[[_I, _U, _D, _T]] = 1


def parse_relation(body: bytes) -> Relation:
    """Parse the body of a Relation message.

    :raises ProtocolError: when it is not one.
    """
    try:
        kind, oid = struct.unpack_from(">cI", body)
        schema, name, rest = body[5:].split(b"\0", 2)
        identity, count = struct.unpack_from(">cH", rest)
        at, columns = 3, []
        for _ in range(count):
            if rest[at] > 1:
                raise ValueError(f"{rest[at]} as flags of a column")
            end = rest.index(b"\0", at + 1)
            type_oid, modifier = struct.unpack_from(">Ii", rest, end + 1)
            columns.append(RelationColumn(rest[at + 1 : end].decode(), type_oid, modifier, bool(rest[at])))
            at = end + 9
        if kind != b"R" or identity not in (b"d", b"n", b"f", b"i") or at != len(rest):
            raise ValueError(f"kind {kind!r}, replica identity {identity!r}, {len(rest) - at} bytes too many")
        return Relation(oid, schema.decode(), name.decode(), identity.decode(), tuple(columns))
    except (struct.error, ValueError, IndexError) as error:
        message = f"malformed Relation message of {len(body)} bytes, {body[:60]!r}: {error}"
        raise ProtocolError(message, REPORT) from None


def decode(piece: Piece) -> list[Changes]:
    """Decode the row changes of a piece: an entry for each version of a relation, ordered by their first messages.

    :raises ProtocolError: when the bytes are not what the protocol allows.
    """
    wire = Wire.of(piece)
    rows = _rows(wire, piece.transaction)
    versions = _versions(wire, piece.relations)
    # A row belongs to the version of its oid that began last before it: one binary search for all rows, in which the
    # first key stands for "none".
    oids = np.array([-1, *(relation.oid for _, relation in versions)], np.int64)
    keys = np.array([0, *(relation.oid << 32 | since for since, relation in versions)], np.uint64)
    sought = rows.oid.astype(np.uint64) << np.uint64(32) | rows.order.astype(np.uint64)
    found = np.searchsorted(keys, sought, side="right") - 1
    refuse(
        oids[found] != rows.oid,
        lambda i: f"{wire.name(rows.order[i])} changes relation {rows.oid[i]}, which has not been described",
        "Start the stream again from its last commit: the server then describes every relation again.",
    )
    grouped = np.argsort(found.astype(np.min_scalar_type(len(keys))), kind="stable")  # small integers: a radix sort
    parts = np.split(grouped, np.flatnonzero(np.diff(found[grouped])) + 1) if len(found) else []
    parts.sort(key=lambda part: int(part[0]))
    return [
        _changes(wire, versions[found[part[0]] - 1][1], rows if len(parts) == 1 else rows.take(part)) for part in parts
    ]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Row changes: arrays with one entry for each; ``start`` and ``end`` are those of its message in the data.

    :param tuple_kind: of its first tuple; meaningless for a truncate.
    """

    order: Ints
    op: Octets
    oid: Ints
    tuple_kind: Octets
    start: Ints
    end: Ints
    xid: Ints
    commit_lsn: Ints
    commit_ts: Ints
    seq: Ints

    def take(self, index: Ints) -> _Rows:
        return _Rows(*(getattr(self, f.name)[index] for f in fields(self)))


def _rows(wire: Wire, opened: OpenTransaction | None) -> _Rows:
    """Find the row changes, and the transaction of each."""
    begins = wire.kind == _B
    inside = np.cumsum(begins) - np.cumsum(wire.kind == _C) + (opened is not None)
    refuse(inside > 1, lambda i: f"{wire.name(i)} begins a transaction inside another")
    refuse(inside < 0, lambda i: f"{wire.name(i)} commits outside a transaction")
    count = _CHANGES[wire.kind]
    refuse(count > inside, lambda i: f"{wire.name(i)} changes rows outside a transaction")
    truncates = np.flatnonzero(wire.kind == _T)
    listed = count[truncates] = wire.read(">i4", wire.start[truncates] + 1)
    wrong = (wire.length[truncates] != 6 + 4 * count[truncates]) | (wire.read("u1", wire.start[truncates] + 5) > 3)
    refuse(wrong, lambda i: f"{wire.name(truncates[i])} does not have the form that {listed[i]} relations need")

    # One entry for each transaction; the first is the one that was open.
    first, at = opened or OpenTransaction(0, LOG_START, 0, 0), wire.start[begins]
    commit_lsn = np.append(first.commit_lsn, wire.read(">i8", at + 1))
    commit_ts = np.append(first.commit_ts, wire.read(">i8", at + 9) + _EPOCH)
    xid = np.append(first.xid, wire.read(">u4", at + 17))
    _check_transactions(wire, begins, commit_lsn, commit_ts)
    before = np.cumsum(count) - count
    earlier = before[begins]

    order = np.repeat(np.arange(len(count)), count)
    number, start, op = np.arange(len(order)), wire.start[order], wire.kind[order]
    head = wire.head[order]
    oid = int32(head, 1) & 0xFFFFFFFF
    if len(truncates):
        those = np.flatnonzero(op == _T)
        oid[those] = wire.read(">u4", start[those] + 6 + 4 * (those - before[order[those]]))
    of_each = np.diff(earlier, prepend=0, append=len(order))
    return _Rows(
        order=order,
        op=op | np.uint8(0x20),  # to lower case
        oid=oid,
        tuple_kind=octet(head, 5),
        start=start,
        end=start + wire.length[order],
        xid=np.repeat(xid, of_each),
        commit_lsn=np.repeat(commit_lsn, of_each),
        commit_ts=np.repeat(commit_ts, of_each),
        seq=number + 1 - np.repeat(np.append(-first.seq, earlier), of_each),
    )


def _check_transactions(wire: Wire, begins: Flags, commit_lsn: Ints, commit_ts: Ints) -> None:
    """Refuse transactions whose begin and commit do not agree, or that come twice or out of order.

    :param commit_lsn, commit_ts: as the begins give them; the first entry is that of the transaction that was open.
    """
    begun, ended = np.flatnonzero(begins), np.flatnonzero(wire.kind == _C)
    for messages, size in ((begun, 21), (ended, 26)):
        wrong = wire.length[messages] != size
        refuse(wrong, lambda i, at=messages: f"{wire.name(at[i])} has bytes too many")  # type: ignore[misc]
    late = np.diff(commit_lsn) <= 0
    refuse(late, lambda i: f"{wire.name(begun[i])} begins a transaction that does not come after the one before")
    which, at = np.searchsorted(begun, ended), wire.start[ended]
    agree = (wire.read("u1", at + 1) == 0) & (wire.read(">i8", at + 2) == commit_lsn[which])
    agree &= wire.read(">i8", at + 18) + _EPOCH == commit_ts[which]
    refuse(~agree, lambda i: f"{wire.name(ended[i])} commits another transaction than has begun")


def _versions(wire: Wire, relations: Sequence[bytes]) -> list[tuple[int, Relation]]:
    """List the versions of relations, each with the message from which it is valid, ordered by oid and message."""
    described = [(0, body) for body in relations]
    for i in np.flatnonzero(wire.kind == _R).tolist():
        described.append((i, bytes(wire.data[wire.start[i] : wire.start[i] + wire.length[i]])))
    in_force: dict[bytes, bytes] = {}
    versions = []
    for since, body in described:
        oid = body[1:5]
        if in_force.get(oid) != body:  # the server repeats itself after every invalidation of its cache
            in_force[oid] = body
            versions.append((since, parse_relation(body)))
    return sorted(versions, key=lambda version: (version[1].oid, version[0]))


def _changes(wire: Wire, relation: Relation, rows: _Rows) -> Changes:
    """Decode the rows of one version of a relation."""

    def name(i: int) -> str:
        change = f"{chr(rows.op[i])!r} of {relation.schema}.{relation.name}"
        commit = format_lsn(Lsn(int(rows.commit_lsn[i])))
        return f"message {rows.order[i]} of the piece ({change} in transaction {rows.xid[i]}, committed at {commit})"

    inserted, updated, deleted = (rows.op == op for op in b"iud")
    with_new = inserted | updated
    kind = rows.tuple_kind
    with_old = (updated | deleted) & (kind == (_OLD if relation.replica_identity == "f" else _KEY))
    bad = (with_new & ~with_old & (kind != _NEW)) | (deleted & ~with_old)
    identity = f"under replica identity {relation.replica_identity!r}"
    refuse(bad, lambda i: f"{name(i)} has a row of kind {chr(kind[i])!r} {identity}")

    at, old = rows.start + 6, None
    if with_old.any():
        old, missing, at[with_old] = tuples(wire, relation, with_old, at[with_old], rows.end[with_old], name)
        if missing:
            column, where = next(iter(missing.items()))
            refuse(where, lambda i: f"{name(i)} leaves out the old value of {relation.columns[column].name}")
        if relation.replica_identity != "f":
            _check_keys(relation, with_old, old, name)
        both = with_old & updated  # if the message ends too early, the next one begins here, and never with an N
        refuse(both & (wire.read("u1", at) != _NEW), lambda i: f"{name(i)} has no new row behind the old one")
        at += both
    new, unchanged, at[with_new] = tuples(wire, relation, with_new, at[with_new], rows.end[with_new], name)
    bad = (with_new | deleted) & (at != rows.end)
    refuse(bad, lambda i: f"{name(i)} has {rows.end[i] - at[i]} bytes too many")
    common = (rows.order, rows.op, rows.xid, rows.commit_lsn, rows.commit_ts, rows.seq)
    return Changes(relation, *common, new, unchanged, old, np.where(with_old, kind, np.uint8(0)))


def _check_keys(relation: Relation, with_old: Flags, old: tuple[pa.Array, ...], name: Callable[[int], str]) -> None:
    """Refuse an old key that lacks a column of the replica identity or has a further one."""
    count = int(with_old.sum())
    for column, values in zip(relation.columns, old, strict=True):
        if len(values) - values.null_count != (count if column.key else 0):
            wrong = with_old & (values.is_null().to_numpy(zero_copy_only=False) == column.key)
            kind = "lacks" if column.key else "has"
            refuse(wrong, lambda i, text=f"{kind} {column.name}": f"{name(i)}: its old key {text}")  # type: ignore[misc]
