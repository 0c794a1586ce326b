"""The identity of the store that a pipeline reads, so that a sink can refuse to write into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SourceIdentity:
    """A store that is read, and the names in it that are read.

    :param store: kind and identifier of the server or cluster, such as ``postgres 7301…`` or ``kafka abc…``.
    :param reads: returns whether a name of the store is read: a database of a Postgres server, a topic of a Kafka
        cluster.
    """

    store: str
    reads: Callable[[str], bool]

    def holds(self, store: str, name: str) -> bool:
        """Return whether the source reads ``name`` of ``store``."""
        return store == self.store and self.reads(name)
