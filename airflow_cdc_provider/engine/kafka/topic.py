"""A topic of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A topic that exists.

    :param id: an id that no earlier topic of this name had.
    """

    name: str
    id: str
    partitions: int

    @property
    def beginning(self) -> dict[int, int]:
        """Return offsets before all messages, by partition."""
        return dict.fromkeys(range(self.partitions), 0)
