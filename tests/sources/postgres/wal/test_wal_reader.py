"""The reader of the log and its acknowledgments, on a real slot."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import ConnectionFailed, LimitExceeded, StreamFailed
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import replication
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.dead_connections import find_session_problem
from airflow_cdc_provider.engine.postgres.replication import open_replication
from airflow_cdc_provider.engine.postgres.slots import MESSAGE_PREFIX, emit_marker, read_slot
from airflow_cdc_provider.engine.sources.postgres.wal import wal_reader, wal_start
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.support.databases import execute, transaction
from tests.support.patience import SECONDS
from tests.support.slot_reading import reader_naps, slot_reader

UNLIMITED = 1 << 62


def test_the_slot_moves_only_when_told(databases: Databases) -> None:
    """Keepalives request status all the time; no answer may acknowledge changes that have not been applied."""
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
    """A full batch does not wait for its due time, and a due batch does not wait until it is full."""
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
            assert not reader.await_batch(end, 1 << 16, now, never, patience=0.0)  # does not wait forever
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
    """Replicated transactions have the time of their own server, which may be years behind."""
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


def test_a_backlog_does_not_wait_for_what_has_come_behind_it(databases: Databases) -> None:
    """A heartbeat's marker comes every ten seconds, however much remains to be read."""
    trigger, coming = 2.0, time.monotonic() + 1e6
    old = ("INSERT INTO t VALUES (1)", f"SELECT pg_sleep({trigger})")
    with slot_reader(databases.source, *old) as (reader, start), connected(databases.source, writes=True) as source:
        emit_marker(source, "heartbeat")
        end = reader.reach(emit_marker(source, "behind it"))
        assert len(reader.take(Position(start), end)) == 1
        assert reader.await_batch(Position(start), UNLIMITED, coming, trigger, patience=0.0)


def test_a_transaction_waits_no_longer_than_the_trigger_where_nothing_comes_behind_it(databases: Databases) -> None:
    """The previous batch may have started just before the transaction arrived, and have left it for the next one."""
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
    """There the client keeps a small buffer; over a distance it needs more, and a Unix socket has no buffer to set.

    The address 127.0.0.2 is reached from 127.0.0.1, as one machine is reached from another.
    """
    monkeypatch.setattr(wal_start, "_NEAR_ROOM_BYTES", 32 << 10)  # a value that no system has by default
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
    """Messages arrive in portions, of which the last may be small with more to come; that would be 400 sleeps."""
    naps = reader_naps(monkeypatch)
    rows = "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 60000) i"
    with slot_reader(databases.source, rows) as (reader, start), connected(databases.source, writes=True) as source:
        end = reader.reach(emit_marker(source, "test"))
        pieces = reader.take(Position(start), end)
    assert sum(len(c.op) for piece in pieces for c in decode(piece)) == 60000
    assert len(naps) < 200


@pytest.mark.slow
def test_a_full_buffer_stops_reading_and_the_walsender_stays(make_server: ServerMaker) -> None:
    """Back-pressure reaches the server, but status is still sent: the connection survives the timeouts."""
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
            cursor.execute("INSERT INTO public.t SELECT i, repeat('x', 1000) FROM generate_series(1, 15000) i")
        marker = emit_marker(source, "test")
        after, total, largest = Position(start), 0, 0
        reached = reader.reach(marker)
        assert reached.lsn < marker  # the transaction is larger than the buffer
        with psycopg.connect(server.dsn(), autocommit=True) as other:
            other.execute("SELECT pg_sleep(5)")  # longer than two timeouts, without reading
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
    assert total == 15000
    assert largest <= 1 << 20


@pytest.mark.slow
def test_a_walsender_that_is_at_work_may_be_silent(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent for longer than the timeout: it waits for a lock, or before Postgres 16 for the end of a rewrite."""
    answers: list[str | None] = []

    def asked(*arguments: Any) -> str | None:
        answers.append(find_session_problem(*arguments))
        return answers[-1]

    monkeypatch.setattr(wal_reader, "find_session_problem", asked)
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
    """The buffer treats exactly those messages as content that the pipeline emits."""
    with slot_reader(databases.source) as (reader, start), psycopg.connect(databases.source, autocommit=True) as other:
        other.execute("SELECT pg_logical_emit_message(true, 'somebody_else', 'x')")
        with connected(databases.source, writes=True) as source:
            emit_marker(source, "mine")
            end = reader.reach(emit_marker(source, "behind it"))  # a keepalive may come before a marker's own commit
        (piece,) = reader.take(Position(start), end)
        assert MESSAGE_PREFIX.encode() in piece.data
