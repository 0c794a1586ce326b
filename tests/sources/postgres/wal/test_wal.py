"""The buffer's cuts, on made-up messages; the reader and its acknowledgements, on a real slot."""

from __future__ import annotations

import itertools
import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConnectionFailed, LimitExceeded, ProtocolError, StreamFailed
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import replication
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.dead_connections import find_trouble
from airflow_cdc_provider.engine.postgres.replication import open_replication
from airflow_cdc_provider.engine.postgres.slots import MESSAGE_PREFIX, emit_marker, read_slot
from airflow_cdc_provider.engine.sources.postgres.wal import wal_reader, wal_start
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Buffer, Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_messages import gulp
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.support.databases import execute, transaction
from tests.support.patience import SECONDS
from tests.support.slot_reading import reader_naps, slot_reader

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
    """What a batch carries: transaction, sequence and key of each row, in order."""
    return [
        (int(xid), int(seq), str(key))
        for piece in buffer.take(start, end)
        for changes in decode(piece)
        for xid, seq, key in zip(changes.xid, changes.seq, changes.new[0].to_pylist(), strict=True)
    ]


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
    """Transactions of any size, empty ones too, cut at any moment: nothing lost, repeated or out of order."""
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
    """What libpq does: the next message and its length, 0 when there is none; takes them away."""
    return lambda _: (len(messages[0]), memoryview(messages.pop(0))) if messages else (0, memoryview(b""))


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
        last, asked = gulp(replay(left), gulped, room)
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
        gulp(replay([keepalive(7), message, keepalive(9)]), buffer, 1000)
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
    """A keepalive moves the position on; a large transaction that follows is counted from there."""
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
    """The server counts from where it reads; what has been passed stays passed."""
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


def test_the_slot_moves_only_when_told(databases: Databases) -> None:
    """Keepalives ask for status all the time; none of the answers may acknowledge what nobody has applied."""
    with slot_reader(databases.source) as (reader, start), connected(databases.source, writes=True) as source:
        slot = f"s_{source.info.dbname}"
        with source.cursor() as cursor:
            cursor.execute("INSERT INTO public.t SELECT i, 'x' FROM generate_series(1, 1000) i")
        end = reader.reach(emit_marker(source, "test"))
        state = read_slot(source, slot)
        assert state is not None
        assert state.confirmed_flush_lsn == start
        assert sum(len(c.op) for piece in reader.take(Position(start), end) for c in decode(piece)) == 1000
        reader.committed(end)
        assert await_condition(lambda: read_slot(source, slot).confirmed_flush_lsn == end.lsn, 10)  # type: ignore[union-attr]


def test_a_batch_is_awaited_until_it_is_due_or_full(databases: Databases) -> None:
    """Nobody waits for the clock where a whole batch is there, nor for a batch where the clock has come."""
    now, never, long_ago = time.monotonic(), 1e6, 0.0
    with slot_reader(databases.source) as (reader, start):
        after = Position(start)
        assert not reader.await_batch(after, UNLIMITED, long_ago, trigger=1.0, patience=0.0)  # nothing comes
        assert reader.cut(after, UNLIMITED) == after
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(reader.await_batch, after, UNLIMITED, long_ago, 1.0, 1e6)
            assert not first.done()
            execute(databases.source, "INSERT INTO t VALUES (1, 'a')")
            assert first.result(SECONDS)
            end = reader.cut(after, UNLIMITED)
            assert end > after
            reader.committed(end)
            execute(databases.source, "INSERT INTO t VALUES (2, 'b')")
            assert await_condition(lambda: reader._buffer.holds(end), SECONDS)
            assert not reader.await_batch(end, 1 << 16, now, never, patience=0.0)  # nobody waits for ever
            full = thread.submit(reader.await_batch, end, 1 << 16, now, never, 1e6)
            with pytest.raises(TimeoutError):
                full.result(0.5)  # it is not due
            execute(databases.source, "INSERT INTO t SELECT n, repeat('x', 1000) FROM generate_series(3, 100) n")
            assert full.result(SECONDS)
        assert reader.cut(end, 1 << 16) > end


def test_what_was_committed_long_ago_does_not_wait(databases: Databases) -> None:
    """A backlog has waited for longer than any trigger."""
    trigger, coming = 0.2, time.monotonic() + 1e6
    with slot_reader(databases.source, "INSERT INTO t VALUES (1)", f"SELECT pg_sleep({2 * trigger})") as (
        reader,
        start,
    ):
        after = Position(start)
        assert await_condition(lambda: reader._buffer.holds(after), SECONDS)
        assert reader.await_batch(after, UNLIMITED, coming, trigger, patience=0.0)
        assert not reader.await_batch(after, UNLIMITED, coming, 1e6, patience=0.0)  # not so long ago


def test_the_time_of_another_server_makes_no_backlog(databases: Databases) -> None:
    """What was replicated to the source has the time of its own server, which may be years behind."""
    replicated = (
        "SELECT pg_replication_origin_create('elsewhere'), pg_replication_origin_session_setup('elsewhere')",
        "BEGIN; SELECT pg_replication_origin_xact_setup('0/1', '2001-01-01'); INSERT INTO t VALUES (1); COMMIT",
        "SELECT pg_replication_origin_session_reset(), pg_replication_origin_drop('elsewhere')",
    )
    with slot_reader(databases.source, *replicated) as (reader, start):
        after = Position(start)
        assert await_condition(lambda: reader._buffer.holds(after), SECONDS)
        ((changes,),) = [decode(piece) for piece in reader.take(after, reader.cut(after, UNLIMITED))]
        assert changes.commit_ts[0] < datetime(2002, 1, 1, tzinfo=UTC).timestamp() * 1e6
        assert reader._buffer.age(after) == 0


def send(buffer: Buffer, sent_at: int, *messages: bytes) -> None:
    """Let a server say something at a time, in microseconds since 2000."""
    gulp(replay([struct.pack(">cqqq", b"w", 0, 0, sent_at) + message for message in messages]), buffer, UNLIMITED)


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


def test_a_backlog_does_not_wait_for_what_has_come_behind_it(databases: Databases) -> None:
    """As a heartbeat's marker does, every ten seconds, however much is still to be read."""
    trigger, coming = 2.0, time.monotonic() + 1e6
    old = ("INSERT INTO t VALUES (1)", f"SELECT pg_sleep({trigger})")
    with slot_reader(databases.source, *old) as (reader, start), connected(databases.source, writes=True) as source:
        emit_marker(source, "heartbeat")
        end = reader.reach(emit_marker(source, "behind it"))
        assert len(reader.take(Position(start), end)) == 1
        assert reader.await_batch(Position(start), UNLIMITED, coming, trigger, patience=0.0)


def test_a_transaction_waits_no_longer_than_the_trigger_where_nothing_comes_behind_it(databases: Databases) -> None:
    """The batch before may have begun a moment before it came, and have left it behind."""
    trigger, coming = 0.5, time.monotonic() + 1e6
    with slot_reader(databases.source) as (reader, start):
        after = Position(start)
        execute(databases.source, "INSERT INTO t VALUES (1)")
        assert await_condition(lambda: reader._buffer.holds(after), SECONDS)
        assert not reader.await_batch(after, UNLIMITED, coming, 1e6, patience=trigger)
        assert reader.await_batch(after, UNLIMITED, coming, trigger, patience=0.0)


def test_what_came_before_a_change_that_cannot_be_sent_is_delivered(databases: Databases) -> None:
    with slot_reader(databases.source) as (reader, start), connected(databases.source, writes=True) as source:
        with source.cursor() as cursor:
            cursor.execute("INSERT INTO public.t VALUES (1, 'x')")
        end = reader.reach(emit_marker(source, "test"))
        reader._failure = LimitExceeded.by("what a change of more than a gigabyte leads to")
        assert reader.cut(Position(start), UNLIMITED) == end
        with pytest.raises(LimitExceeded):
            reader.cut(end, UNLIMITED)
        reader._failure = StreamFailed("any other failure", "")
        with pytest.raises(StreamFailed):
            reader.cut(Position(start), UNLIMITED)


def test_a_buffer_is_full_whatever_libpq_holds(databases: Databases) -> None:
    """A large message leaves libpq with a large buffer, into which many others fit."""
    with (
        slot_reader(databases.source, block_bytes=1 << 16, buffer_bytes=1 << 20) as (reader, _),
        psycopg.connect(databases.source, autocommit=True) as source,
    ):
        source.execute("ALTER TABLE t ALTER body SET STORAGE EXTERNAL")
        source.execute("INSERT INTO t SELECT 0, repeat('x', 40 << 20)")
        with connected(databases.source, writes=True) as control:
            end = reader.reach(emit_marker(control, "test"))
            source.execute("INSERT INTO t SELECT n, repeat('x', 1 << 16) FROM generate_series(1, 300) n")
            marker = emit_marker(control, "test")
        largest = 0
        while end.lsn < marker:
            reader.committed(end)
            end = reader.reach(marker)
            largest = max(largest, reader._buffer.bytes)
    assert 1 << 20 <= largest < 2 << 20


@pytest.mark.parametrize(
    ("host", "near"), [("127.0.0.1", True), ("127.0.0.2", False), ("", False)], ids=["near", "elsewhere", "unix"]
)
def test_the_log_gathers_on_the_side_of_a_server_that_is_on_this_machine(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, host: str, near: bool
) -> None:
    """There we keep little room for it; elsewhere distance needs more, and a Unix socket has none of its own.

    The address 127.0.0.2 is reached from 127.0.0.1, as one machine is from another.
    """
    monkeypatch.setattr(wal_start, "_NEAR_ROOM_BYTES", 32 << 10)  # as no system has by itself
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        os.chmod(sockets, 0o777)  # the server is another user
        addresses = {"listen_addresses": "127.0.0.1, 127.0.0.2", "unix_socket_directories": sockets}
        server: PostgresServer = make_server(settings=addresses)
        dsn = f"postgresql://postgres@:{server.port}/postgres?host={host or sockets}"
        rows = "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 5000) i"
        with slot_reader(dsn, rows) as (reader, start), connected(dsn, writes=True) as source:
            end = reader.reach(emit_marker(source, "test"))
            pieces = reader.take(Position(start), end)
            with socket.socket(fileno=os.dup(reader._connection.socket)) as ours:
                room = ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert sum(len(c.op) for piece in pieces for c in decode(piece)) == 5000
    assert (room == 64 << 10) == near, "the system doubles it, for what it needs itself"
    assert (reader._nap == wal_reader._NEAR_NAP_SECONDS) == near


def test_nobody_sleeps_while_there_is_more(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages come in portions of which the last may be small, and more behind it; that would be 800 sleeps."""
    naps = reader_naps(monkeypatch)
    rows = "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 115000) i"
    with slot_reader(databases.source, rows) as (reader, start), connected(databases.source, writes=True) as source:
        end = reader.reach(emit_marker(source, "test"))
        pieces = reader.take(Position(start), end)
    assert sum(len(c.op) for piece in pieces for c in decode(piece)) == 115000
    assert len(naps) < 400


@pytest.mark.slow
def test_a_full_buffer_stops_reading_and_the_walsender_stays(make_server: ServerMaker) -> None:
    """Back-pressure reaches the server, and status goes out all the same: the connection outlives the timeouts."""
    server: PostgresServer = make_server(settings={"wal_sender_timeout": "2s", "tcp_user_timeout": "2s"})
    with (
        slot_reader(server.dsn(), block_bytes=1 << 16, buffer_bytes=1 << 20) as (reader, start),
        connected(server.dsn(), writes=True) as source,
    ):
        with source.cursor() as cursor:
            cursor.execute("SHOW tcp_user_timeout")
            assert cursor.fetchone() == ("0",)
            with socket.socket(fileno=os.dup(source.fileno())) as ours:
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            cursor.execute("INSERT INTO public.t SELECT i, repeat('x', 1000) FROM generate_series(1, 30000) i")
        marker = emit_marker(source, "test")
        after, total, largest = Position(start), 0, 0
        reached = reader.reach(marker)
        assert reached.lsn < marker  # the transaction is larger than the buffer
        with psycopg.connect(server.dsn(), autocommit=True) as other:
            other.execute("SELECT pg_sleep(5)")  # longer than two timeouts, with nothing being read
        while after.lsn < marker:
            end = reader.cut(after, 1 << 19)
            if end == after:
                reader.reach(marker)
                continue
            pieces = reader.take(after, end)
            total += sum(len(c.op) for piece in pieces for c in decode(piece))
            largest = max(largest, sum(len(piece.data) for piece in pieces))
            reader.committed(end)
            after = end
    assert total == 30000
    assert largest <= 1 << 20


@pytest.mark.slow
def test_a_walsender_that_is_at_work_may_be_silent(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than the timeout: here it waits for a lock, as one of before Postgres 16 for the end of a rewrite."""
    answers: list[str | None] = []

    def asked(*arguments: Any) -> str | None:
        answers.append(find_trouble(*arguments))
        return answers[-1]

    monkeypatch.setattr(wal_reader, "find_trouble", asked)
    execute(databases.source, f"ALTER DATABASE {databases.source.rpartition('/')[2]} SET wal_sender_timeout = '1s'")
    with slot_reader(databases.source) as (reader, start), connected(databases.source, writes=True) as source:
        with transaction(databases.source, "LOCK TABLE pg_publication_rel IN ACCESS EXCLUSIVE MODE"):
            execute(databases.source, "INSERT INTO public.t VALUES (1, 'x')")
            assert await_condition(lambda: len(answers) > 1, SECONDS)
        end = reader.reach(emit_marker(source, "test"))
        assert sum(len(c.op) for piece in reader.take(Position(start), end) for c in decode(piece)) == 1
    assert answers == [None] * len(answers)


def test_each_host_of_a_dsn_is_given_its_time(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "CONNECT_TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        user, _, address = databases.source.partition("@")
        open_replication(f"{user}@{silent},{address}", "test").finish()
        with pytest.raises(ConnectionFailed, match=f"to {silent},{silent}/d: no answer for 1 sec.*; no answer for 1"):
            open_replication(f"{user}@{silent},{silent}/d", "test")


def test_a_stream_that_the_server_ends_says_so(databases: Databases) -> None:
    with slot_reader(databases.source) as (reader, start), connected(databases.source, writes=True) as source:
        with source.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        with pytest.raises(Exception, match="ended the replication stream"):
            reader.reach(1 << 60)
        with pytest.raises(Exception, match="ended the replication stream"):
            reader.cut(Position(start), UNLIMITED)


def test_markers_carry_our_prefix(databases: Databases) -> None:
    """What the buffer takes for content of ours is what is emitted."""
    with slot_reader(databases.source) as (reader, start), psycopg.connect(databases.source, autocommit=True) as other:
        other.execute("SELECT pg_logical_emit_message(true, 'somebody_else', 'x')")
        with connected(databases.source, writes=True) as source:
            emit_marker(source, "mine")
            end = reader.reach(emit_marker(source, "behind it"))  # a keepalive may come before a marker's own commit
        (piece,) = reader.take(Position(start), end)
        assert MESSAGE_PREFIX.encode() in piece.data
