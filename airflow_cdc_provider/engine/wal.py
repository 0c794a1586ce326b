"""The write-ahead log as it arrives: one replication connection and a bounded buffer.

A thread reads the connection into *blocks* of raw pgoutput messages. A block ends
at a commit wherever possible; only a transaction larger than a block is cut
inside. When the buffer is full the thread stops reading, and TCP's back-pressure
reaches the walsender. Status messages go out unasked all the while, also then,
because a walsender that hears nothing for ``wal_sender_timeout`` hangs up.

psycopg's ``PGconn`` is used because it sends only what we send. psycopg2's
replication cursor acknowledges on its own when a keepalive comes, and has been
seen to lose a committed transaction that way.

Protocol: Postgres documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import dataclasses
import os
import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from psycopg import pq
from psycopg.pq.abc import PGconn

from airflow_cdc_provider.engine.connection import connected, describe, scalar, session_dsn
from airflow_cdc_provider.engine.errors import ConnectionFailed, StreamFailed
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.pgoutput import OpenTransaction, Piece

MESSAGE_PREFIX = "airflow_cdc"
"""Prefix of the logical messages (markers, heartbeats) that this engine writes into the source's log."""

_EPOCH_2000 = 946_684_800_000_000
_HEADER = 25
_BEGIN, _COMMIT, _RELATION, _MESSAGE, _TRUNCATE = b"BCRMT"
_ROWS = frozenset(b"IUD")
_MARKER = MESSAGE_PREFIX.encode() + b"\0"


@dataclass(frozen=True, order=True)
class Position:
    """A place in the stream at which a batch may end.

    :param lsn: end LSN of a commit, or of what a keepalive stands for.
    :param block: 0 between transactions; otherwise how many blocks of the open transaction that follows
        ``lsn`` have been passed.
    """

    lsn: int
    block: int = 0

    @classmethod
    def from_json(cls, offset: dict[str, str | int]) -> Position:
        return cls(parse_lsn(str(offset["lsn"])), int(offset["block"]))

    def to_json(self) -> dict[str, str | int]:
        return {"lsn": format_lsn(self.lsn), "block": self.block}


@dataclass(frozen=True)
class Block:
    """A sealed run of messages that ends at ``end``."""

    piece: Piece
    end: Position

    @property
    def size(self) -> int:
        return len(self.piece.data)


class Buffer:
    """Messages between the connection and Spark; no I/O, not thread-safe by itself.

    :param start: position after which messages come.
    :param block_bytes: size from which a block is sealed.
    :param boundary: an LSN at which a block must end, so that a batch planned by an earlier run can be cut again.
    """

    def __init__(self, start: Position, block_bytes: int, boundary: int = 0) -> None:
        self.position = start.lsn
        self.bytes = 0
        self._blocks: deque[Block] = deque()
        self._block_bytes = block_bytes
        self._boundary = boundary
        self._end = start
        # Replaced, never changed, so that a reference keeps the state of a moment.
        self._relations: dict[int, bytes] = {}
        self._transaction: OpenTransaction | None = None
        self._rows = 0
        self._content = False
        self._restart([], self._relations, None)

    def _restart(self, messages: list[bytes], relations: dict[int, bytes], transaction: OpenTransaction | None) -> None:
        """Begin a block with messages that were not sealed, and the context in which they stand."""
        self._messages = messages
        self._size = sum(map(len, messages))
        self._context = (tuple(relations.values()), transaction)
        self._begin = 0
        self._committed = 0
        self._committed_lsn = 0
        self._committed_relations = relations

    def add(self, message: bytes) -> None:
        """Add one pgoutput message, without the header of XLogData."""
        tag = message[0]
        self._messages.append(message)
        self._size += len(message)
        self.bytes += len(message)
        if tag in _ROWS:
            self._content = True
            self._rows += 1
        elif tag == _BEGIN:
            lsn, timestamp, xid = struct.unpack_from(">qqI", message, 1)
            self._transaction = OpenTransaction(xid, lsn, timestamp + _EPOCH_2000, 0)
            self._rows = 0
            self._content = False
            self._begin = len(self._messages) - 1
        elif tag == _COMMIT:
            self._commit(struct.unpack_from(">q", message, 10)[0])
            return
        elif tag == _RELATION:
            (oid,) = struct.unpack_from(">I", message, 1)
            self._relations = {**self._relations, oid: message}
            self._content = True
        elif tag == _TRUNCATE:
            self._content = True
            self._rows += struct.unpack_from(">I", message, 1)[0]
        elif tag == _MESSAGE and message[10:].startswith(_MARKER):
            self._content = True
        if self._size >= self._block_bytes:
            self._seal_committed()
            if self._size >= self._block_bytes:
                self._seal_open()

    def _commit(self, end_lsn: int) -> None:
        in_parts = self._context[1] is not None and self._committed == 0
        self._transaction = None
        self.position = end_lsn
        if not self._content and not in_parts:
            self._forget_transaction()
            return
        self._committed = len(self._messages)
        self._committed_lsn = end_lsn
        self._committed_relations = self._relations
        # The last part of a transaction that was sealed in parts stands alone, so that all its parts end one batch.
        if in_parts or end_lsn == self._boundary or self._size >= self._block_bytes:
            self._seal_committed()

    def _forget_transaction(self) -> None:
        """Drop a transaction without content: only the position moves."""
        dropped = sum(map(len, self._messages[self._begin :]))
        del self._messages[self._begin :]
        self._size -= dropped
        self.bytes -= dropped

    def keepalive(self, wal_end: int) -> None:
        """Note a keepalive: between transactions it stands for everything before it in the byte stream."""
        if self._transaction is None:
            self.position = max(self.position, wal_end)

    def seal(self) -> Position:
        """Make a block of the whole transactions that have come; return the end of the last block."""
        self._seal_committed()
        return self._end

    def _seal_committed(self) -> None:
        if self._committed:
            sealed, rest = self._messages[: self._committed], self._messages[self._committed :]
            self._append(sealed, Position(self._committed_lsn))
            # The rest, if any, begins with BEGIN.
            self._restart(rest, self._committed_relations, None)

    def _seal_open(self) -> None:
        self._append(self._messages, Position(self._end.lsn, self._end.block + 1))
        assert self._transaction is not None
        transaction = dataclasses.replace(self._transaction, seq=self._rows)
        self._restart([], self._relations, transaction)

    def _append(self, messages: list[bytes], end: Position) -> None:
        relations, transaction = self._context
        lengths = np.fromiter(map(len, messages), dtype="<i4", count=len(messages))
        self._blocks.append(Block(Piece(b"".join(messages), lengths.tobytes(), relations, transaction), end))
        self._end = end

    def cut(self, after: Position, limit: int, until: Position | None = None) -> Position:
        """Choose where the batch that begins at ``after`` ends.

        :param limit: bytes that the batch should not exceed; a single block may.
        :param until: a position of an earlier cut, beyond which not to go.
        :returns: the end of a commit if one lies within the limit; else, when the open transaction exceeds the
            limit, a place inside it; else ``after``.
        """
        if not self._blocks or self._blocks[-1].end <= after:
            self.seal()
        end, inside, size = after, after, 0
        for block in self._blocks:
            if block.end <= after:
                continue
            size += block.size
            if (size > limit and inside != after) or (until is not None and block.end > until):
                break
            inside = block.end
            if block.end.block == 0:
                end = block.end
        return inside if end == after and size >= limit else end

    def idle_position(self, after: Position) -> Position:
        """The position reached when everything with content has been passed; ``after`` otherwise."""
        idle = self._transaction is None and not self._messages and self._end <= after
        if idle and self.position > after.lsn:
            self._end = Position(self.position)  # what follows is counted from here
            return self._end
        return after

    def take(self, start: Position, end: Position) -> list[Piece]:
        """The pieces of the batch ``(start, end]``, in order."""
        return [block.piece for block in self._blocks if start < block.end <= end]

    def release(self, end: Position) -> None:
        """Forget blocks up to ``end``, which Spark has committed."""
        while self._blocks and self._blocks[0].end <= end:
            self.bytes -= self._blocks.popleft().size


class WalReader:
    """A thread that reads a slot into a :class:`Buffer`, and acknowledges when told to.

    :param dsn: libpq URI of the source.
    :param start: end LSN of the last transaction that is durable in the sink; named to the server.
    :param buffer_bytes: bytes of messages held at most (one block may come on top).
    :param boundary: see :class:`Buffer`.
    :raises ConnectionFailed: when the server cannot be reached.
    :raises StreamFailed: when it refuses to stream.
    """

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        start: int,
        *,
        block_bytes: int = 8 << 20,
        buffer_bytes: int = 128 << 20,
        boundary: int = 0,
    ) -> None:
        self._buffer = Buffer(Position(start), block_bytes, boundary)
        self._buffer_bytes = buffer_bytes
        self._changed = threading.Condition()
        self._acknowledged = 0
        self._ask_reply = False
        self._failure: Exception | None = None
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._connection: PGconn = _start_replication(dsn, slot, publication, start)
        self._status_interval = _status_interval(dsn)
        self._thread = threading.Thread(target=self._run, name="wal-reader", daemon=True)
        self._thread.start()

    def cut(self, after: Position, limit: int, until: Position | None = None) -> Position:
        """See :meth:`Buffer.cut`."""
        with self._changed:
            self._check()
            return self._buffer.cut(after, limit, until)

    def reach(self, lsn: int) -> Position:
        """Wait until the log has been read up to ``lsn`` or the buffer is full; return the last commit that came."""
        with self._changed:
            while self._buffer.position < lsn and self._buffer.bytes < self._buffer_bytes:
                self._await_log()
            return self._buffer.seal()

    def idle_position(self, after: Position) -> Position:
        """See :meth:`Buffer.idle_position`."""
        with self._changed:
            self._check()
            return self._buffer.idle_position(after)

    def take(self, start: Position, end: Position) -> list[Piece]:
        """See :meth:`Buffer.take`; waits until the log has been read up to ``end``."""
        with self._changed:
            while self._buffer.position < end.lsn:
                self._await_log()
            self._buffer.seal()
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
            self._read()
        except Exception as e:  # handed to the next caller, who runs in Spark's thread
            with self._changed:
                self._failure = e
                self._changed.notify_all()

    def _read(self) -> None:
        connection, socket = self._connection, self._connection.socket
        sent_at, sent = 0.0, 0
        while not self._closing:
            if self._acknowledged != sent or self._ask_reply or time.monotonic() - sent_at > self._status_interval:
                reply, self._ask_reply = self._ask_reply, False
                sent, sent_at = self._acknowledged, time.monotonic()
                self._send_status(sent, reply)
            full = self._buffer.bytes >= self._buffer_bytes
            if not full and self._receive():
                continue
            waiting = [self._wake_read] if full else [self._wake_read, socket]
            ready, _, _ = select.select(waiting, [], [], min(1.0, self._status_interval))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if socket in ready:
                connection.consume_input()

    def _receive(self) -> bool:
        """Move what libpq holds into the buffer; true if there may be more at once."""
        get = self._connection.get_copy_data
        with self._changed:
            add, keepalive = self._buffer.add, self._buffer.keepalive
            for _ in range(4096):
                length, data = get(1)
                if length == 0:
                    self._changed.notify_all()
                    return False
                if length < 0:
                    raise StreamFailed(*_ended(self._connection))
                message = bytes(data)
                if message[0] == 0x77:
                    add(message[_HEADER:])
                else:
                    wal_end, _, reply = struct.unpack_from(">qqB", message, 1)
                    keepalive(wal_end)
                    if reply:
                        self._send_status(self._acknowledged, False)
            self._changed.notify_all()
        return True

    def _send_status(self, flushed: int, ask_reply: bool) -> None:
        now = int(time.time() * 1e6) - _EPOCH_2000
        position = max(self._buffer.position, flushed)
        self._connection.put_copy_data(struct.pack(">cqqqqB", b"r", position, flushed, flushed, now, ask_reply))
        self._connection.flush()


def _start_replication(dsn: str, slot: str, publication: str, start: int) -> PGconn:
    connection: PGconn = pq.PGconn.connect(f"{session_dsn(dsn, f'airflow-cdc {slot}')}&replication=database".encode())
    if connection.status != pq.ConnStatus.OK:
        message = connection.error_message.decode(errors="replace").strip()
        raise ConnectionFailed(
            f"cannot open a replication connection to {describe(dsn)}: {message}",
            "Check that the server runs, that the role has REPLICATION, and that pg_hba.conf lets it in.",
        )
    name = '"' + publication.replace('"', '""') + '"'
    names = "'" + name.replace("'", "''") + "'"
    command = (
        f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(start)} '
        f"(proto_version '1', publication_names {names}, messages 'true')"
    )
    result = connection.exec_(command.encode())
    if result.status != pq.ExecStatus.COPY_BOTH:
        raise StreamFailed(*_ended(connection))
    connection.nonblocking = 1
    return connection


def _status_interval(dsn: str) -> float:
    """Seconds between unasked status messages: a third of what the server waits, at most ten."""
    with connected(dsn) as connection:
        timeout = scalar(connection, "SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return min(10.0, timeout / 3000) if timeout else 10.0


def _ended(connection: PGconn) -> tuple[str, str]:
    message = connection.error_message.decode(errors="replace").strip()
    return (
        f"the server ended the replication stream: {message or 'connection closed'}",
        "Start again: the stream goes on from the last commit. If it persists, look at the source's log.",
    )
