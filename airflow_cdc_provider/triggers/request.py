"""Waits for a re-read of tables by another job, without a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.state.requests import Standing

LOOK_SECONDS = 2.0
GRACE_SECONDS = 10.0
"""Seconds without a living job after which a request counts as orphaned; a stream may just be restarting."""


class RequestTrigger(BaseTrigger):
    """A trigger that waits until a request has an outcome, or until its author must act.

    Its event has ``status``: ``ended``, ``free``, ``orphaned``, or ``timeout``; in the last case the request has been
    withdrawn. It is also withdrawn if the task is killed, cleared or marked in the meantime.

    :param state: URL of the pipeline's state.
    :param request: name of the request.
    :param deadline: time until which to wait, in seconds since 1970; ``None`` for no limit.
    """

    def __init__(self, state: str, request: str, deadline: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.request = request
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and the arguments."""
        kwargs = {"state": self.state, "request": self.request, "deadline": self.deadline}
        return f"{type(self).__module__}.{type(self).__qualname__}", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Check the state regularly.

        :raises StateUnwritable: if the state cannot be read for too long.
        """
        standings = await asyncio.to_thread(_standings)
        read_at = time.monotonic()
        orphaned_since: float | None = None
        said = None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                standing, waiting = await asyncio.to_thread(self._look)
            except StateUnwritable as e:
                if time.monotonic() - read_at > PATIENCE_SECONDS:
                    raise
                self.log.warning("The state cannot be read at the moment: %s", e.message)
                continue
            read_at = time.monotonic()
            if waiting is not None and waiting != said:
                self.log.info(waiting)
            said = waiting
            orphaned_since = (orphaned_since or time.monotonic()) if standing is standings.ORPHANED else None
            orphaned = orphaned_since is not None and time.monotonic() - orphaned_since >= GRACE_SECONDS
            if orphaned or standing in (standings.ENDED, standings.FREE):
                yield _event(standing)
                return
            if self.deadline is not None and time.time() >= self.deadline:
                await self.on_kill()
                yield _event("timeout", waiting)
                return

    def _look(self) -> tuple[Standing, str | None]:
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.requests import standing, waiting

        state = State(self.state)
        return standing(state, self.request), waiting(state, self.request)

    async def on_kill(self) -> None:
        """Withdraw the request."""
        await asyncio.to_thread(self._withdraw)

    def _withdraw(self) -> None:
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.requests import withdraw

        withdraw(State(self.state), self.request)


def _standings() -> type[Standing]:
    """Import and return the class; run in a thread, because the first import of the engine blocks for too long."""
    from airflow_cdc_provider.engine.state.requests import Standing

    return Standing


def _event(status: str, waiting: str | None = None) -> TriggerEvent:
    return TriggerEvent({"status": status, "waiting": waiting})  # type: ignore[no-untyped-call]
