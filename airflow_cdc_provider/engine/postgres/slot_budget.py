"""The slot's disk budget: how much log the source may retain for a pipeline, and the action beyond that limit.

A slot retains the log that its pipeline has not applied, so a sink that is down for long fills the source's disk. The
job that follows the log checks the budget at every heartbeat, also while it waits for a server.
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
    "stop": "Find out with `airflow-cdc status` what keeps the stream from applying the log. Free space on the source,"
    " or raise stream.max_retained_wal, then start again.",
    "drop-slot": "The slot is dropped because of stream.on_max_retained_wal, so that the source can remove its log."
    " When sink and pipeline work again, run `airflow-cdc resnapshot --all` (in Airflow the Dag cdc_resnapshot with"
    " Everything), then stream.",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """The amount of log that the source may retain, and the action beyond it.

    :param limit: bytes of log.
    """

    limit: int
    action: Action

    def level(self, retained: int) -> Level:
        """Compare the bytes that a slot retains with the limit."""
        if retained > self.limit:
            return "exceeded"
        return "warning" if retained > WARN_FRACTION * self.limit else "ok"

    def bound(self, at_start: int) -> int:
        """Return the retained bytes beyond which the action is taken.

        :param at_start: bytes that the slot retained at the job's first check. If they exceed the limit, the bound is a
            fifth higher than they are, so that the job can catch up.
        """
        return self.limit if at_start <= self.limit else int(_GRACE * at_start)


class BudgetWatch:
    """Checks of a slot against its budget, for one job."""

    def __init__(self, budget: Budget, slot: str) -> None:
        self._budget = budget
        self._slot = slot
        self._bound: int | None = None
        self._level: Level = "ok"

    def look(self, state: SlotState) -> None:
        """Compare the slot's state with the budget, and warn when the level rises.

        :raises SlotBudgetExceeded: if the budget's action must be taken.
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
