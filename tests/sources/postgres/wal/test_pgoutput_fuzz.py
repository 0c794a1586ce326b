"""Damaged messages: the decoder refuses them or returns the rows that they encode, and it stays fast and small.

Real messages of a server are damaged in every way that matters: each bit flipped, each message cut, repeated, left out,
exchanged and stretched, lengths made huge. A plain reader that follows the documentation word by word must read the
same rows from whatever the vectorized decoder accepts.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Changes
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Buffer, Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_messages import fill_buffer
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database

pytestmark = pytest.mark.slow

Value = bytes | str | None  # a text's bytes, "u" if it was not sent, NULL
Row = tuple[int, str, int, int, int, tuple[Value, ...] | None, tuple[Value, ...] | None]

STATEMENTS = (
    "INSERT INTO t VALUES (1, 'a', repeat('x', 70)), (2, NULL, ''), (3, 'Zoë', 'n')",
    "INSERT INTO f VALUES (1, 'f')",
    "UPDATE t SET a = 'b'; UPDATE t SET id = 10 WHERE id = 1; UPDATE f SET a = NULL; DELETE FROM t WHERE id = 2",
    "DELETE FROM f; TRUNCATE t, f; INSERT INTO t VALUES (4, 'u', 't')",
    "ALTER TABLE t ADD COLUMN more int DEFAULT 5",
    "INSERT INTO t VALUES (5, 'n', 'N', 7); SELECT pg_logical_emit_message(true, 'airflow_cdc', 'note')",
    "INSERT INTO t VALUES (6, 'long', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 100) i), 8)",
    "UPDATE t SET a = 'unchanged' WHERE id = 6",
)


class Broken(Exception):
    """The refusal of the plain reader."""


@pytest.fixture(scope="module")
def recording(source_server: PostgresServer) -> Iterator[list[bytes]]:
    """Return the messages that the server sends for some statements, each in its own transaction."""
    create_database(source_server, "fuzz")
    with psycopg.connect(source_server.dsn("fuzz"), autocommit=True) as connection:
        for statement in (
            "CREATE TABLE t (id int PRIMARY KEY, a text, b text)",
            "CREATE TABLE f (id int PRIMARY KEY, a text)",
            "ALTER TABLE f REPLICA IDENTITY FULL",
            "CREATE PUBLICATION fuzz FOR TABLE t, f",
            "SELECT pg_create_logical_replication_slot('fuzz', 'pgoutput')",
            *STATEMENTS,
        ):
            connection.execute(statement.encode())
        found = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes('fuzz', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'fuzz', 'messages', 'true')"
        ).fetchall()
    yield [bytes(data) for (data,) in found]
    drop_database(source_server, "fuzz")


# -- the plain reader ----------------------------------------------------------------------------------


@dataclass
class Cursor:
    """Reads a message field by field."""

    body: bytes
    at: int = 1

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.body) - self.at:
            raise Broken(f"{count} bytes at {self.at} of {len(self.body)}")
        self.at += count
        return self.body[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(f">{form}", self.take(struct.calcsize(f">{form}")))[0])

    def text(self) -> str:
        end = self.body.find(b"\0", self.at)
        if end < 0:
            raise Broken("no end of a name")
        try:
            return self.take(end + 1 - self.at)[:-1].decode()
        except UnicodeDecodeError as e:
            raise Broken("a name that is no UTF-8") from e

    def row(self, width: int) -> tuple[Value, ...]:
        if self.number("H") != width:
            raise Broken("another number of columns")
        values: list[Value] = []
        for _ in range(width):
            kind = self.take(1)
            if kind not in (b"n", b"u", b"t"):
                raise Broken("a value of another kind")
            values.append(self.take(self.number("i")) if kind == b"t" else "u" if kind == b"u" else None)
        return tuple(values)

    def end(self) -> None:
        if self.at != len(self.body):
            raise Broken("bytes too many")


def read(messages: Sequence[bytes]) -> list[Row]:
    """Read all messages one by one, as documented."""
    relations: dict[int, tuple[str, list[bool]]] = {}
    open_: tuple[int, int, int] | None = None
    last, seq, rows = 0, 0, []
    for index, body in enumerate(messages):
        cursor, kind = Cursor(body), body[:1]
        if kind == b"B":
            lsn, ts, xid = cursor.number("q"), cursor.number("q"), cursor.number("I")
            if open_ is not None or lsn <= last:
                raise Broken("a begin out of place")
            open_, last, seq = (lsn, ts, xid), lsn, 0
            cursor.end()
        elif kind == b"C":
            flags, lsn, _, ts = cursor.number("b"), cursor.number("q"), cursor.number("q"), cursor.number("q")
            if open_ is None or flags or (lsn, ts) != open_[:2]:
                raise Broken("a commit out of place")
            open_ = None
            cursor.end()
        elif kind == b"R":
            oid, _, _, identity = cursor.number("I"), cursor.text(), cursor.text(), cursor.take(1).decode("latin1")
            keys = []
            for _ in range(cursor.number("H")):
                flag = cursor.number("B")
                cursor.text()
                cursor.take(8)
                if flag > 1:
                    raise Broken("flags")
                keys.append(bool(flag))
            if identity not in "dnfi":
                raise Broken("replica identity")
            cursor.end()
            relations[oid] = (identity, keys)
        elif kind == b"T":
            count, flags = cursor.number("i"), cursor.number("B")
            if count < 0 or flags > 3:
                raise Broken("truncate")
            for _ in range(count):
                oid, seq = cursor.number("I"), seq + 1
                if open_ is None or oid not in relations:
                    raise Broken("a truncate out of place")
                rows.append((index, "t", oid, open_[2], seq, None, None))
            cursor.end()
        elif kind in (b"I", b"U", b"D"):
            oid, seq = cursor.number("I"), seq + 1
            if open_ is None or oid not in relations:
                raise Broken("a change out of place")
            rows.append((index, kind.decode().lower(), oid, open_[2], seq, *tuples(cursor, kind, *relations[oid])))
            cursor.end()
        elif kind not in (b"O", b"Y", b"M"):
            raise Broken("a message of another kind")
        elif len(body) < {b"O": 10, b"Y": 7, b"M": 15}[kind]:
            raise Broken("a message that is cut short")
    return rows


def tuples(cursor: Cursor, kind: bytes, identity: str, keys: list[bool]) -> tuple[Any, Any]:
    """Return the new and the old row of a change."""
    old, letter = None, cursor.take(1)
    if kind != b"I" and letter == (b"O" if identity == "f" else b"K"):
        old = cursor.row(len(keys))
        if "u" in old or (identity != "f" and [value is not None for value in old] != keys):
            raise Broken("an old row that cannot be")
        if kind == b"D":
            return None, old
        letter = cursor.take(1)
    if letter != b"N" or kind == b"D":
        raise Broken("a row of another kind")
    return cursor.row(len(keys)), old


def rows_of(changes: Changes) -> Iterator[Row]:
    """Return decoded changes in the plain reader's form; values as bytes, because their encoding is checked later."""

    def values(arrays: Sequence[pa.Array], i: int) -> list[Value]:
        return [array.cast(pa.large_binary())[i].as_py() for array in arrays]

    for i, order in enumerate(changes.order.tolist()):
        op = chr(changes.op[i])
        new: list[Value] | None = values(changes.new, i) if op in "iu" else None
        for column, where in changes.unchanged.items():
            if new is not None and where[i]:
                assert new[column] is None
                new[column] = "u"
        old = values(changes.old, i) if changes.old is not None and changes.old_kind[i] else None
        place = (order, op, changes.relation.oid, int(changes.xid[i]), int(changes.seq[i]))
        yield *place, None if new is None else tuple(new), None if old is None else tuple(old)


def check(messages: Sequence[bytes]) -> bool:
    """Decode, check accepted messages against the plain reader, and return whether they were accepted."""
    lengths = np.array([len(message) for message in messages], "<i4").tobytes()
    try:
        decoded = decode(Piece(b"".join(messages), lengths, (), None))
    except ProtocolError:
        return False
    expected = read(messages)
    assert sorted(row for changes in decoded for row in rows_of(changes)) == sorted(expected)
    return True


# -- damage --------------------------------------------------------------------------------------------


def test_the_recording_itself(recording: list[bytes]) -> None:
    assert check(recording)
    assert {message[:1] for message in recording} == {b"B", b"C", b"R", b"I", b"U", b"D", b"T", b"M"}
    rows = read(recording)
    assert any("u" in (row[5] or ()) for row in rows)
    assert {row[1] for row in rows if row[6] is not None} == {"u", "d"}


def unlike(messages: Sequence[bytes]) -> list[int]:
    """Return the indexes of messages that differ in kind, length or the places of letters, such as marks of columns."""
    first: dict[tuple[bytes, tuple[int, ...]], int] = {}
    for index, message in enumerate(messages):
        letters = tuple(byte if chr(byte).isalpha() else 0 for byte in message)
        first.setdefault((message[:1], letters), index)
    return list(first.values())


def test_every_bit(recording: list[bytes]) -> None:
    """Accepted messages have another valid value, name or id."""
    commits = [index for index, message in enumerate(recording) if message[:1] == b"C"]
    some = recording[: commits[2] + 1]  # three transactions, whose rows follow the relations that are damaged
    accepted = 0
    for index in unlike(some):
        message = some[index]
        for bit in range(8 * min(len(message), 40)):
            damaged = bytearray(message)
            damaged[bit // 8] ^= 1 << bit % 8
            accepted += check([*some[:index], bytes(damaged), *some[index + 1 :]])
    assert accepted


def test_every_message_cut_left_out_repeated_and_exchanged(recording: list[bytes]) -> None:
    for index, message in enumerate(recording):
        before, after = recording[:index], recording[index + 1 :]
        for length in {*range(min(len(message), 120)), len(message) - 1}:
            assert not check([*before, message[:length], *after]) or message[:1] in b"OYM"
        check([*before, *after])
        repeated = check([*before, message, *recording[index:]])
        assert not repeated or message[:1] not in b"BC"
        for other in range(index + 1, len(recording)):
            exchanged = list(recording)
            exchanged[index], exchanged[other] = recording[other], message
            check(exchanged)


HUGE = [0xFF, 0x7F, 0x80, 0x00]


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, int, str, bytes]]:
    """Return a strategy for damages: a message, a place in it, the kind of damage, and bytes for it."""
    change = st.tuples(
        st.integers(0, 200),
        st.integers(0, 4000),
        st.sampled_from(["set", "cut", "insert", "remove", "huge", "swap", "repeat", "drop", "join", "split"]),
        st.binary(min_size=1, max_size=8),
    )
    return draw(st.lists(change, min_size=1, max_size=4))


def damage(recording: Sequence[bytes], changes: Sequence[tuple[int, int, str, bytes]]) -> list[bytes]:
    """Apply damages to messages."""
    messages = list(recording)
    for which, where, what, data in changes:
        index = which % len(messages)
        message = messages[index]
        at = where % (len(message) + 1)
        match what:
            case "set":
                messages[index] = (message[:at] + data + message[at + len(data) :])[: len(message)]
            case "cut":
                messages[index] = message[:at]
            case "insert":
                messages[index] = message[:at] + data + message[at:]
            case "remove":
                messages[index] = message[:at] + message[at + len(data) :]
            case "huge":
                number = bytes([HUGE[data[0] % 4], *data[1:4].ljust(3, b"\xff")])
                messages[index] = message[:at] + number + message[at + 4 :]
            case "swap":
                other = where % len(messages)
                messages[index], messages[other] = messages[other], message
            case "repeat":
                messages.insert(index, message)
            case "drop" if len(messages) > 1:
                del messages[index]
            case "join" if index:
                messages[index - 1 : index + 1] = [messages[index - 1] + message]
            case "split":
                messages[index : index + 1] = [message[:at], message[at:]]
    return messages


@settings(max_examples=600, deadline=None)
@given(changes=damages())
def test_any_damage(recording: list[bytes], changes: list[tuple[int, int, str, bytes]]) -> None:
    check(damage(recording, changes))


@settings(max_examples=300, deadline=None)
@given(changes=damages(), block=st.integers(20, 5000))
def test_any_damage_through_the_buffer(
    recording: list[bytes], changes: list[tuple[int, int, str, bytes]], block: int
) -> None:
    """This is the work of the connection's thread before the decoding: blocks, context, positions."""
    buffer = Buffer(Position(0), block)
    last = max(struct.unpack_from(">q", message, 10)[0] for message in recording if message[:1] == b"C")
    left = [b"w" + bytes(24) + message for message in damage(recording, changes)]

    def get(_: int) -> tuple[int, memoryview]:
        return (len(left[0]), memoryview(left.pop(0))) if left else (0, memoryview(b""))

    try:
        while left:
            fill_buffer(get, buffer, 1 << 30)
        for piece in buffer.take(Position(0), buffer.seal()):
            decode(piece)
    except ProtocolError:
        return
    # No position is acknowledged that was not sent, except by at most the size of a commit.
    assert buffer.position < last + (1 << 31)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_damaged_packages(recording: list[bytes], data: st.DataObject) -> None:
    """These packages travel from the driver to executors."""
    lengths = np.array([len(message) for message in recording], "<i4").tobytes()
    packed = bytearray(Piece(b"".join(recording), lengths, (), None).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(packed) - 1)))
        packed[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    with suppress(ProtocolError):
        decode(Piece.from_bytes(bytes(packed)))


def test_huge_numbers_allocate_nothing(recording: list[bytes]) -> None:
    """Every four bytes in turn become the largest number, signed and unsigned; no memory is allocated for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in unlike(recording):
        message = recording[index]
        for at in range(min(len(message) - 4, 120)):
            for number in (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff"):
                damaged = message[:at] + number + message[at + 4 :]
                check([*recording[:index], damaged, *recording[index + 1 :]])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kB
