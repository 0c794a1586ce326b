"""Counts what a stream has applied to each table: in total, and in the last minute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from airflow_cdc_provider.engine.core.table_operations import TableOperations

_BIN_SECONDS = 5
_BINS = 60 // _BIN_SECONDS
_NOTHING = TableOperations()


class TableActivity:
    """The changes applied to each table.

    The totals continue those in the heartbeat of the stream before. A stream that is killed loses the counts since its
    last heartbeat.
    """

    def __init__(self) -> None:
        self._totals: dict[str, TableOperations] = {}
        self._applied: dict[str, float] = {}
        self._recent: deque[tuple[int, dict[str, TableOperations]]] = deque()
        self._lock = threading.Lock()

    def resume(self, reported: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the totals of an earlier stream.

        :param reported: its :meth:`as_dict`.
        """
        for label, each in reported.items():
            self._totals[label] = TableOperations(each["inserts"], each["updates"], each["deletes"], each["changed_at"])
            self._applied[label] = each["applied_at"]

    def add(self, operations: Mapping[str, TableOperations]) -> None:
        """Add the changes of a unit that has just been committed, by table."""
        now, number = time.time(), int(time.monotonic() // _BIN_SECONDS)
        with self._lock:
            if not self._recent or self._recent[-1][0] != number:
                self._recent.append((number, {}))
            recent = self._recent[-1][1]
            for label, more in operations.items():
                self._totals[label] = self._totals.get(label, _NOTHING) + more
                recent[label] = recent.get(label, _NOTHING) + more
                self._applied[label] = now
            self._forget(number)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return for each table that has changed ``inserts``, ``updates`` and ``deletes`` in total.

        Also ``per_minute``, the same three in the last minute; and ``changed_at`` and ``applied_at``, the time of its
        last change by the source's clock and the time when the sink had it, in seconds since 1970.
        """
        with self._lock:
            self._forget(int(time.monotonic() // _BIN_SECONDS))
            minute: dict[str, TableOperations] = {}
            for _, recent in self._recent:
                for label, more in recent.items():
                    minute[label] = minute.get(label, _NOTHING) + more
            return {
                label: {
                    "inserts": total.inserts,
                    "updates": total.updates,
                    "deletes": total.deletes,
                    "per_minute": _three(minute.get(label, _NOTHING)),
                    "changed_at": round(total.changed_at, 3),
                    "applied_at": round(self._applied[label], 3),
                }
                for label, total in self._totals.items()
            }

    def _forget(self, number: int) -> None:
        while self._recent and self._recent[0][0] <= number - _BINS:
            self._recent.popleft()


def _three(operations: TableOperations) -> list[int]:
    return [operations.inserts, operations.updates, operations.deletes]
