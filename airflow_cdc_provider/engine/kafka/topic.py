"""A topic of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A topic that is there.

    :param id: one that no topic of this name had before.
    """

    name: str
    id: str
    partitions: int

    @property
    def beginning(self) -> dict[int, int]:
        """Offsets before all messages, by partition."""
        return dict.fromkeys(range(self.partitions), 0)
