"""How far a job is behind the source's log, by what it has itself applied and last seen of the slot."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition, format_lsn

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.postgres.slots import SlotState


_FRESH_SECONDS = 3.0  # the reader of the log says every second that it has nothing
_LOOKS = 512


class Lag:
    """What a job applies, held against what it sees of the slot: a look now and then, at every heartbeat of the stream.

    :param applied: LSN durable in the sink.
    :param advanced: when the sink got there, in seconds since 1970.
    """

    def __init__(self, applied: LogPosition = LOG_START, advanced: float = 0.0) -> None:
        self._applied = self._passed = applied
        self._advanced = advanced
        self._slot: SlotState | None = None
        self._acknowledged: float | None = None
        self._waiting: deque[tuple[float, LogPosition]] = deque()  # looks whose end of the log has not been passed
        self._idle_at = 0.0
        self._lock = threading.Lock()

    def advance(self, applied: LogPosition) -> None:
        """Take note that the sink has got further."""
        if applied > self._applied:
            self._applied = applied
            self._pass(applied)

    def idle(self, passed: LogPosition) -> None:
        """Take note that the reader of the log has nothing to apply, in all that it has read.

        :param passed: LSN up to which it has read.
        """
        self._pass(passed)
        self._idle_at = time.time()

    def _pass(self, lsn: LogPosition) -> None:
        with self._lock:
            self._passed = max(self._passed, lsn)
            while self._waiting and self._waiting[0][1] <= self._passed:
                self._waiting.popleft()

    def see(self, slot: SlotState) -> None:
        """Take note of a look at the slot."""
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
        """How long there has been something to apply, as far as looks tell."""
        with self._lock:
            unheard = len(self._waiting) == 1 and now - self._idle_at < _FRESH_SECONDS  # more than it may have to read
            if not self._waiting or unheard:
                return 0.0
            return round(max(0.0, now - self._waiting[0][0]), 3)

    def as_dict(self) -> dict[str, Any]:
        """Return the part of a job's progress that tells where it is in the log.

        ``lag_bytes`` is what lay at the last look between the end of the log and where nothing is left to apply,
        ``lag_seconds`` for how long there has been something to apply, ``acknowledgement_seconds`` how long ago the
        slot was first seen where it is. Without a look they are ``None``.
        """
        slot, now = self._slot, time.time()
        return {
            "applied_lsn": format_lsn(self._applied),
            "lag_bytes": None if slot is None else max(slot.end - self._passed, 0),
            "lag_seconds": None if slot is None else self._seconds(now),
            "slot": None if slot is None else slot.as_dict(),
            "acknowledgement_seconds": None if self._acknowledged is None else round(now - self._acknowledged, 3),
        }
