"""How far a job is behind the source's log, by what it has itself applied and last seen of the slot."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.lsn import format_lsn

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.slot import SlotState


def behind(applied: int, advanced: float, end: int, now: float) -> tuple[int, float]:
    """Bytes from the applied LSN to the end of the source's log, and seconds since it last advanced while behind.

    :param applied: LSN durable in the sink.
    :param advanced: when the sink got there, in seconds since 1970.
    :param end: of the source's log.
    :param now: seconds since 1970.
    """
    size = max(end - applied, 0)
    return size, round(max(0.0, now - advanced), 3) if size else 0.0


class Lag:
    """What a job applies, held against what it sees of the slot: a look now and then, at every heartbeat of the stream.

    :param applied: LSN durable in the sink.
    :param advanced: when the sink got there, in seconds since 1970.
    """

    def __init__(self, applied: int = 0, advanced: float = 0.0) -> None:
        self._applied = applied
        self._advanced = advanced
        self._slot: SlotState | None = None
        self._acknowledged: float | None = None

    def advance(self, applied: int) -> None:
        """The sink has got further."""
        if applied > self._applied:
            self._applied, self._advanced = applied, time.time()

    def see(self, slot: SlotState) -> None:
        """Take note of a look at the slot."""
        if self._slot is None or slot.confirmed_flush_lsn > self._slot.confirmed_flush_lsn:
            self._acknowledged = time.time()
        self._slot = slot

    def as_dict(self) -> dict[str, Any]:
        """The part of a job's progress that tells where it is in the log.

        ``lag_bytes`` is what lay between the applied LSN and the end of the log at the last look, ``lag_seconds`` how
        long the sink has not advanced while there is such a lag, ``acknowledgement_seconds`` how long ago the slot was
        first seen where it is. Without a look they are ``None``.
        """
        slot, now = self._slot, time.time()
        size, seconds = (None, None) if slot is None else behind(self._applied, self._advanced, slot.end, now)
        return {
            "applied_lsn": format_lsn(self._applied),
            "lag_bytes": size,
            "lag_seconds": seconds,
            "slot": None if slot is None else slot.as_dict(),
            "acknowledgement_seconds": None if self._acknowledged is None else round(now - self._acknowledged, 3),
        }
