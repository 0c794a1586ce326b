"""Moves the messages of a replication connection into the buffer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter

from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import EPOCH_2000, Buffer, malformed

_CHANGE, _KEEPALIVE = b"wk"
_HEADER, _KEEPALIVE_BYTES = 25, 18  # of XLogData: kind, start, end, time; of a keepalive: kind, end, time, reply
_SENT_AT = struct.Struct(">17xq")  # in the header of XLogData
_BODY = itemgetter(slice(_HEADER, None))
_GULP = 4096  # messages at most, before it is time to think of status messages again


def fill_buffer(get: Callable[[int], tuple[int, memoryview]], buffer: Buffer, room: int) -> tuple[int, bool]:
    """Move messages into a buffer until there are no more, or enough have come.

    :param get: see :meth:`PGconn.get_copy_data`.
    :param room: bytes to move at most; the last message may exceed them.
    :returns: the length that the last ``get`` has returned; whether the server asks for an answer.
    :raises ProtocolError: when a message is neither a change nor a keepalive.
    """
    changes: list[memoryview] = []
    length, asked = 1, False
    for _ in range(_GULP):
        if room <= 0:
            break
        length, message = get(1)
        if length > _HEADER and message[0] == _CHANGE:
            changes.append(message)
            room -= length
        elif length >= _KEEPALIVE_BYTES and message[0] == _KEEPALIVE:
            _extend(buffer, changes)
            changes = []
            wal_end, _, reply = struct.unpack_from(">qqB", message, 1)
            buffer.keepalive(wal_end)
            asked |= bool(reply)
        elif length > 0:
            raise malformed(message)
        else:
            break
    _extend(buffer, changes)
    return length, asked


def _extend(buffer: Buffer, changes: Sequence[memoryview]) -> None:
    buffer.extend(list(map(_BODY, changes)))
    if changes:
        (sent_at,) = _SENT_AT.unpack_from(changes[-1])
        buffer.sent_at = sent_at + EPOCH_2000
