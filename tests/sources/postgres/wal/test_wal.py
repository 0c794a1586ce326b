"""The buffer of the log: where batches are cut, with artificial messages."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Buffer, Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_messages import fill_buffer

UNLIMITED = 1 << 62


RELATION = b"R" + struct.pack(">I", 7) + b"public\0t\0d" + struct.pack(">h", 1) + b"\1id\0" + struct.pack(">Ii", 23, -1)


def begin(lsn: int, xid: int, committed_at: int = 0) -> bytes:
    return b"B" + struct.pack(">qqI", lsn, committed_at, xid)


def commit(lsn: int, end: int) -> bytes:
    return b"C" + struct.pack(">bqqq", 0, lsn, end, 0)


def insert(value: int) -> bytes:
    text = str(value).encode()
    return b"I" + struct.pack(">I", 7) + b"N" + struct.pack(">h", 1) + b"t" + struct.pack(">i", len(text)) + text


def keys(buffer: Buffer, start: Position, end: Position) -> list[tuple[int, int, str]]:
    """Return the contents of a batch: transaction, sequence and key of each row, in order."""
    return [
        (int(xid), int(seq), str(key))
        for piece in buffer.take(start, end)
        for changes in decode(piece)
        for xid, seq, key in zip(changes.xid, changes.seq, changes.new[0].to_pylist(), strict=True)
    ]


@pytest.mark.lengthy
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    block_bytes=st.integers(20, 400),
    limit=st.integers(1, 600),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_every_row_is_delivered_once_however_the_batches_are_cut(
    sizes: list[int], block_bytes: int, limit: int, cuts: list[int]
) -> None:
    """Transactions of any size, also empty ones, are cut at any moment: nothing is lost, repeated or out of order."""
    messages, expected, lsn = [RELATION], [], 100
    for xid, size in enumerate(sizes, start=1):
        messages.append(begin(lsn + size, xid))
        messages += [insert(lsn + row) for row in range(size)]
        expected += [(xid, row + 1, str(lsn + row)) for row in range(size)]
        messages.append(commit(lsn + size, lsn + size + 1))
        lsn += size + 2
    messages[0:2] = [messages[1], RELATION]  # a relation comes inside a transaction
    buffer, after, got = Buffer(Position(100), block_bytes), Position(100), []
    moments = itertools.cycle(cuts)
    pending = next(moments)

    def drain() -> None:
        nonlocal after
        while (end := buffer.cut(after, limit)) != after:
            assert end > after
            got.extend(keys(buffer, after, end))
            buffer.release(end)
            after = end

    for message in messages:
        buffer.add(message)
        pending -= 1
        if not pending:
            pending = next(moments)
            drain()
    drain()
    assert got == expected
    assert after.block == 0


OTHERS = b"M" + bytes(9) + b"other\0" + bytes(4)


ROWS = st.builds(insert, st.integers(0, 10**9))


MESSAGES = st.sampled_from([RELATION, OTHERS, b""]) | ROWS


def keepalive(wal_end: int, reply: bool = True) -> bytes:
    return struct.pack(">cqqB", b"k", wal_end, 0, reply)


def replay(messages: list[bytes]) -> Callable[[int], tuple[int, memoryview]]:
    """Return the next message and its length like libpq, or 0 when there is none, and remove it."""
    return lambda _: (len(messages[0]), memoryview(messages.pop(0))) if messages else (0, memoryview(b""))


@pytest.mark.lengthy
@given(
    transactions=st.lists(st.lists(MESSAGES | st.lists(ROWS, min_size=6, max_size=40)), max_size=8),
    block_bytes=st.integers(22, 2000),
    rooms=st.lists(st.integers(1, 3000), min_size=1, max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_messages_in_gulps_are_those_that_come_one_by_one(
    transactions: list[list[bytes | list[bytes]]], block_bytes: int, rooms: list[int]
) -> None:
    """Keepalives come between transactions, and within them, where an empty message stands for one."""
    messages, contents = [], []
    for n, changes in enumerate(transactions, start=1):
        flat = [row for each in changes for row in (each if isinstance(each, list) else [each])]
        contents.append([message for message in flat if message and message != OTHERS])
        sent = [begin(100 * n, n, 1_000_000 * n), *flat, commit(100 * n, 100 * n + 1)]
        header = struct.pack(">cqqq", b"w", 0, 0, 1_500_000 * n)
        messages += [header + message if message else keepalive(100 * n) for message in sent]
        messages.append(keepalive(100 * n + 50))
    single, gulped = Buffer(Position(0), block_bytes), Buffer(Position(0), block_bytes)
    rooms, left = itertools.cycle(rooms), list(messages)
    while left:
        before, room = list(left), next(rooms)
        last, asked = fill_buffer(replay(left), gulped, room)
        taken = before[: len(before) - len(left)]
        assert last == (len(taken[-1]) if left else 0)
        assert sum(len(message) for message in taken[:-1] if message[:1] == b"w") < room
        for message in taken:
            if message[:1] == b"k":
                single.keepalive(struct.unpack_from(">q", message, 1)[0])
            else:
                single.add(message[25:])
        assert asked == any(message[:1] == b"k" for message in taken)
        assert (gulped.bytes, gulped.position) == (single.bytes, single.position)
        told = [message for message in messages[: len(messages) - len(left)] if message[:1] == b"w"]
        committed = sum(message[25:26] == b"C" for message in told)
        kept = [n for n, flat in enumerate(contents[:committed], start=1) if flat]
        if kept:  # the nth transaction was committed in second n, and sent in second 1.5 n
            assert gulped.age(Position(0)) == 1.5 * (committed + (told[-1][25:26] != b"C")) - kept[0]
    end = single.seal()
    assert gulped.seal() == end
    assert [p.parts() for p in gulped.take(Position(0), end)] == [p.parts() for p in single.take(Position(0), end)]


@pytest.mark.parametrize("message", [b"w" + bytes(24), b"w" + bytes(20), keepalive(5)[:-1], b"x" + bytes(40), b"k"])
def test_a_message_that_is_none_is_refused(message: bytes) -> None:
    buffer = Buffer(Position(0), block_bytes=1000)
    with pytest.raises(ProtocolError, match=re.escape(f"a message of {len(message)} bytes, {message!r}, is not what")):
        fill_buffer(replay([keepalive(7), message, keepalive(9)]), buffer, 1000)
    assert buffer.position == 7


def test_a_batch_ends_at_a_commit_unless_one_transaction_exceeds_the_limit() -> None:
    buffer = Buffer(Position(0), block_bytes=50)
    for message in [begin(10, 1), RELATION, insert(1), commit(10, 11), begin(90, 2), *map(insert, range(60))]:
        buffer.add(message)
    first = buffer.cut(Position(0), limit=300)
    assert first == Position(11)
    inside = buffer.cut(first, limit=300)
    assert inside.lsn == 11
    assert inside.block > 0
    assert buffer.cut(first, limit=UNLIMITED) == first  # below the limit: wait for the commit
    buffer.add(commit(90, 91))
    assert buffer.cut(inside, limit=UNLIMITED) == Position(91)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8), block_bytes=st.integers(30, 400))
@settings(max_examples=100, deadline=None)
def test_a_buffer_holds_what_a_batch_could_end_with(sizes: list[int], block_bytes: int) -> None:
    buffer, content = Buffer(Position(100), block_bytes), False
    for xid, size in enumerate(sizes, start=1):
        lsn = 100 * (xid + 1)
        for message in (begin(lsn, xid), *map(insert, range(size))):
            buffer.add(message)
            assert buffer.holds(Position(100)) == content
        buffer.add(commit(lsn, lsn + 1))
        content |= size > 0
        assert buffer.holds(Position(100)) == content
        assert (buffer.cut(Position(100), UNLIMITED) != Position(100)) == content
    after = Position(100)
    while buffer.holds(after):
        after = buffer.cut(after, UNLIMITED)
        buffer.release(after)
    assert buffer.cut(after, UNLIMITED) == after


def test_an_idle_position_does_not_swallow_what_comes_after_it() -> None:
    """A keepalive moves the position; a large transaction that follows is counted from there."""
    buffer = Buffer(Position(0), block_bytes=40)
    buffer.keepalive(500)
    idle = buffer.idle_position(Position(0))
    assert idle == Position(500)
    for message in [begin(600, 3), RELATION, *map(insert, range(9))]:
        buffer.add(message)
    assert buffer.idle_position(idle) == idle  # a transaction is open
    inside = buffer.cut(idle, limit=1)
    assert inside > idle
    buffer.add(commit(600, 601))
    end = buffer.cut(inside, limit=UNLIMITED)
    assert [key for _, _, key in keys(buffer, idle, inside) + keys(buffer, inside, end)] == list("012345678")


def test_a_keepalive_after_a_reconnect_may_be_lower_than_before() -> None:
    """The server counts from where it reads; a position that has been passed stays passed."""
    buffer = Buffer(Position(500), block_bytes=40)
    for wal_end in (300, 499):
        buffer.keepalive(wal_end)
        assert buffer.idle_position(Position(500)) == Position(500)
    buffer.keepalive(510)
    buffer.keepalive(400)
    assert buffer.idle_position(Position(500)) == Position(510)


def test_a_transaction_without_content_only_moves_the_position() -> None:
    buffer = Buffer(Position(0), block_bytes=1000)
    for message in [begin(10, 1), commit(10, 11)]:
        buffer.add(message)
    assert buffer.bytes == 0
    assert buffer.cut(Position(0), UNLIMITED) == Position(0)
    assert buffer.idle_position(Position(0)) == Position(11)


def send(buffer: Buffer, sent_at: int, *messages: bytes) -> None:
    """Let a server send a message at a time, in microseconds since 2000."""
    fill_buffer(
        replay([struct.pack(">cqqq", b"w", 0, 0, sent_at) + message for message in messages]), buffer, UNLIMITED
    )


def test_what_comes_behind_a_transaction_makes_it_no_younger() -> None:
    start = Position(0)
    for block_bytes in (30, 1000):  # sealed in parts, or not yet
        buffer = Buffer(start, block_bytes)
        send(buffer, 6_000_000, begin(100, 1, 5_000_000), insert(1), insert(2), commit(100, 101))
        send(buffer, 9_500_000, begin(200, 2, 7_000_000), commit(200, 201))  # without content
        send(buffer, 10_000_000, begin(300, 3, 9_000_000))
        assert buffer.age(start) == 5.0
        send(buffer, 9_900_000, insert(3), commit(300, 301))
        assert buffer.age(start) == 4.9
        end = buffer.seal()
        send(buffer, 12_000_000, begin(400, 4, 11_000_000), insert(4), commit(400, 401))
        assert buffer.age(start) == 7.0
        assert buffer.age(end) == 1.0
        send(buffer, 10_900_000, begin(500, 5, 10_900_000))
        assert buffer.age(end) == 0  # the clock was set back


def test_a_transaction_with_the_time_of_another_server_hides_no_older_one() -> None:
    buffer = Buffer(Position(0), block_bytes=1000)
    send(buffer, 5_000_000, begin(100, 1, 1_000_000), b"O" + bytes(8) + b"other\0", insert(1), commit(100, 101))
    assert buffer.age(Position(0)) == 0
    send(buffer, 6_000_000, begin(200, 2, 4_000_000), insert(2), commit(200, 201))
    assert buffer.age(Position(0)) == 2.0
