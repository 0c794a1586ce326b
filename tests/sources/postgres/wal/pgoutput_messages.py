"""Messages of the protocol pgoutput, made by hand, and a plain decoder of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa

from airflow_cdc_provider.engine.core.row_changes import Changes, Relation
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode, parse_relation
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece

EPOCH = int(datetime(2000, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


UNCHANGED = "<unchanged>"


Values = list[str | None]


def begin(xid: int, lsn: int, ts: int = 5) -> bytes:
    return b"B" + struct.pack(">qqI", lsn, ts, xid)


def commit(lsn: int, ts: int = 5) -> bytes:
    return b"C" + struct.pack(">bqqq", 0, lsn, lsn + 48, ts)


def relation(oid: int, columns: Iterable[tuple[str, bool]], schema: str = "public", identity: bytes = b"d") -> bytes:
    columns = list(columns)
    described = (bytes([key]) + name.encode() + b"\0" + struct.pack(">Ii", 25, -1) for name, key in columns)
    head = b"R" + struct.pack(">I", oid) + schema.encode() + f"\0t{oid}\0".encode()
    return head + identity + struct.pack(">h", len(columns)) + b"".join(described)


def row(values: Values) -> bytes:
    parts = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            parts.append(b"t" + struct.pack(">i", len(value.encode())) + value.encode())
    return b"".join(parts)


def change(kind: bytes, oid: int, *tuples: tuple[bytes, Values]) -> bytes:
    return kind + struct.pack(">I", oid) + b"".join(letter + row(values) for letter, values in tuples)


def insert(oid: int, values: Values) -> bytes:
    return change(b"I", oid, (b"N", values))


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(f">ib{len(oids)}I", len(oids), 0, *oids)


NOTE = b"M" + struct.pack(">bq", 1, 77) + b"prefix\0" + struct.pack(">i", 2) + b"hi"


ORIGIN = b"O" + struct.pack(">q", 9) + b"elsewhere\0"


TYPE = b"Y" + struct.pack(">I", 16500) + b"public\0mood\0"


class Row(NamedTuple):
    version: int  # index of its relation among the different Relation messages so far
    relation: Relation
    message: int
    op: str
    xid: int
    commit_lsn: int
    commit_ts: int
    seq: int
    new: Values | None
    old: Values | None
    old_kind: str


class Reader:
    """Decodes messages one by one, and knows the context after each."""

    def __init__(self) -> None:
        self.relations: dict[int, bytes] = {}
        self.versions: dict[int, int] = {}
        self.transaction: OpenTransaction | None = None
        self.count = 0

    def read(self, body: bytes) -> Iterator[Row]:
        kind, oid = chr(body[0]), int.from_bytes(body[1:5], "big")
        if kind == "B":
            lsn, ts, xid = struct.unpack(">qqI", body[1:])
            self.transaction = OpenTransaction(xid, lsn, ts + EPOCH, 0)
        elif kind == "C":
            self.transaction = None
        elif kind == "R" and self.relations.get(oid) != body:
            self.relations[oid] = body
            self.versions[oid] = self.count
        elif kind == "T":
            for (listed,) in struct.iter_unpack(">I", body[6:]):
                yield self._row(kind, listed, {})
        elif kind in "IUD":
            at = 5
            tuples: dict[str, Values] = {}
            while at < len(body):
                letter, (width,) = chr(body[at]), struct.unpack_from(">h", body, at + 1)
                at += 3
                tuples[letter] = []
                for _ in range(width):
                    value: str | None = {"n": None, "u": UNCHANGED}.get(chr(body[at]))
                    if body[at : at + 1] == b"t":
                        (length,) = struct.unpack_from(">i", body, at + 1)
                        value = body[at + 5 : at + 5 + length].decode()
                        at += 4 + length
                    at += 1
                    tuples[letter].append(value)
            yield self._row(kind, oid, tuples)
        self.count += 1

    def _row(self, kind: str, oid: int, tuples: dict[str, Values]) -> Row:
        t = self.transaction
        assert t is not None
        self.transaction = OpenTransaction(t.xid, t.commit_lsn, t.commit_ts, t.seq + 1)
        old_kind = next((letter for letter in tuples if letter in "KO"), "")
        described, version = parse_relation(self.relations[oid]), self.versions[oid]
        op, place = kind.lower(), (t.xid, t.commit_lsn, t.commit_ts, t.seq + 1)
        return Row(version, described, self.count, op, *place, tuples.get("N"), tuples.get(old_kind), old_kind)


def piece(messages: Iterable[bytes], reader: Reader | None = None) -> Piece:
    """Cut a piece that starts at the position of ``reader``."""
    reader, messages = reader or Reader(), list(messages)
    lengths = struct.pack(f"<{len(messages)}i", *map(len, messages))
    return Piece(b"".join(messages), lengths, tuple(reader.relations.values()), reader.transaction)


def rows_of(changes: Changes, first: int) -> list[Row]:
    """Turn decoded changes into rows of the reference, and check what these cannot express."""
    n = len(changes.order)
    for array in (*changes.new, *(changes.old or ())):
        array.validate(full=True)
        assert (array.type, len(array)) == (pa.large_string(), n)
    assert all(where.any() and where.shape == (n,) for where in changes.unchanged.values())
    assert changes.old is None or changes.old_kind.any()
    numbers = (changes.xid, changes.commit_lsn, changes.commit_ts, changes.seq)
    assert [array.dtype.name for array in (changes.order, *numbers)] == ["int64"] * 5
    assert [array.dtype.name for array in (changes.op, changes.old_kind)] == ["uint8"] * 2
    new, old = [array.to_pylist() for array in changes.new], [array.to_pylist() for array in changes.old or ()]
    result = []
    for i in range(n):
        left_out = {column for column, where in changes.unchanged.items() if where[i]}
        values = [UNCHANGED if c in left_out and value[i] is None else value[i] for c, value in enumerate(new)]
        before = [value[i] for value in old]
        op, old_kind = chr(changes.op[i]), chr(changes.old_kind[i]).strip("\0")
        assert op in "iu" or not any(value is not None for value in values)
        assert old_kind or not any(value is not None for value in before)
        xid, commit_lsn, commit_ts, seq = (int(array[i]) for array in numbers)
        place = (changes.relation, first + int(changes.order[i]), op, xid, commit_lsn, commit_ts, seq)
        result.append(Row(-1, *place, values if op in "iu" else None, before if old_kind else None, old_kind))
    return result


def check(messages: list[bytes], cuts: Iterable[int] = ()) -> None:
    """Decode ``messages`` piece by piece and compare with the reference."""
    reader = Reader()
    edges = [0, *sorted(set(cuts)), len(messages)]
    for first, end in pairwise(edges):
        packed = piece(messages[first:end], reader)
        expected: dict[tuple[int, int], list[Row]] = {}
        for message in messages[first:end]:
            for found in reader.read(message):
                expected.setdefault((found.relation.oid, found.version), []).append(found._replace(version=-1))
        unpacked = Piece.from_bytes(packed.to_bytes())
        assert unpacked == packed
        assert [rows_of(changes, first) for changes in decode(unpacked)] == list(expected.values())


TABLE = relation(1, [("id", True), ("body", False)])


FULL = relation(1, [("id", True), ("body", True)], identity=b"f")


START = [begin(7, 0x10), TABLE]


START_FULL = [begin(7, 0x10), FULL]
