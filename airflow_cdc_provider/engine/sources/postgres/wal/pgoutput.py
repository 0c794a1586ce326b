"""Decodes Postgres's logical replication stream into Arrow, a whole piece of it at a time.

The format is protocol version 1 of the ``pgoutput`` plugin with values as text (Postgres documentation, "Logical
Replication Message Formats"). A Python loop over rows would be slower than the server sends, so each step here works
on all messages of a piece, or on one column of all rows of a relation, at once: a row's values lie one behind the
other with their lengths between them, so the positions of a column in *all* rows give those of the next column.

Nothing is interpreted: values stay text, and relations are what the server says. A piece carries the context that its
messages need (relations, open transaction), so pieces can be decoded anywhere and in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.row_changes import Bytes, Changes, Flags, Ints, Octets, Relation, RelationColumn

_EPOCH = 946_684_800_000_000  # 2000-01-01, where Postgres counts from, in microseconds since the Unix epoch


_B, _C, _R, _I, _U, _D, _T = b"BCRIUDT"


_KEY, _OLD, _NEW = b"KON"


_NULL, _UNCHANGED, _TEXT = b"nut"


# By kind of message: its least size (0 for kinds that protocol 1 does not have), and how many rows it changes (for
# TRUNCATE, which changes one for each relation it lists, more is found out later).
_LEAST, _CHANGES = np.zeros((2, 256), np.int64)


_LEAST[list(b"BCORYIUDTM")] = 21, 26, 10, 10, 7, 8, 8, 8, 6, 15


_CHANGES[[_I, _U, _D, _T]] = 1


_OPTIONS = "Start replication with proto_version '1' and without the options binary, streaming and two_phase."


_REPORT = "Start the stream again from its last commit; if that fails too, report it with the server's version."


@dataclass(frozen=True)
class OpenTransaction:
    """The transaction that a piece begins inside of, as in :class:`Changes`; ``seq`` is that of its last row change."""

    xid: int
    commit_lsn: int
    commit_ts: int
    seq: int


@dataclass(frozen=True)
class Piece:
    """A run of messages with the context needed to decode it alone.

    :param data: message bodies one behind the other, without the XLogData headers.
    :param lengths: the length of each, as little-endian 32-bit integers.
    :param relations: the Relation messages in force at the start; of several for an oid the last counts.
    :param transaction: the transaction in progress at the start, None outside of one.
    """

    data: Bytes = field(repr=False)
    lengths: Bytes = field(repr=False)
    relations: tuple[bytes, ...]
    transaction: OpenTransaction | None

    @property
    def size(self) -> int:
        """Bytes of all messages, also where ``data`` is somewhere else."""
        return int(np.frombuffer(self.lengths, "<i4").sum(dtype=np.int64))

    def parts(self) -> Sequence[Bytes]:
        """Pack the piece for shipping: one behind the other, these are :meth:`to_bytes`."""
        t = self.transaction
        opened = struct.pack("<Iqqq", t.xid, t.commit_lsn, t.commit_ts, t.seq) if t else b""
        parts = [opened, self.lengths, self.data, *self.relations]
        return [struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)), *parts]

    def to_bytes(self) -> bytes:
        """Pack the piece for shipping; :meth:`from_bytes` is the inverse."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, packed: Bytes) -> Piece:
        """Unpack what :meth:`to_bytes` returned, without a copy of the messages.

        :raises ProtocolError: when ``packed`` is something else or incomplete.
        """
        try:
            (count,) = struct.unpack_from("<I", packed)
            edges = list(accumulate(struct.unpack_from(f"<{count}Q", packed, 4), initial=4 + 8 * count))
            view = memoryview(packed)
            opened, lengths, data, *relations = (view[start:end] for start, end in pairwise(edges))
            transaction = OpenTransaction(*struct.unpack("<Iqqq", opened)) if opened else None
            if edges[-1] != len(packed):
                raise ValueError(f"it should have {edges[-1]}")
        except (struct.error, ValueError) as error:
            solution = "Let driver and executors run the same version of airflow-cdc-provider."
            raise ProtocolError(f"not a packed piece, {len(packed)} bytes: {error}", solution) from None
        return cls(data, lengths, tuple(map(bytes, relations)), transaction)


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
        raise ProtocolError(message, _REPORT) from None


def decode(piece: Piece) -> list[Changes]:
    """Decode the row changes of a piece: an entry for each version of a relation, ordered by their first messages.

    :raises ProtocolError: when the bytes are not what the protocol allows.
    """
    wire = _Wire.of(piece)
    rows = _rows(wire, piece.transaction)
    versions = _versions(wire, piece.relations)
    # A row belongs to the version of its oid that began last before it: one binary search for all rows, in which the
    # first key stands for "none".
    oids = np.array([-1, *(relation.oid for _, relation in versions)], np.int64)
    keys = np.array([0, *(relation.oid << 32 | since for since, relation in versions)], np.uint64)
    sought = rows.oid.astype(np.uint64) << np.uint64(32) | rows.order.astype(np.uint64)
    found = np.searchsorted(keys, sought, side="right") - 1
    _refuse(
        oids[found] != rows.oid,
        lambda i: f"{wire.name(rows.order[i])} changes relation {rows.oid[i]}, which has not been described",
        "Start the stream again from its last commit: the server then describes every relation anew.",
    )
    grouped = np.argsort(found.astype(np.min_scalar_type(len(keys))), kind="stable")  # small integers: a radix sort
    parts = np.split(grouped, np.flatnonzero(np.diff(found[grouped])) + 1) if len(found) else []
    parts.sort(key=lambda part: int(part[0]))
    return [
        _changes(wire, versions[found[part[0]] - 1][1], rows if len(parts) == 1 else rows.take(part)) for part in parts
    ]


def _refuse(bad: Flags, describe: Callable[[int], str], solution: str = _REPORT) -> None:
    """Raise for the first ``bad`` one, if there is any."""
    if bad.any():
        raise ProtocolError(describe(int(bad.argmax())), solution)


def _octet(eights: NDArray[np.uint64], i: int) -> Octets:
    """One of the bytes of each, as :meth:`_Wire.read` has gathered them."""
    return np.ascontiguousarray(eights.view(np.uint8)[i::8])


def _int32(eights: NDArray[np.uint64], i: int) -> Ints:
    """The 32-bit integers that begin at byte ``i`` of each, as :meth:`_Wire.read` has gathered them."""
    return eights.astype(np.int64) << 8 * i >> 32


@dataclass(frozen=True, eq=False)
class _Wire:
    """The bytes of a piece and where its messages are: arrays with one entry for each message.

    :param head: the first eight bytes of each: of a row change its kind, the relation's oid, and the kind of tuple.
    """

    data: Bytes
    start: Ints
    length: Ints
    head: NDArray[np.uint64]
    kind: Octets

    @classmethod
    def of(cls, piece: Piece) -> _Wire:
        data, length = piece.data, np.frombuffer(piece.lengths, "<i4").astype(np.int64)
        _refuse(length < 1, lambda i: f"message {i} of the piece has {length[i]} bytes")
        if length.sum() != len(data):
            raise ProtocolError(f"the messages of a piece have {length.sum()} bytes, its data {len(data)}", _REPORT)
        start = np.cumsum(length) - length
        head = _gather(data, ">u8", start)
        wire = cls(data, start, length, head, _octet(head, 0))
        least = _LEAST[wire.kind]
        _refuse(least == 0, lambda i: f"{wire.name(i)} is of a kind that protocol version 1 does not have", _OPTIONS)
        _refuse(length < least, lambda i: f"{wire.name(i)} is cut short: its kind has {least[i]} bytes or more")
        return wire

    def read(self, dtype: str, at: Ints) -> NDArray[Any]:
        """Gather the numbers that begin at ``at``, which ascends; zeros stand beyond the end, which callers check.

        To find the bytes takes longer than to move them: what stands together is read as one number of eight.
        """
        return _gather(self.data, dtype, at)

    def name(self, i: int) -> str:
        return f"message {i} of the piece (kind {chr(self.kind[i])!r}, {self.length[i]} bytes)"


def _gather(data: Bytes, dtype: str, at: Ints) -> NDArray[Any]:
    """See :meth:`_Wire.read`."""
    # A view of the numbers at all positions, overlapping and unaligned: one indexing instead of one an octet.
    size = np.dtype(dtype).itemsize
    window = np.ndarray((max(len(data) - size + 1, 0),), dtype, data, strides=(1,))
    if not len(at) or at[-1] < len(window):
        return window[at]
    rest = bytes(data[len(window) :]) + bytes(size)
    tail = np.ndarray((len(rest) - size + 1,), dtype, rest, strides=(1,))
    inside = np.searchsorted(at, len(window))
    found = np.empty(len(at), dtype)
    found[:inside] = window[at[:inside]]
    found[inside:] = tail[np.minimum(at[inside:] - len(window), len(tail) - 1)]
    return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Row changes: arrays with one entry for each; ``start`` and ``end`` are those of its message in the data.

    :param tuple_kind: of its first tuple; of a truncate it has no meaning.
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


def _rows(wire: _Wire, opened: OpenTransaction | None) -> _Rows:
    """Find the row changes, and the transaction of each."""
    begins = wire.kind == _B
    inside = np.cumsum(begins) - np.cumsum(wire.kind == _C) + (opened is not None)
    _refuse(inside > 1, lambda i: f"{wire.name(i)} begins a transaction inside another")
    _refuse(inside < 0, lambda i: f"{wire.name(i)} commits outside a transaction")
    count = _CHANGES[wire.kind]
    _refuse(count > inside, lambda i: f"{wire.name(i)} changes rows outside a transaction")
    truncates = np.flatnonzero(wire.kind == _T)
    listed = count[truncates] = wire.read(">i4", wire.start[truncates] + 1)
    wrong = (wire.length[truncates] != 6 + 4 * count[truncates]) | (wire.read("u1", wire.start[truncates] + 5) > 3)
    _refuse(wrong, lambda i: f"{wire.name(truncates[i])} has not the form that {listed[i]} relations need")

    # Of each transaction, where the first is the one that was open.
    first, at = opened or OpenTransaction(0, 0, 0, 0), wire.start[begins]
    commit_lsn = np.append(first.commit_lsn, wire.read(">i8", at + 1))
    commit_ts = np.append(first.commit_ts, wire.read(">i8", at + 9) + _EPOCH)
    xid = np.append(first.xid, wire.read(">u4", at + 17))
    _check_transactions(wire, begins, commit_lsn, commit_ts)
    before = np.cumsum(count) - count
    earlier = before[begins]

    order = np.repeat(np.arange(len(count)), count)
    number, start, op = np.arange(len(order)), wire.start[order], wire.kind[order]
    head = wire.head[order]
    oid = _int32(head, 1) & 0xFFFFFFFF
    if len(truncates):
        those = np.flatnonzero(op == _T)
        oid[those] = wire.read(">u4", start[those] + 6 + 4 * (those - before[order[those]]))
    of_each = np.diff(earlier, prepend=0, append=len(order))
    return _Rows(
        order=order,
        op=op | np.uint8(0x20),  # to lower case
        oid=oid,
        tuple_kind=_octet(head, 5),
        start=start,
        end=start + wire.length[order],
        xid=np.repeat(xid, of_each),
        commit_lsn=np.repeat(commit_lsn, of_each),
        commit_ts=np.repeat(commit_ts, of_each),
        seq=number + 1 - np.repeat(np.append(-first.seq, earlier), of_each),
    )


def _check_transactions(wire: _Wire, begins: Flags, commit_lsn: Ints, commit_ts: Ints) -> None:
    """Refuse transactions of which begin and commit do not agree, or that come twice or out of order.

    :param commit_lsn, commit_ts: what the begins say, of the transaction that was open at first.
    """
    begun, ended = np.flatnonzero(begins), np.flatnonzero(wire.kind == _C)
    for messages, size in ((begun, 21), (ended, 26)):
        wrong = wire.length[messages] != size
        _refuse(wrong, lambda i, at=messages: f"{wire.name(at[i])} has bytes too many")  # type: ignore[misc]
    late = np.diff(commit_lsn) <= 0
    _refuse(late, lambda i: f"{wire.name(begun[i])} begins a transaction that does not come after the one before")
    which, at = np.searchsorted(begun, ended), wire.start[ended]
    agree = (wire.read("u1", at + 1) == 0) & (wire.read(">i8", at + 2) == commit_lsn[which])
    agree &= wire.read(">i8", at + 18) + _EPOCH == commit_ts[which]
    _refuse(~agree, lambda i: f"{wire.name(ended[i])} commits another transaction than has begun")


def _versions(wire: _Wire, relations: Sequence[bytes]) -> list[tuple[int, Relation]]:
    """List the versions of relations, each with the message from which on it holds, ordered by oid and message."""
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


def _changes(wire: _Wire, relation: Relation, rows: _Rows) -> Changes:
    """Decode the rows of one version of a relation."""

    def name(i: int) -> str:
        change = f"{chr(rows.op[i])!r} of {relation.schema}.{relation.name}"
        commit = format_lsn(int(rows.commit_lsn[i]))
        return f"message {rows.order[i]} of the piece ({change} in transaction {rows.xid[i]}, committed at {commit})"

    inserted, updated, deleted = (rows.op == op for op in b"iud")
    with_new = inserted | updated
    kind = rows.tuple_kind
    with_old = (updated | deleted) & (kind == (_OLD if relation.replica_identity == "f" else _KEY))
    bad = (with_new & ~with_old & (kind != _NEW)) | (deleted & ~with_old)
    identity = f"under replica identity {relation.replica_identity!r}"
    _refuse(bad, lambda i: f"{name(i)} has a row of kind {chr(kind[i])!r} {identity}")

    at, old = rows.start + 6, None
    if with_old.any():
        old, missing, at[with_old] = _tuples(wire, relation, with_old, at[with_old], rows.end[with_old], name)
        if missing:
            column, where = next(iter(missing.items()))
            _refuse(where, lambda i: f"{name(i)} leaves out the old value of {relation.columns[column].name}")
        if relation.replica_identity != "f":
            _check_keys(relation, with_old, old, name)
        both = with_old & updated  # where the message ends too early the next one begins, and never with an N
        _refuse(both & (wire.read("u1", at) != _NEW), lambda i: f"{name(i)} has no new row behind the old one")
        at += both
    new, unchanged, at[with_new] = _tuples(wire, relation, with_new, at[with_new], rows.end[with_new], name)
    bad = (with_new | deleted) & (at != rows.end)
    _refuse(bad, lambda i: f"{name(i)} has {rows.end[i] - at[i]} bytes too many")
    common = (rows.order, rows.op, rows.xid, rows.commit_lsn, rows.commit_ts, rows.seq)
    return Changes(relation, *common, new, unchanged, old, np.where(with_old, kind, np.uint8(0)))


def _check_keys(relation: Relation, with_old: Flags, old: tuple[pa.Array, ...], name: Callable[[int], str]) -> None:
    """Refuse an old key that lacks a column of the replica identity or has another."""
    count = int(with_old.sum())
    for column, values in zip(relation.columns, old, strict=True):
        if len(values) - values.null_count != (count if column.key else 0):
            wrong = with_old & (values.is_null().to_numpy(zero_copy_only=False) == column.key)
            kind = "lacks" if column.key else "has"
            _refuse(wrong, lambda i, text=f"{kind} {column.name}": f"{name(i)}: its old key {text}")  # type: ignore[misc]


def _tuples(
    wire: _Wire, relation: Relation, present: Flags, at: Ints, end: Ints, name: Callable[[int], str]
) -> tuple[tuple[pa.Array, ...], dict[int, Flags], Ints]:
    """Decode a tuple each of the rows that are ``present``.

    :param at, end: where the tuple begins and where its message ends; of the present rows only, as all that follows.
    :param name: describes a row, by its index among all.
    :returns: for all rows, an array for each column and where values are left out; where the tuples end.
    """
    index, width, count = np.flatnonzero(present), len(relation.columns), wire.read(">u2", at)
    _refuse(count != width, lambda i: f"{name(index[i])} has {count[i]} values for {width} columns")
    at = at + 2  # if the count itself was cut short, so are the values
    arrays, unchanged = [], {}
    for number, column in enumerate(relation.columns):
        text, left_out, start, at = _values(wire, at, end, column.name, lambda i: name(index[i]))
        arrays.append(_strings(wire.data, start, at, text, present))
        if left_out is not None and left_out.any():
            unchanged[number] = np.zeros(len(present), np.bool_)
            unchanged[number][index] = left_out
    return tuple(arrays), unchanged, at


def _values(
    wire: _Wire, at: Ints, end: Ints, column: str, name: Callable[[int], str]
) -> tuple[Flags, Flags | None, Ints, Ints]:
    """Return which of the values at ``at`` are texts, which are left out, and where they start and end."""
    head = wire.read(">u8", at)
    kind = _octet(head, 0)
    text, left_out = kind == _TEXT, None
    length, start = _int32(head, 1), at + 5
    if not text.all():
        left_out = kind == _UNCHANGED
        bad = ~(text | (kind == _NULL) | left_out) & (at < end)
        _refuse(bad, lambda i: f"{name(i)} has a value of kind {chr(kind[i])!r} for {column}", _OPTIONS)
        length, start = np.where(text, length, 0), np.where(text, start, at + 1)
    stop = start + length
    bad = (length < 0) | (stop > end)
    _refuse(bad, lambda i: f"{name(i)} is cut short: {length[i]} bytes for {column}, but {end[i] - start[i]} are left")
    return text, left_out, start, stop


def _strings(data: Bytes, start: Ints, end: Ints, text: Flags, present: Flags) -> pa.Array:
    """Collect the values of one column; ``text``: which of the present rows have one (not null, not left out).

    Values and the bytes between them are an Arrow array without any copying, because positions grow from row to row.
    Its even elements are the column, and Arrow's filter gathers them faster than NumPy can.
    """
    size = 2 * len(start)
    edges = np.empty(size + 1, np.int64)
    edges[:-1:2], edges[1::2], edges[-1] = start, end, len(data)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(data)]
    even = [None, pa.py_buffer(np.full(size // 8 + 1, 0b01010101, np.uint8))]
    values = pa.Array.from_buffers(pa.large_string(), size, buffers).filter(
        pa.Array.from_buffers(pa.bool_(), size, even)
    )
    valid, (_, offsets, characters) = text, values.buffers()
    if len(text) < len(present):  # rows without a tuple become empty and null
        offsets = pa.py_buffer(np.frombuffer(offsets, np.int64)[np.append(0, np.cumsum(present))])
        valid = np.zeros(len(present), np.bool_)
        valid[present] = text
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.large_string(), len(present), [bits, offsets, characters])
