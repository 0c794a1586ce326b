"""The write-ahead log as it arrives: one replication connection, read into a bounded buffer.

When the buffer is full the reading thread stops, and TCP's back-pressure
reaches the walsender. Status messages go out unasked all the while, also then,
because a walsender that hears nothing for ``wal_sender_timeout`` hangs up. The
other way round, silence for that time is no proof: a walsender says nothing while it
puts a large row together, and before Postgres 16 while it decodes what is not
published, such as the refresh of a large materialized view; and it would do so again.
So the server is then asked, on a connection of its own, whether the walsender is at
work.

psycopg's ``PGconn`` is used because it sends only what we send. psycopg2's
replication cursor acknowledges on its own when a keepalive comes, and has been
seen to lose a committed transaction that way.

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
from airflow_cdc_provider.engine.postgres.dead_connections import find_trouble
from airflow_cdc_provider.engine.postgres.replication import open_replication, replication_failure
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import EPOCH_2000, Buffer, Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_messages import gulp
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece
from airflow_cdc_provider.engine.sources.postgres.wal.wal_start import (
    narrowed,
    require_origin,
    require_slot,
    sender_timeout,
    start_replication,
)

# A walsender sends each message by itself, and to be woken for each costs us, and it, more than the message does. While
# one sleeps, many come. Who oversleeps has to share a core, and is woken for many at a time anyway.
_AWAKE_SECONDS = 0.1
_NAP_SECONDS = 0.0005
_FEW_BYTES = 4096
# In a row: the last read of what there was is small even where more follows, so that one of them proves nothing.
_FEW_TIMES = 8
_NEAR_NAP_SECONDS = 0.008
# libpq reads one record of TLS a call, and a walsender sends each message in one of its own: so many that small ones,
# without their headers, are not taken for few bytes.
_RECORDS = 256
_IDLE = ("Activity", "Client")  # types of wait events of a walsender that waits for log, or for us


class WalReader:
    """A thread that reads a slot into a :class:`Buffer`, and acknowledges when told to.

    :param dsn: libpq URI of the source.
    :param start: end LSN of the last transaction that is durable in the sink; named to the server.
    :param origin: the server that the gate has seen; ``None`` where no gate was passed, and slot and start are taken
        as they are.
    :param buffer_bytes: bytes of messages held at most (one block may come on top).
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
        origin: Origin | None = None,
        block_bytes: int = 8 << 20,
        buffer_bytes: int = 128 << 20,
    ) -> None:
        self._buffer = Buffer(Position(start), block_bytes)
        self._block_bytes, self._buffer_bytes = block_bytes, buffer_bytes
        self._changed = threading.Condition()
        self._acknowledged = 0
        self._ask_reply = False
        self._came_at = time.monotonic()  # what the server had sent at the buffer's ``sent_at``
        self._failure: Exception | None = None
        self._closing = False
        self._connection: PGconn = open_replication(dsn, f"airflow-cdc {slot}")
        try:
            self._dsn, self._pid = dsn, require_origin(self._connection, dsn, origin)
            self._nap = _NEAR_NAP_SECONDS if narrowed(self._connection) else _NAP_SECONDS
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
        """Wait for the first transaction of the batch that begins at ``after``, then until it is due or full.

        It is due when the trigger has passed since the batch before began, or since the oldest transaction of this one
        was committed: one of a backlog has waited for long enough, whatever has come behind it.

        :param limit: bytes of a full batch.
        :param begun: when the batch before began, of the clock :func:`time.monotonic`.
        :param trigger: in seconds.
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
        """See :meth:`Buffer.cut`; what came before a change that cannot be sent is still delivered."""
        with self._changed:
            if not isinstance(self._failure, LimitExceeded):
                self._check()
            end = self._buffer.cut(after, limit)
            if end == after:
                self._check()
            return end

    def reach(self, lsn: Lsn) -> Position:
        """Wait until the log has been read up to ``lsn`` or the buffer is full; return the last commit that came."""
        with self._changed:
            while self._buffer.position < lsn and self._buffer.bytes < self._buffer_bytes:
                self._await_log()
            return self._buffer.seal()

    def passed(self, after: Position) -> Lsn | None:
        """See :meth:`Buffer.passed`."""
        with self._changed:
            return self._buffer.passed(after)

    def idle_position(self, after: Position) -> Position:
        """See :meth:`Buffer.idle_position`."""
        with self._changed:
            self._check()
            return self._buffer.idle_position(after)

    def take(self, start: Position, end: Position) -> list[Piece]:
        """See :meth:`Buffer.take`."""
        with self._changed:
            return self._buffer.take(start, end)

    def _await_log(self) -> None:
        """Wait for more of the log; the server is asked to say where it is, in case nothing more comes."""
        self._check()
        self._ask_reply = True
        self._wake()
        self._changed.wait(1.0)

    def committed(self, end: Position) -> None:
        """Take note that the batch ending at ``end`` is durable in sink and checkpoint: acknowledge it."""
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
        except Exception as e:  # handed to the next caller, who runs in Spark's thread
            with self._changed:
                self._failure = e
                self._changed.notify_all()

    def _read(self) -> None:
        connection, descriptor = self._connection, self._connection.socket
        sent_at, sent, few = 0.0, 0, 0
        heard = asked = awake_until = time.monotonic()
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
                heard, question = time.monotonic(), None  # who does not listen cannot complain
            else:
                held = self._buffer.bytes
                if self._receive():
                    continue
                came = self._buffer.bytes - held
                if came:  # none of a part of a large row
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
                heard, question = time.monotonic(), None  # it works; asked again if it goes on to say nothing

    def _consume(self) -> None:
        """Have libpq take what has come."""
        connection = self._connection
        connection.consume_input()
        if not connection.ssl_in_use:
            return
        try:
            for _ in range(_RECORDS):
                more, _, _ = select.select([connection.socket], [], [], 0)
                connection.consume_input()  # in any case: of the rest of a record the socket does not tell
                if not more:
                    break
        except psycopg.Error:
            self._receive()  # raises what the server has said before it closed the connection
            raise

    def _receive(self) -> bool:
        """Move what libpq holds into the buffer; true if there may be more at once."""
        with self._changed:
            # libpq can hold more messages than ours shall.
            room = min(self._buffer_bytes - self._buffer.bytes, self._block_bytes)
            sent_at = self._buffer.sent_at
            last, asked = gulp(self._connection.get_copy_data, self._buffer, room)
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
    """A server is asked whether a walsender is at work. In a thread: that takes its time, and status has to go out.

    :ivar trouble: the answer, once the thread has ended; see :func:`.find_trouble`.
    """

    def __init__(self, dsn: str, pid: int, connection: PGconn) -> None:
        super().__init__(name="wal-question", daemon=True)
        self.trouble: str | None = None
        self._arguments = dsn, pid, connection.host.decode(), int(connection.port)
        self.start()

    def run(self) -> None:
        self.trouble = find_trouble(*self._arguments, _IDLE)
