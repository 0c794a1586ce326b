"""The slot's disk budget: how much log the source may keep for a pipeline, and what happens beyond it.

A slot keeps what its pipeline has not applied, and a sink that is down for long fills the
source's disk. The job that follows the log looks at every heartbeat, and also while it
waits for a server.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias

from airflow_cdc_provider.engine.core.errors import SlotBudgetExceeded
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.postgres.slots import SlotState

Action: TypeAlias = Literal["warn", "stop", "drop-slot"]
Level: TypeAlias = Literal["ok", "warning", "exceeded"]

WARN_FRACTION = 0.8
_GRACE = 1.2
_SOLUTIONS = {
    "stop": "Find out what keeps the stream from applying the log (`airflow-cdc status`), make room on the source or"
    " raise stream.max_retained_wal, then start again.",
    "drop-slot": "The slot is dropped, as stream.on_max_retained_wal asks, so that the source can remove its log. When"
    " sink and pipeline work again, run `airflow-cdc resnapshot --all`, in Airflow the Dag cdc_resnapshot with"
    " Everything, then stream.",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """Bytes of log that the source may keep, and what is done beyond it.

    :param limit: bytes.
    """

    limit: int
    action: Action

    def level(self, retained: int) -> Level:
        """How the bytes that a slot retains stand to the limit."""
        if retained > self.limit:
            return "exceeded"
        return "warning" if retained > WARN_FRACTION * self.limit else "ok"

    def bound(self, at_start: int) -> int:
        """Where the action is taken, in bytes.

        :param at_start: what the slot retained at the job's first look: one that begins beyond the limit gets a fifth
            more than that, so that it can catch up.
        """
        return self.limit if at_start <= self.limit else int(_GRACE * at_start)


class BudgetWatch:
    """Holds a slot against its budget, look by look, for one job."""

    def __init__(self, budget: Budget, slot: str) -> None:
        self._budget = budget
        self._slot = slot
        self._bound: int | None = None
        self._level: Level = "ok"

    def look(self, state: SlotState) -> None:
        """Warn when the level rises.

        :raises SlotBudgetExceeded: when the budget's action is to be taken.
        """
        retained, budget = state.retained, self._budget
        if self._bound is None:
            self._bound = budget.bound(retained)
        if retained > self._bound and budget.action != "warn":
            to_catch_up = "" if self._bound == budget.limit else f" ({human_bytes(self._bound)} here, to catch up)"
            raise SlotBudgetExceeded(
                f"slot {self._slot!r} retains {human_bytes(retained)} of the source's log; stream.max_retained_wal is"
                f" {human_bytes(budget.limit)}{to_catch_up}",
                _SOLUTIONS[budget.action],
            )
        before, self._level = self._level, budget.level(retained)
        if self._level not in ("ok", before):
            _log.warning(
                "slot %r retains %s of the source's log, %.0f %% of stream.max_retained_wal (%s)",
                self._slot,
                human_bytes(retained),
                100 * retained / budget.limit,
                human_bytes(budget.limit),
            )
