"""The vectorised pgoutput decoder against a plain one, a recording of a real server, and broken input."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Changes, Relation, RelationColumn
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode, parse_relation
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece

EPOCH = int(datetime(2000, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
UNCHANGED = "<unchanged>"
Values = list[str | None]


# Messages, as a server writes them.


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


# The reference: one message after the other.


class Row(NamedTuple):
    version: int  # of its relation: counts the different Relation messages so far
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
    """Cut a piece that begins where ``reader`` is."""
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


# Random streams.

texts = st.one_of(
    st.sampled_from(["", "0", "exactly twelv", "exactly 12 b", "n", "tttt", "ü", "日本語", "🐘" * 5]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
)


def rows_like(width: int, *, toast: bool) -> st.SearchStrategy[Values]:
    rare = [st.just(UNCHANGED)] if toast else []
    return st.lists(st.one_of(texts, texts, st.none(), *rare), min_size=width, max_size=width)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """What a server may send: several transactions over a few relations that are described before use."""
    oids = draw(st.lists(st.sampled_from([1, 2, 16384, 2**31, 2**32 - 1]), min_size=1, max_size=3, unique=True))
    columns = st.lists(st.tuples(texts, st.booleans()), max_size=4)
    widths: dict[int, int] = {}
    keys: dict[int, list[bool] | None] = {}  # of FULL: None
    messages = []

    def describe(oid: int) -> None:
        described, identity = draw(columns), draw(st.sampled_from([b"d", b"n", b"f", b"i"]))
        widths[oid] = len(described)
        keys[oid] = None if identity == b"f" else [key for _, key in described]
        messages.append(relation(oid, described, draw(texts), identity))

    def earlier(oid: int) -> tuple[bytes, Values]:
        """An old row, or the old key."""
        key = keys[oid]
        if key is None:
            return b"O", draw(rows_like(widths[oid], toast=False))
        return b"K", [draw(texts) if part else None for part in key]

    for lsn in draw(st.sets(st.integers(1, 2**63 - 100), max_size=4).map(sorted)):
        ts = draw(st.integers(-(2**50), 2**50))
        messages.append(begin(draw(st.integers(0, 2**32 - 1)), lsn, ts))
        for _ in range(draw(st.integers(0, 6))):
            oid, kind = draw(st.sampled_from(oids)), draw(st.sampled_from("iiuuudtRrMOY"))
            if kind == "R" or oid not in widths:
                describe(oid)
            new = rows_like(widths[oid], toast=True)
            if kind == "i":
                messages.append(insert(oid, draw(new)))
            elif kind == "u":
                before = draw(st.sampled_from([[], [earlier(oid)]]))
                messages.append(change(b"U", oid, *before, (b"N", draw(new))))
            elif kind == "d":
                messages.append(change(b"D", oid, earlier(oid)))
            elif kind == "t":
                messages.append(truncate(*draw(st.lists(st.sampled_from(sorted(widths)), unique=True))))
            elif kind == "r":  # the server repeats a description
                messages.append(next(m for m in reversed(messages) if m[:5] == b"R" + struct.pack(">I", oid)))
            elif kind != "R":
                messages.append({"M": NOTE, "O": ORIGIN, "Y": TYPE}[kind])
        messages.append(commit(lsn, ts))
        messages += draw(st.sampled_from([[], [NOTE]]))
    return messages


@settings(max_examples=200, deadline=None)
@given(data=st.data(), messages=streams())
def test_any_stream_in_any_pieces_decodes_like_the_reference(data: st.DataObject, messages: list[bytes]) -> None:
    check(messages, data.draw(st.lists(st.integers(0, len(messages)), max_size=5), label="cuts"))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), messages=streams().filter(bool))
def test_damaged_bytes_are_refused_or_decoded_but_nothing_else(data: st.DataObject, messages: list[bytes]) -> None:
    damaged = bytearray(b"".join(messages))
    at = data.draw(st.integers(0, len(damaged) - 1), label="at")
    damaged[at] = data.draw(st.integers(0, 255), label="octet")
    lengths = struct.pack(f"<{len(messages)}i", *map(len, messages))
    with suppress(ProtocolError):
        decode(Piece(bytes(damaged), lengths, (), None))


def test_many_rows_of_several_relations() -> None:
    lsn = 1000
    messages = [begin(7, lsn), *(relation(oid, [("id", True), ("a", False), ("b", False)]) for oid in (1, 2, 3))]
    for i in range(6_000):
        values: Values = [str(i), None if i % 7 == 0 else "é" * (i % 40), UNCHANGED if i % 11 == 0 else f"value {i}"]
        oid, old = 1 + i % 3, [(b"K", [str(i - 1), None, None])] if i % 5 == 0 else []
        if i % 4 == 0:
            messages.append(change(b"U", oid, *old, (b"N", values)))
        else:
            messages.append(change(b"D", oid, *old) if old else insert(oid, [*values[:2], "b"]))
        if i % 1_000 == 999:
            messages += [truncate(3, 1), commit(lsn), begin(7 + i, 2000 + i)]
            lsn = 2000 + i
    check(messages, [1, 2, 777, 4_001])


# Boundaries.

TABLE = relation(1, [("id", True), ("body", False)])
FULL = relation(1, [("id", True), ("body", True)], identity=b"f")
START = [begin(7, 0x10), TABLE]
START_FULL = [begin(7, 0x10), FULL]


def test_nothing_gives_nothing() -> None:
    assert decode(Piece(b"", b"", (), None)) == []
    assert decode(piece([begin(1, 2), commit(2), NOTE, TABLE])) == []


def test_relation_without_columns() -> None:
    empty = relation(5, [], identity=b"f")
    check([begin(1, 2), empty, insert(5, []), change(b"D", 5, (b"O", [])), truncate(5), commit(2)])


def test_version_without_any_row_image_has_null_columns() -> None:
    (changes,) = decode(piece([*START, truncate(1)]))
    assert [array.to_pylist() for array in changes.new] == [[None], [None]]
    assert changes.old is None
    assert changes.seq.tolist() == [1]


def test_seq_goes_on_from_the_open_transaction() -> None:
    opened = OpenTransaction(xid=4_000_000_000, commit_lsn=2**62, commit_ts=11, seq=41)
    messages = [insert(1, ["1", None]), commit(2**62, 11 - EPOCH), begin(8, 2**62 + 9, 0), insert(1, ["2", None])]
    data, lengths = b"".join(messages), struct.pack("<4i", *map(len, messages))
    (changes,) = decode(Piece(data, lengths, (TABLE,), opened))
    assert changes.seq.tolist() == [42, 1]
    assert changes.xid.tolist() == [4_000_000_000, 8]
    assert changes.commit_lsn.tolist() == [2**62, 2**62 + 9]
    assert changes.commit_ts.tolist() == [11, EPOCH]


def test_only_a_different_description_begins_a_new_version() -> None:
    other = relation(1, [("id", True), ("body", False), ("extra", False)])
    messages = [*START, insert(1, ["1", "a"]), TABLE, insert(1, ["2", "b"]), other, insert(1, ["3", "c", "d"])]
    same, new = decode(piece(messages))
    assert (same.order.tolist(), len(same.relation.columns)) == ([2, 4], 2)
    assert (new.order.tolist(), len(new.relation.columns)) == ([6], 3)


def test_the_last_description_of_an_oid_counts() -> None:
    message = insert(1, ["1", "a"])
    context = (relation(1, []), relation(2, []), TABLE)
    (changes,) = decode(Piece(message, struct.pack("<i", len(message)), context, OpenTransaction(1, 2, 3, 0)))
    assert changes.relation == parse_relation(TABLE)


def test_large_values() -> None:
    check([*START, insert(1, ["1", "x" * 5_000_000]), insert(1, ["2", UNCHANGED]), insert(1, ["ü" * 70_000, None])])


def test_parse_relation() -> None:
    described = parse_relation(relation(2**32 - 1, [("id", True), ("größe", False)], "Weird", b"f"))
    columns = (RelationColumn("id", 25, -1, True), RelationColumn("größe", 25, -1, False))
    assert described == Relation(2**32 - 1, "Weird", f"t{2**32 - 1}", "f", columns)


# What Postgres 15 sent for the statements beside it.

ORDERS = (
    b"R\x00\x00@\x00public\x00orders\x00d\x00\x03\x01id\x00\x00\x00\x00\x17\xff\xff\xff\xff"
    b"\x00name\x00\x00\x00\x00\x19\xff\xff\xff\xff\x00body\x00\x00\x00\x00\x19\xff\xff\xff\xff"
)
ORDERS_WITH_EXTRA = ORDERS.replace(b"d\x00\x03", b"d\x00\x04") + b"\x00extra\x00\x00\x00\x00\x10\xff\xff\xff\xff"
EVENTS = (
    b"R\x00\x00@\x07public\x00events\x00f\x00\x02\x01k\x00\x00\x00\x00\x19\xff\xff\xff\xff"
    b"\x01v\x00\x00\x00\x06\xa4\xff\xff\xff\xff"
)
RECORDING = [
    b"B\x00\x00\x00\x00\x01R\xd4\xc0\x00\x03\x03\xc5\x82 4\xf6\x00\x00\x02\xd5",
    ORDERS,
    # INSERT INTO orders VALUES (1, 'Zoë', repeat('x', 2600)), (2, NULL, '')
    b"I\x00\x00@\x00N\x00\x03t\x00\x00\x00\x011t\x00\x00\x00\x04Zo\xc3\xabt\x00\x00\n(" + b"x" * 2600,
    b"I\x00\x00@\x00N\x00\x03t\x00\x00\x00\x012nt\x00\x00\x00\x00",
    EVENTS,
    # INSERT INTO events VALUES ('a', 1.50)
    b"I\x00\x00@\x07N\x00\x02t\x00\x00\x00\x01at\x00\x00\x00\x041.50",
    b"C\x00\x00\x00\x00\x00\x01R\xd4\xc0\x00\x00\x00\x00\x01R\xd4\xf0\x00\x03\x03\xc5\x82 4\xf6",
    b"B\x00\x00\x00\x00\x01R\xd7\xa0\x00\x03\x03\xc5\x82 6\xfd\x00\x00\x02\xd6",
    # UPDATE orders SET name = 'longer than twelve' WHERE id = 1; UPDATE orders SET id = 3 WHERE id = 1
    b"U\x00\x00@\x00N\x00\x03t\x00\x00\x00\x011t\x00\x00\x00\x12longer than twelveu",
    b"U\x00\x00@\x00K\x00\x03t\x00\x00\x00\x011nnN\x00\x03t\x00\x00\x00\x013t\x00\x00\x00\x12longer than twelveu",
    # UPDATE events SET v = NULL
    b"U\x00\x00@\x07O\x00\x02t\x00\x00\x00\x01at\x00\x00\x00\x041.50N\x00\x02t\x00\x00\x00\x01an",
    b"M\x01\x00\x00\x00\x00\x01R\xd7 note\x00\x00\x00\x00\x05hello",
    # DELETE FROM orders WHERE id = 2; DELETE FROM events
    b"D\x00\x00@\x00K\x00\x03t\x00\x00\x00\x012nn",
    b"D\x00\x00@\x07O\x00\x02t\x00\x00\x00\x01an",
    b"C\x00\x00\x00\x00\x00\x01R\xd7\xa0\x00\x00\x00\x00\x01R\xd7\xd0\x00\x03\x03\xc5\x82 6\xfd",
    # ALTER TABLE orders ADD COLUMN extra boolean DEFAULT true
    b"B\x00\x00\x00\x00\x01R\xf6\x00\x00\x03\x03\xc5\x82 ;\x94\x00\x00\x02\xd8",
    ORDERS_WITH_EXTRA,
    # INSERT INTO orders VALUES (4, 'd', NULL, false); TRUNCATE orders, events
    b"I\x00\x00@\x00N\x00\x04t\x00\x00\x00\x014t\x00\x00\x00\x01dnt\x00\x00\x00\x01f",
    ORDERS_WITH_EXTRA,
    EVENTS,
    b"T\x00\x00\x00\x02\x00\x00\x00@\x00\x00\x00@\x07",
    b"C\x00\x00\x00\x00\x00\x01R\xf6\x00\x00\x00\x00\x00\x01R\xf8@\x00\x03\x03\xc5\x82 ;\x94",
    b"M\x00\x00\x00\x00\x00\x01R\xf8\x80heartbeat\x00\x00\x00\x00\x011",
]


def test_recording_of_a_server() -> None:
    orders, events, extended = decode(piece(RECORDING))
    text = "longer than twelve"
    assert [array.to_pylist() for array in orders.new] == [
        ["1", "2", "1", "3", None],
        ["Zoë", None, text, text, None],
        ["x" * 2600, "", None, None, None],
    ]
    assert list(orders.unchanged) == [2]
    assert orders.unchanged[2].tolist() == [False, False, True, True, False]
    assert [array.to_pylist() for array in orders.old or ()] == [[None, None, None, "1", "2"], [None] * 5, [None] * 5]
    assert (bytes(orders.op), bytes(orders.old_kind)) == (b"iiuud", b"\0\0\0KK")
    assert orders.xid.tolist() == [725, 725, 726, 726, 726]
    assert orders.seq.tolist() == [1, 2, 1, 2, 4]
    assert orders.commit_lsn.tolist() == [0x152D4C0] * 2 + [0x152D7A0] * 3

    assert [array.to_pylist() for array in events.new] == [["a", "a", None, None], ["1.50", None, None, None]]
    assert [array.to_pylist() for array in events.old or ()] == [[None, "a", "a", None], [None, "1.50", None, None]]
    assert (bytes(events.op), bytes(events.old_kind)) == (b"iudt", b"\0OO\0")
    assert events.seq.tolist() == [3, 3, 5, 3]
    assert events.relation.replica_identity == "f"

    assert [column.name for column in extended.relation.columns] == ["id", "name", "body", "extra"]
    assert (bytes(extended.op), extended.old) == (b"it", None)
    assert extended.seq.tolist() == [1, 2]
    committed = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(extended.commit_ts[0]))
    assert committed.isoformat() == "2026-11-21T10:22:36.723092+00:00"


@pytest.mark.parametrize("cut", range(len(RECORDING)))
def test_recording_in_two_pieces(cut: int) -> None:
    check(RECORDING, [cut])


# Refusals.


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"S" + bytes(30)], ["message 0", "'S'", "protocol version 1"]),
        ([*START, change(b"I", 1, (b"N", ["1"]))], ["message 2", "public.t1", "1 values for 2 columns", "7"]),
        ([*START, b"I\0\0\0\1N\0\2t\0\0\0\1ab\0\0\0\1c"], ["'b'", "body", "public.t1", "0/10"]),
        ([*START, b"I\0\0\0\1N\0\2nx"], ["'x'", "body"]),
        ([*START, insert(1, ["1", "abc"])[:-1]], ["cut short", "3 bytes for body", "2 are left"]),
        ([*START, b"I\0\0\0\1N\0\2nt\xff\xff\xff\xff"], ["-1 bytes for body"]),
        ([*START, insert(1, ["1", "abc"])[:-8]], ["cut short", "body"]),
        ([*START, insert(1, ["1", "abc"]) + b"?"], ["1 bytes too many"]),
        ([*START, change(b"D", 1, (b"K", ["1", None])) + b"?"], ["1 bytes too many"]),
        ([*START, change(b"U", 1, (b"O", ["1", "N"]))], ["public.t1"]),
        ([*START, change(b"I", 1, (b"K", ["1", "a"]))], ["kind 'K'"]),
        ([*START, change(b"D", 1, (b"N", ["1", "a"]))], ["kind 'N'"]),
        ([*START, change(b"U", 1, (b"X", ["1", "a"]))], ["kind 'X'"]),
        ([*START_FULL, change(b"U", 1, (b"O", ["1", "a"]))], ["no new row"]),
        ([*START, change(b"U", 1, (b"K", ["1", None]), (b"O", ["1", "a"]))], ["no new row"]),
        ([*START_FULL, change(b"D", 1, (b"O", ["1", UNCHANGED]))], ["old value of body"]),
        ([*START, change(b"D", 1, (b"O", ["1", "a"]))], ["kind 'O'", "replica identity 'd'"]),
        ([*START_FULL, change(b"D", 1, (b"K", ["1", None]))], ["kind 'K'", "replica identity 'f'"]),
        ([*START, change(b"D", 1, (b"K", [None, None]))], ["message 2", "old key lacks id"]),
        ([*START, change(b"D", 1, (b"K", ["1", "a"]))], ["message 2", "old key has body"]),
        ([*START, commit(17)], ["message 2", "another transaction"]),
        ([*START, commit(16, 6)], ["message 2", "another transaction"]),
        ([*START, commit(16), begin(8, 16)], ["message 3", "does not come after"]),
        ([*START, commit(16) + b"?"], ["message 2", "bytes too many"]),
        ([*START, truncate(1)[:5] + b"\x04" + truncate(1)[6:]], ["message 2", "1 relations"]),
        ([begin(7, 16), insert(1, ["1", "a"])], ["message 1", "relation 1", "described"]),
        ([*START, truncate(1, 99)], ["message 2", "relation 99", "described"]),
        ([TABLE, insert(1, ["1", "a"])], ["message 1", "outside a transaction"]),
        ([TABLE, truncate(1)], ["message 1", "outside a transaction"]),
        ([*START, commit(16), insert(1, ["1", "a"])], ["message 3", "outside a transaction"]),
        ([commit(16)], ["message 0", "commits outside"]),
        ([*START, begin(8, 17)], ["message 2", "inside another"]),
        ([*START, truncate(1)[:-1]], ["message 2", "1 relations"]),
        ([*START, TABLE.replace(b"\0d\0", b"\0z\0")], ["b'z'"]),
        ([*START, TABLE.replace(b"body", b"bo\xffy")], ["Relation"]),
        ([*START, TABLE.replace(b"\0body", b"\2body")], ["Relation", "flags"]),
    ],
)
def test_refusals_name_what_is_wrong(messages: list[bytes], words: list[str]) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(piece(messages))
    assert [word for word in words if word not in refused.value.message] == []
    assert refused.value.solution


@pytest.mark.parametrize(
    "body",
    [
        begin(8, 17),
        commit(16),
        TABLE,
        insert(1, ["1", "long enough not to be inlined"]),
        change(b"U", 1, (b"N", ["1", None])),
        change(b"U", 1, (b"K", ["1", None]), (b"N", ["2", UNCHANGED])),
        change(b"D", 1, (b"K", ["1", None])),
        truncate(1, 1),
    ],
    ids=lambda body: chr(body[0]),
)
@pytest.mark.parametrize("more", [[], [NOTE]], ids=["last", "followed"])
def test_every_shorter_message_is_refused(body: bytes, more: list[bytes]) -> None:
    before = [] if body[:1] == b"B" else [*START, insert(1, ["0", "a"])]
    decode(piece([*before, body, *more]))
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(piece([*before, body[:length], *more]))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="26 bytes, its data 27"):
        decode(Piece(commit(1) + b"?", struct.pack("<i", 26), (), OpenTransaction(1, 2, 3, 0)))
    with pytest.raises(ProtocolError, match="message 0 of the piece has -1 bytes"):
        decode(Piece(b"", struct.pack("<2i", -1, 1), (), None))


@pytest.mark.parametrize("body", [b"", b"R", TABLE[:20], TABLE + b"?", b"I" + TABLE[1:]])
def test_malformed_relations_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed Relation"):
        parse_relation(body)


def test_packed_pieces_that_are_damaged_are_refused() -> None:
    packed = Piece(b"data", b"len!", (TABLE, b"R2"), OpenTransaction(2**32 - 1, 2**62, -5, 3)).to_bytes()
    for damaged in (*(packed[:length] for length in range(len(packed))), packed + b"?", b"\xff" * 100):
        with pytest.raises(ProtocolError):
            Piece.from_bytes(damaged)


def test_bytes_of_a_piece_do_not_reach_logs() -> None:
    assert "secret" not in repr(Piece(b"secret", b"secret", (), None))
