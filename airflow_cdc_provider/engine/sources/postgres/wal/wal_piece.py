"""A piece of the log: messages of whole transactions, or of a part of one, with the context at its beginning."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.row_changes import Bytes


@dataclass(frozen=True)
class OpenTransaction:
    """The transaction that a piece begins inside of, as in :class:`Changes`; ``seq`` is that of its last row change."""

    xid: int
    commit_lsn: Lsn
    commit_ts: int
    seq: int


@dataclass(frozen=True)
class Piece:
    """A run of messages with the context needed to decode it alone.

    :param data: message bodies one behind the other, without the XLogData headers.
    :param lengths: the length of each, as little-endian 32-bit integers.
    :param relations: the Relation messages in force at the start; of several for an oid the last counts.
    :param transaction: the transaction in progress at the start; ``None`` outside of one.
    """

    data: Bytes = field(repr=False)
    lengths: Bytes = field(repr=False)
    relations: tuple[bytes, ...]
    transaction: OpenTransaction | None

    @property
    def size(self) -> int:
        """Return the bytes of all messages, also if ``data`` is deposited elsewhere."""
        return int(np.frombuffer(self.lengths, "<i4").sum(dtype=np.int64))

    def parts(self) -> Sequence[Bytes]:
        """Pack the piece for shipping in several parts; joined, they are :meth:`to_bytes`."""
        t = self.transaction
        opened = struct.pack("<Iqqq", t.xid, t.commit_lsn, t.commit_ts, t.seq) if t else b""
        parts = [opened, self.lengths, self.data, *self.relations]
        return [struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)), *parts]

    def to_bytes(self) -> bytes:
        """Pack the piece for shipping; :meth:`from_bytes` is the inverse."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, packed: Bytes) -> Piece:
        """Unpack what :meth:`to_bytes` returned, without a copy of the messages.

        :raises ProtocolError: when ``packed`` is something else or incomplete.
        """
        try:
            (count,) = struct.unpack_from("<I", packed)
            edges = list(accumulate(struct.unpack_from(f"<{count}Q", packed, 4), initial=4 + 8 * count))
            view = memoryview(packed)
            opened, lengths, data, *relations = (view[start:end] for start, end in pairwise(edges))
            transaction = OpenTransaction(*struct.unpack("<Iqqq", opened)) if opened else None
            if edges[-1] != len(packed):
                raise ValueError(f"it should have {edges[-1]}")
        except (struct.error, ValueError) as error:
            solution = "Let driver and executors run the same version of airflow-cdc-provider."
            raise ProtocolError(f"not a packed piece, {len(packed)} bytes: {error}", solution) from None
        return cls(data, lengths, tuple(map(bytes, relations)), transaction)
