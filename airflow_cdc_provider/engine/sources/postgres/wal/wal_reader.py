"""Reads the write-ahead log from one replication connection into a bounded buffer.

When the buffer is full the reading thread stops, and TCP's back-pressure reaches the walsender. Status messages are
still sent periodically, because a walsender that receives nothing for ``wal_sender_timeout`` closes the connection. In
the other direction, silence for that time proves nothing: a walsender is silent while it assembles a large row, and
before Postgres 16 while it decodes what is not published, such as the refresh of a large materialized view. It would be
silent again after a reconnect. So the server is asked, on a separate connection, whether the walsender is at work.

psycopg's ``PGconn`` is used because it never sends a status message on its own. psycopg2's replication cursor
acknowledges automatically when a keepalive comes, and has been seen to lose a committed transaction that way.

Protocol: Postgres documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time

import psycopg
from psycopg.pq.abc import PGconn

from airflow_cdc_provider.engine.core.errors import LimitExceeded, StreamFailed
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.dead_connections import find_session_problem
from airflow_cdc_provider.engine.postgres.replication import open_replication, replication_failure
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import EPOCH_2000, Buffer, Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_messages import fill_buffer
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece
from airflow_cdc_provider.engine.sources.postgres.wal.wal_start import (
    require_origin,
    require_slot,
    sender_timeout,
    shrink_receive_buffer,
    start_replication,
)

# A walsender sends each message separately, and waking up for each costs us, and the walsender, more than the message.
# During a nap many messages come. If the nap takes longer than asked, the core is busy and messages arrive in bulk
# anyway, so the reader stops napping for a while.
_AWAKE_SECONDS = 0.1
_NAP_SECONDS = 0.0005
_FEW_BYTES = 4096
# Small reads in a row: the last read of a burst is small even if more follows, so one of them proves nothing.
_FEW_TIMES = 8
_NEAR_NAP_SECONDS = 0.008
# libpq reads one TLS record a call, and a walsender sends each message in its own record. With this many records even
# small messages, without their headers, are more than a few bytes.
_RECORDS = 256
_IDLE = ("Activity", "Client")  # types of wait events of a walsender that waits for the log, or for us


class WalReader:
    """A thread that reads a slot into a :class:`Buffer`, and acknowledges what its caller says is committed.

    :param dsn: libpq URI of the source.
    :param start: end LSN of the last transaction that is durable in the sink; the server is asked to start there.
    :param origin: the server that the gate has seen; ``None`` if there was no gate, and slot and start are not checked.
    :param buffer_bytes: bytes of messages to hold at most (one block may come on top).
    :raises ConnectionFailed: when the server cannot be reached.
    :raises StreamFailed: when it refuses to stream, is another one, or the slot has moved beyond ``start``.
    """

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        start: Lsn,
        *,
        origin: ServerIdentity | None = None,
        block_bytes: int = 8 << 20,
        buffer_bytes: int = 128 << 20,
    ) -> None:
        self._buffer = Buffer(Position(start), block_bytes)
        self._block_bytes, self._buffer_bytes = block_bytes, buffer_bytes
        self._changed = threading.Condition()
        self._acknowledged = 0
        self._ask_reply = False
        self._came_at = time.monotonic()  # arrival of the message that the server sent at the buffer's ``sent_at``
        self._failure: Exception | None = None
        self._closing = False
        self._connection: PGconn = open_replication(dsn, f"airflow-cdc {slot}")
        try:
            self._dsn, self._pid = dsn, require_origin(self._connection, dsn, origin)
            self._nap = _NEAR_NAP_SECONDS if shrink_receive_buffer(self._connection) else _NAP_SECONDS
            start_replication(self._connection, slot, publication, start)
            with connected(dsn) as control:
                if origin is not None:
                    require_slot(control, dsn, slot, self._pid, start)
                self._silence = sender_timeout(control)
        except BaseException:
            self._connection.finish()
            raise
        self._status_interval = min(10.0, self._silence / 3)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="wal-reader", daemon=True)
        self._thread.start()

    def await_batch(self, after: Position, limit: int, begun: float, trigger: float, patience: float) -> bool:
        """Wait for the first transaction of the batch that begins at ``after``, then until the batch is due or full.

        It is due when the trigger has passed since the previous batch began, or since the oldest transaction of this
        batch was committed. A transaction of a backlog has waited long enough, regardless of what came after it.

        :param limit: bytes of a full batch.
        :param begun: when the previous batch began, by the clock :func:`time.monotonic`.
        :param trigger: least seconds between two batches.
        :param patience: seconds to wait at most.
        :returns: whether the batch is to be cut now; also true when nothing more will come.
        """
        due, last = begun + trigger, time.monotonic() + patience
        with self._changed:
            while self._failure is None and self._buffer.bytes < limit:
                now, until = time.monotonic(), last
                if self._buffer.holds(after):
                    until = min(due, self._came_at - self._buffer.age(after) + trigger)
                    if now >= until:
                        return True
                if now >= last:
                    return False
                self._changed.wait(min(until, last) - now)
        return True

    def cut(self, after: Position, limit: int) -> Position:
        """Choose the end of a batch as :meth:`Buffer.cut`; all before a change that cannot be sent is delivered."""
        with self._changed:
            if not isinstance(self._failure, LimitExceeded):
                self._check()
            end = self._buffer.cut(after, limit)
            if end == after:
                self._check()
            return end

    def reach(self, lsn: Lsn) -> Position:
        """Wait until the log has been read up to ``lsn`` or the buffer is full; return the last commit in it."""
        with self._changed:
            while self._buffer.position < lsn and self._buffer.bytes < self._buffer_bytes:
                self._await_log()
            return self._buffer.seal()

    def passed(self, after: Position) -> Lsn | None:
        """Return the LSN up to which nothing follows, as :meth:`Buffer.passed`."""
        with self._changed:
            return self._buffer.passed(after)

    def idle_position(self, after: Position) -> Position:
        """Return the position without content, as :meth:`Buffer.idle_position`."""
        with self._changed:
            self._check()
            return self._buffer.idle_position(after)

    def take(self, start: Position, end: Position) -> list[Piece]:
        """Return the pieces of a batch, as :meth:`Buffer.take`."""
        with self._changed:
            return self._buffer.take(start, end)

    def _await_log(self) -> None:
        """Wait for more of the log; ask the server for its position, in case nothing more comes."""
        self._check()
        self._ask_reply = True
        self._wake()
        self._changed.wait(1.0)

    def committed(self, end: Position) -> None:
        """Acknowledge the batch ending at ``end``, which is durable in sink and checkpoint."""
        with self._changed:
            self._buffer.release(end)
            if end.lsn > self._acknowledged:
                self._acknowledged = end.lsn
            self._changed.notify_all()
        self._wake()

    def close(self) -> None:
        """End the thread and the connection."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._connection.finish()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            try:
                self._read()
            except psycopg.Error as e:
                raise replication_failure(self._connection) from e
        except Exception as e:  # raised in the next call, which comes from Spark's thread
            with self._changed:
                self._failure = e
                self._changed.notify_all()

    def _read(self) -> None:
        connection, descriptor = self._connection, self._connection.socket
        sent_at, sent, few = 0.0, 0, 0
        heard = asked = awake_until = time.monotonic()  # last received, last asked for a reply, no nap before
        question: _Question | None = None
        while not self._closing:
            now = time.monotonic()
            if question is None and now - heard > self._silence:
                question = _Question(self._dsn, self._pid, connection)
            answered = question is not None and not question.is_alive()
            if now - max(heard, asked) > self._silence / 3:
                self._ask_reply, asked = True, now
            if self._acknowledged != sent or self._ask_reply or time.monotonic() - sent_at > self._status_interval:
                reply, self._ask_reply = self._ask_reply, False
                sent, sent_at = self._acknowledged, time.monotonic()
                self._send_status(sent, reply)
            full = self._buffer.bytes >= self._buffer_bytes
            if full:
                heard, question = time.monotonic(), None  # while nothing is read, silence means nothing
            else:
                held = self._buffer.bytes
                if self._receive():
                    continue
                came = self._buffer.bytes - held
                if came:  # nothing has come while a large row arrives in parts
                    few = few + 1 if came < _FEW_BYTES else 0
                if few >= _FEW_TIMES and now >= awake_until:
                    few = 0
                    time.sleep(self._nap)
                    if time.monotonic() - now > 2 * self._nap:
                        awake_until = now + _AWAKE_SECONDS
            waiting = [self._wake_read] if full else [self._wake_read, descriptor]
            ready, _, _ = select.select(waiting, [], [], min(1.0, self._status_interval))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if descriptor in ready:
                self._consume()
                heard, question = time.monotonic(), None
            elif question is not None and answered:
                if question.trouble is not None:
                    raise StreamFailed(
                        f"the server has sent nothing for {self._silence:g} seconds, although it was asked to, and"
                        f" {question.trouble}",
                        "Start again: the stream goes on from the last commit. If it persists, look at network and"
                        " server.",
                    )
                heard, question = time.monotonic(), None  # it is at work; it is asked again if it stays silent

    def _consume(self) -> None:
        """Let libpq read what has arrived."""
        connection = self._connection
        connection.consume_input()
        if not connection.ssl_in_use:
            return
        try:
            for _ in range(_RECORDS):
                more, _, _ = select.select([connection.socket], [], [], 0)
                connection.consume_input()  # in any case: libpq may hold the rest of a record that the socket has not
                if not more:
                    break
        except psycopg.Error:
            self._receive()  # raises the error that the server sent before it closed the connection
            raise

    def _receive(self) -> bool:
        """Move the messages that libpq holds into the buffer; return whether there may be more already."""
        with self._changed:
            # libpq can hold more messages than the buffer is to hold.
            room = min(self._buffer_bytes - self._buffer.bytes, self._block_bytes)
            sent_at = self._buffer.sent_at
            last, asked = fill_buffer(self._connection.get_copy_data, self._buffer, room)
            if self._buffer.sent_at != sent_at:
                self._came_at = time.monotonic()
            self._changed.notify_all()
            if last < 0:
                raise replication_failure(self._connection, self._connection.get_result())
            if asked:
                self._send_status(self._acknowledged, False)
        return last > 0

    def _send_status(self, flushed: int, ask_reply: bool) -> None:
        now = int(time.time() * 1e6) - EPOCH_2000
        position = max(self._buffer.position, flushed)
        self._connection.put_copy_data(struct.pack(">cqqqqB", b"r", position, flushed, flushed, now, ask_reply))
        self._connection.flush()


class _Question(threading.Thread):
    """Asks a server whether a walsender is at work; in a thread, since that takes time and status has to go out.

    :ivar trouble: the answer, once the thread has ended; see :func:`.find_session_problem`.
    """

    def __init__(self, dsn: str, pid: int, connection: PGconn) -> None:
        super().__init__(name="wal-question", daemon=True)
        self.trouble: str | None = None
        self._arguments = dsn, pid, connection.host.decode(), int(connection.port)
        self.start()

    def run(self) -> None:
        self.trouble = find_session_problem(*self._arguments, _IDLE)
