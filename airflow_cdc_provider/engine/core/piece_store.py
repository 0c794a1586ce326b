"""Where pieces of the source's log are kept that are too large to pass through Spark."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class PieceStore(Protocol):
    """Keeps large pieces between the process that reads the log and the tasks that stage them. Picklable.

    Each sink is one, since all executors reach it. The reader of the log knows this part of a sink only.
    """

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Keep a piece. Runs in the process that reads the log.

        :param name: one that no other deposit has.
        :raises Fenced: when the epoch is another's.
        """

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """Return a piece. Runs on an executor, and again if its task is tried again.

        :param size: bytes that it must have.
        :raises Fenced: when the epoch is another's.
        :raises StagingLost: when it is gone.
        """

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """Remove pieces, all when ``None``; do nothing if the epoch is another's by now."""
