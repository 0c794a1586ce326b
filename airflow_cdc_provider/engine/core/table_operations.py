"""Counts of the inserts, updates and deletes of a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TableOperations:
    """The changes of a table in a part of the source's log.

    :param inserts, updates, deletes: numbers of row changes, before filter and collapse.
    :param changed_at: commit time of the last of the changes by the source's clock, in seconds since 1970.
    """

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    changed_at: float = 0.0

    @classmethod
    def of(cls, op: NDArray[np.uint8], commit_ts: NDArray[np.int64]) -> TableOperations:
        """Count changes in the order of the log.

        :param op: ``i``, ``u``, ``d`` or ``t``, as byte values; truncates are no row changes.
        :param commit_ts: microseconds since 1970.
        """
        inserts, updates, deletes = (int(np.count_nonzero(op == ord(letter))) for letter in "iud")
        return cls(inserts, updates, deletes, int(commit_ts[-1]) / 1e6 if len(commit_ts) else 0.0)

    def __add__(self, later: TableOperations) -> TableOperations:
        return TableOperations(
            self.inserts + later.inserts,
            self.updates + later.updates,
            self.deletes + later.deletes,
            max(self.changed_at, later.changed_at),
        )
