"""The amount of work that a source has for a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """An estimate of what is to be read.

    :param rows: rows to copy.
    :param bytes: bytes of tables to copy, or of the log to read.
    """

    rows: int
    bytes: int

    def __add__(self, other: Workload) -> Workload:
        return Workload(self.rows + other.rows, self.bytes + other.bytes)
