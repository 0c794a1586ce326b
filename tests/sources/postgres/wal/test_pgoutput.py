"""The vectorized pgoutput decoder against a plain one, a recording of a real server, and broken input."""

from __future__ import annotations

import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Relation, RelationColumn
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode, parse_relation
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece
from tests.sources.postgres.wal.pgoutput_messages import (
    EPOCH,
    NOTE,
    ORIGIN,
    START,
    TABLE,
    TYPE,
    UNCHANGED,
    Values,
    begin,
    change,
    check,
    commit,
    insert,
    piece,
    relation,
    truncate,
)

texts = st.one_of(
    st.sampled_from(["", "0", "exactly twelv", "exactly 12 b", "n", "tttt", "ü", "日本語", "🐘" * 5]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
)


def rows_like(width: int, *, toast: bool) -> st.SearchStrategy[Values]:
    rare = [st.just(UNCHANGED)] if toast else []
    return st.lists(st.one_of(texts, texts, st.none(), *rare), min_size=width, max_size=width)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Return a strategy for what a server may send: transactions over a few relations that are described before use."""
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
        """Return a strategy for an old row, or an old key."""
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


@pytest.mark.lengthy
@settings(max_examples=200, deadline=None)
@given(data=st.data(), messages=streams())
def test_any_stream_in_any_pieces_decodes_like_the_reference(data: st.DataObject, messages: list[bytes]) -> None:
    check(messages, data.draw(st.lists(st.integers(0, len(messages)), max_size=5), label="cuts"))


@pytest.mark.lengthy
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


def test_bytes_of_a_piece_do_not_reach_logs() -> None:
    assert "secret" not in repr(Piece(b"secret", b"secret", (), None))
