"""Reads the fields of many messages at once from their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.row_changes import Bytes, Flags, Ints, Octets
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece

NULL, UNCHANGED, TEXT = b"nut"
OPTIONS = "Start replication with proto_version '1' and without the options binary, streaming and two_phase."
REPORT = "Start the stream again from its last commit; if that fails too, report it with the server's version."
# Least bytes of a message, by its kind; zero for kinds that protocol version 1 does not have.
_LEAST = np.zeros(256, np.int64)
_LEAST[list(b"BCORYIUDTM")] = 21, 26, 10, 10, 7, 8, 8, 8, 6, 15


def gather(data: Bytes, dtype: str, at: Ints) -> NDArray[Any]:
    """Gather numbers as :meth:`Wire.read`."""
    # A view of the numbers at all positions, overlapping and unaligned: one indexing instead of one for each octet.
    size = np.dtype(dtype).itemsize
    window = np.ndarray((max(len(data) - size + 1, 0),), dtype, data, strides=(1,))
    if not len(at) or at[-1] < len(window):
        return window[at]
    rest = bytes(data[len(window) :]) + bytes(size)
    tail = np.ndarray((len(rest) - size + 1,), dtype, rest, strides=(1,))
    inside = np.searchsorted(at, len(window))
    found = np.empty(len(at), dtype)
    found[:inside] = window[at[:inside]]
    found[inside:] = tail[np.minimum(at[inside:] - len(window), len(tail) - 1)]
    return found


def refuse(bad: Flags, describe: Callable[[int], str], solution: str = REPORT) -> None:
    """Raise an error for the first ``bad`` entry, if there is any.

    :raises ProtocolError: with its description.
    """
    if bad.any():
        raise ProtocolError(describe(int(bad.argmax())), solution)


def octet(eights: NDArray[np.uint64], i: int) -> Octets:
    """Return byte ``i`` of each number that :meth:`Wire.read` has gathered."""
    return np.ascontiguousarray(eights.view(np.uint8)[i::8])


def int32(eights: NDArray[np.uint64], i: int) -> Ints:
    """Return the 32-bit integer that begins at byte ``i`` of each number that :meth:`Wire.read` has gathered."""
    return eights.astype(np.int64) << 8 * i >> 32


@dataclass(frozen=True, eq=False)
class Wire:
    """The bytes of a piece and the places of its messages: arrays with one entry for each message.

    :param head: the first eight bytes of each; in a row change its kind, the relation's oid, and the kind of tuple.
    """

    data: Bytes
    start: Ints
    length: Ints
    head: NDArray[np.uint64]
    kind: Octets

    @classmethod
    def of(cls, piece: Piece) -> Wire:
        data, length = piece.data, np.frombuffer(piece.lengths, "<i4").astype(np.int64)
        refuse(length < 1, lambda i: f"message {i} of the piece has {length[i]} bytes")
        if length.sum() != len(data):
            raise ProtocolError(f"the messages of a piece have {length.sum()} bytes, its data {len(data)}", REPORT)
        start = np.cumsum(length) - length
        head = gather(data, ">u8", start)
        wire = cls(data, start, length, head, octet(head, 0))
        least = _LEAST[wire.kind]
        refuse(least == 0, lambda i: f"{wire.name(i)} is of a kind that protocol version 1 does not have", OPTIONS)
        refuse(length < least, lambda i: f"{wire.name(i)} is cut short: its kind has {least[i]} bytes or more")
        return wire

    def read(self, dtype: str, at: Ints) -> NDArray[Any]:
        """Gather the numbers that begin at ``at``, which ascends; they are zero beyond the end, which callers check.

        Finding the bytes takes longer than moving them, so neighboring fields are read as one number of eight bytes.
        """
        return gather(self.data, dtype, at)

    def name(self, i: int) -> str:
        return f"message {i} of the piece (kind {chr(self.kind[i])!r}, {self.length[i]} bytes)"
