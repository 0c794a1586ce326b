"""Measures how far a job is behind the source's log, from its own progress and its last observation of the slot."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition, format_lsn

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.postgres.slots import SlotState


_FRESH_SECONDS = 3.0  # an idle reader of the log reports that every second
_LOOKS = 512


class Lag:
    """A comparison of a job's progress with the slot's state, which is observed at every heartbeat of the stream.

    :param applied: LSN that is durable in the sink.
    :param advanced: time when the sink reached it, in seconds since 1970.
    """

    def __init__(self, applied: LogPosition = LOG_START, advanced: float = 0.0) -> None:
        self._applied = self._passed = applied
        self._advanced = advanced
        self._slot: SlotState | None = None
        self._acknowledged: float | None = None
        self._waiting: deque[tuple[float, LogPosition]] = deque()  # observed ends of the log that have not been passed
        self._idle_at = 0.0
        self._lock = threading.Lock()

    def advance(self, applied: LogPosition) -> None:
        """Record that the sink has advanced."""
        if applied > self._applied:
            self._applied = applied
            self._pass(applied)

    def idle(self, passed: LogPosition) -> None:
        """Record that the reader of the log has found nothing to apply.

        :param passed: LSN up to which it has read.
        """
        self._pass(passed)
        self._idle_at = time.time()

    def _pass(self, lsn: LogPosition) -> None:
        with self._lock:
            self._passed = max(self._passed, lsn)
            while self._waiting and self._waiting[0][1] <= self._passed:
                self._waiting.popleft()

    def observe_slot(self, slot: SlotState) -> None:
        """Record the slot's state as just observed."""
        now = time.time()
        if self._slot is None or slot.confirmed_flush_lsn > self._slot.confirmed_flush_lsn:
            self._acknowledged = now
        with self._lock:
            if slot.end > self._passed:
                self._waiting.append((self._advanced if self._slot is None else now, slot.end))
            if len(self._waiting) > _LOOKS:
                self._waiting = deque([*self._waiting][::2])
        self._slot = slot

    def _seconds(self, now: float) -> float:
        """Return the seconds for which there has been something to apply, according to the observations."""
        with self._lock:
            # A single observation that the reader, idle until just now, may simply not have reached yet.
            unheard = len(self._waiting) == 1 and now - self._idle_at < _FRESH_SECONDS
            if not self._waiting or unheard:
                return 0.0
            return round(max(0.0, now - self._waiting[0][0]), 3)

    def as_dict(self) -> dict[str, Any]:
        """Return the part of a job's progress that describes its position in the log.

        ``lag_bytes`` is the distance, at the last observation, from the position up to which nothing is left to apply
        to the end of the log. ``lag_seconds`` is the time for which there has been something to apply.
        ``acknowledgement_seconds`` is the time since the slot was first seen at its position. They are ``None`` if the
        slot has not been observed yet.
        """
        slot, now = self._slot, time.time()
        return {
            "applied_lsn": format_lsn(self._applied),
            "lag_bytes": None if slot is None else max(slot.end - self._passed, 0),
            "lag_seconds": None if slot is None else self._seconds(now),
            "slot": None if slot is None else slot.as_dict(),
            "acknowledgement_seconds": None if self._acknowledged is None else round(now - self._acknowledged, 3),
        }
