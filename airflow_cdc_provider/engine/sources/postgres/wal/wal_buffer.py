"""Buffers the log between the connection and Spark: raw messages, cut into blocks that end at commits.

Pure logic, no I/O. Messages are kept as they came. Only what decides where a batch may end is looked at: begins,
commits, relations, and whether a transaction has any content at all.
"""

from __future__ import annotations

import dataclasses
import io
import re
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.postgres.slots import MESSAGE_PREFIX
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece

EPOCH_2000 = 946_684_800_000_000
"""Postgres counts microseconds from 2000; this is 2000 in microseconds since 1970."""


_BEGIN, _COMMIT, _RELATION, _MESSAGE, _TRUNCATE, _ORIGIN = b"BCRMTO"
_ROWS = frozenset(b"IUD")
# Shorter runs of rows are not faster to add at once.
_RUN, _TAG = re.compile(rb"[IUD]{8,}"), itemgetter(0)
# A commit record lists subtransactions, dropped files and invalidations; its size is limited to a gigabyte.
_LONGEST_COMMIT = 1 << 31
_MARKER = MESSAGE_PREFIX.encode() + b"\0"
_NEVER = 1 << 62  # later than any time
_MAX_HELD_BYTES = 1 << 20  # bytes behind a piece in the same memory that the piece may keep alive


@dataclass(frozen=True, order=True)
class Position:
    """A place in the stream at which a batch may end.

    :param lsn: end LSN of a commit, or the position of a keepalive.
    :param block: 0 between transactions; inside of one, the number of blocks of the open transaction after ``lsn``
        that have been passed.
    """

    lsn: Lsn
    block: int = 0

    @classmethod
    def from_json(cls, offset: dict[str, str | int]) -> Position:
        return cls(parse_lsn(str(offset["lsn"])), int(offset["block"]))

    def to_json(self) -> dict[str, str | int]:
        return {"lsn": format_lsn(self.lsn), "block": self.block}


@dataclass(frozen=True)
class Block:
    """A sealed run of messages that ends at ``end``.

    :param committed_at: commit time of the oldest transaction with content that ends in it, in microseconds since
        1970; :data:`_NEVER` if none ends in it, or none has a time of this server.
    """

    piece: Piece
    end: Position
    committed_at: int

    @property
    def size(self) -> int:
        return len(self.piece.data)


@dataclass(frozen=True)
class _Mark:
    """A place between two messages of the growing block: the number of messages before it, and their bytes."""

    messages: int
    size: int


class Buffer:
    """Messages between the connection and Spark; no I/O, not thread-safe.

    :param start: position after which messages come.
    :param block_bytes: size at which a block is sealed.
    :ivar sent_at: when the server sent the last message, in microseconds since 1970 by its clock, not ours.
    """

    def __init__(self, start: Position, block_bytes: int) -> None:
        self.position = start.lsn
        self.bytes = 0
        self.sent_at = self._commits_at = 0
        self._blocks: deque[Block] = deque()
        self._block_bytes = block_bytes
        self._end = start
        # Replaced, never modified, so that a reference to it is a snapshot.
        self._relations: dict[int, bytes] = {}
        self._transaction: OpenTransaction | None = None
        self._rows = 0
        self._content = False
        self._restart(b"", [], self._relations, None)

    def _restart(
        self,
        rest: bytes | memoryview,
        lengths: list[int],
        relations: dict[int, bytes],
        transaction: OpenTransaction | None,
    ) -> None:
        """Begin a block with messages that were not sealed, and with the context that they need."""
        self._data = io.BytesIO()
        self._data.write(rest)
        self._lengths = lengths
        self._size = len(rest)
        self._context = (tuple(relations.values()), transaction)
        self._begin = _Mark(0, 0)
        self._committed: _Mark | None = None
        self._committed_at = _NEVER
        self._committed_lsn = LOG_START
        self._committed_relations = relations

    def extend(self, messages: Sequence[bytes | memoryview]) -> None:
        """Add messages as :meth:`add` does, but a run of rows at once; no message may be empty.

        :raises ProtocolError: also when one is cut short.
        """
        done = 0
        for run in _RUN.finditer(bytes(map(_TAG, messages))):
            self._add_each(messages[done : run.start()])
            self._add_rows(messages[run.start() : run.end()])
            done = run.end()
        self._add_each(messages[done:])

    def _add_each(self, messages: Sequence[bytes | memoryview]) -> None:
        for message in messages:
            try:
                self.add(message)
            except struct.error:
                raise malformed(message) from None

    def _add_rows(self, messages: Sequence[bytes | memoryview]) -> None:
        lengths = list(map(len, messages))
        size = sum(lengths)
        if self._size + size >= self._block_bytes:  # a block ends somewhere among them
            self._add_each(messages)
            return
        self._data.write(b"".join(messages))
        self._lengths += lengths
        self._size += size
        self.bytes += size
        self._content = True
        self._rows += len(messages)

    def add(self, message: bytes | memoryview) -> None:
        """Add a copy of one pgoutput message, without the header of XLogData.

        :raises ProtocolError: when a commit ends another transaction than has begun. Other damage is found when
            the message is decoded, but positions are acknowledged, so they must be right here.
        :raises struct.error: when the message is cut short.
        """
        tag = message[0]
        if tag == _MESSAGE and message[10 : 10 + len(_MARKER)] != _MARKER:
            return  # from another application; it may come between transactions
        size = len(message)
        if self._committed is not None and self._size + size >= self._block_bytes:
            self._seal_committed()  # now, since whatever follows the commit would have to be moved
        self._data.write(message)
        self._lengths.append(size)
        self._size += size
        self.bytes += size
        if tag in _ROWS:
            self._content = True
            self._rows += 1
        elif tag == _BEGIN:
            lsn, timestamp, xid = struct.unpack_from(">qqI", message, 1)
            self._commits_at = timestamp + EPOCH_2000
            self._transaction = OpenTransaction(xid, lsn, self._commits_at, 0)
            self._rows = 0
            self._content = False
            self._begin = _Mark(len(self._lengths) - 1, self._size - size)
        elif tag == _ORIGIN:
            self._commits_at = _NEVER  # the time is that of the server from which the transaction was replicated
        elif tag == _COMMIT:
            self._commit(*struct.unpack_from(">qq", message, 2))
            return
        elif tag == _RELATION:
            (oid,) = struct.unpack_from(">I", message, 1)
            self._relations = {**self._relations, oid: bytes(message)}
            self._content = True
        elif tag == _TRUNCATE:
            self._content = True
            self._rows += struct.unpack_from(">I", message, 1)[0]
        elif tag == _MESSAGE:
            self._content = True
        if self._size >= self._block_bytes:
            self._seal_open()

    def _commit(self, lsn: Lsn, end_lsn: Lsn) -> None:
        begun = self._transaction.commit_lsn if self._transaction is not None else None
        if lsn != begun or not 0 < end_lsn - lsn < _LONGEST_COMMIT:
            raise ProtocolError(
                f"unexpected commit at {format_lsn(lsn)} that ends at {format_lsn(end_lsn)}, because "
                + (f"one at {format_lsn(begun)} was to come" if begun is not None else "no transaction has begun"),
                "Start the stream again from its last commit; if that fails too, report it with the server's version.",
            )
        in_parts = self._context[1] is not None and self._committed is None
        self._transaction = None
        self.position = end_lsn
        if not self._content and not in_parts:
            self._forget_transaction()
            return
        self._committed_at = min(self._committed_at, self._commits_at)
        self._committed = _Mark(len(self._lengths), self._size)
        self._committed_lsn = end_lsn
        self._committed_relations = self._relations
        # The last part of a transaction that was sealed in parts is a block alone, so that its parts end one batch.
        if in_parts or self._size >= self._block_bytes:
            self._seal_committed()

    def _forget_transaction(self) -> None:
        """Drop a transaction without content: only the position moves."""
        self.bytes -= self._size - self._begin.size
        del self._lengths[self._begin.messages :]
        self._size = self._begin.size
        self._data.seek(self._size)
        self._data.truncate()

    def keepalive(self, wal_end: Lsn) -> None:
        """Take a keepalive: between transactions, everything before its position has been received."""
        if self._transaction is None:
            self.position = max(self.position, wal_end)

    def age(self, after: Position) -> float:
        """Return the seconds between the oldest commit behind a position and the last message from the server.

        Zero if there is none with content, or only such as were replicated to the server, whose times are by another
        clock.
        """
        return max(0, self.sent_at - min(self._times(after), default=_NEVER)) / 1e6

    def holds(self, after: Position) -> bool:
        """Return whether a whole transaction with content has come behind a position."""
        return any(True for _ in self._times(after))

    def _times(self, after: Position) -> Iterator[int]:
        """Yield the commit times of whole transactions with content behind a position, the oldest of each block."""
        for block in self._blocks:
            if block.end > after and not block.end.block:
                yield block.committed_at
        if self._committed is not None:
            yield self._committed_at

    def seal(self) -> Position:
        """Make a block of the whole transactions so far; return the end of the last block."""
        self._seal_committed()
        return self._end

    def _seal_committed(self) -> None:
        if self._committed is not None:
            # The rest, if any, begins with BEGIN.
            rest = self._append(self._committed, Position(self._committed_lsn))
            self._restart(rest, self._lengths[self._committed.messages :], self._committed_relations, None)

    def _seal_open(self) -> None:
        self._append(_Mark(len(self._lengths), self._size), Position(self._end.lsn, self._end.block + 1))
        transaction = self._transaction and dataclasses.replace(self._transaction, seq=self._rows)
        self._restart(b"", [], self._relations, transaction)

    def _append(self, until: _Mark, end: Position) -> memoryview:
        """Append a block of the messages before a mark, and return the bytes of the others."""
        data = self._data.getvalue()  # no copy, as nothing more is written
        view = memoryview(data)
        piece = data if until.size == len(data) else view[: until.size]
        if len(data) - until.size > _MAX_HELD_BYTES:
            piece = bytes(piece)
        lengths = np.array(self._lengths[: until.messages], dtype="<i4").tobytes()
        self._blocks.append(Block(Piece(piece, lengths, *self._context), end, self._committed_at))
        self._end = end
        return view[until.size :]

    def cut(self, after: Position, limit: int) -> Position:
        """Choose where the batch that begins at ``after`` ends.

        :param limit: bytes that the batch should not exceed; a single block may.
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
            if size > limit and inside != after:
                break
            inside = block.end
            if block.end.block == 0:
                end = block.end
        return inside if end == after and size >= limit else end

    def idle_position(self, after: Position) -> Position:
        """Return the position reached if everything with content has been passed, else ``after``."""
        if (self.passed(after) or 0) > after.lsn:
            self._end = Position(self.position)  # later blocks are counted from here
            return self._end
        return after

    def passed(self, after: Position) -> Lsn | None:
        """Return the LSN up to which nothing with content follows ``after``; ``None`` when something does."""
        idle = self._transaction is None and not self._lengths and self._end <= after
        return max(self.position, after.lsn) if idle else None

    def take(self, start: Position, end: Position) -> list[Piece]:
        """Return the pieces of the batch ``(start, end]``, in order."""
        return [block.piece for block in self._blocks if start < block.end <= end]

    def release(self, end: Position) -> None:
        """Forget blocks up to ``end``, which Spark has committed."""
        while self._blocks and self._blocks[0].end <= end:
            self.bytes -= self._blocks.popleft().size


def malformed(message: bytes | memoryview) -> ProtocolError:
    """Return the error for bytes that are not a message."""
    return ProtocolError(
        f"a message of {len(message)} bytes, {bytes(message[:60])!r}, is not what the protocol allows",
        "Start the stream again; it goes on from the last commit.",
    )
