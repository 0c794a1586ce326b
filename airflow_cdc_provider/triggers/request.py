"""Waiting for others to read tables again, without a worker."""

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
"""How long nobody must have lived before a request is taken back: a stream may just be starting again."""


class RequestTrigger(BaseTrigger):
    """Waits until a request has an outcome, or it is for its author to act.

    Its event has ``status``: ``ended``, ``free``, ``orphaned``, or ``timeout``, in which case the request has been
    withdrawn. A task that is killed, cleared or marked meanwhile withdraws it, too.

    :param state: URL of the pipeline's state.
    :param request: name of the request.
    :param deadline: seconds since 1970 until which to wait; ``None`` for no end.
    """

    def __init__(self, state: str, request: str, deadline: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.request = request
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Path and arguments."""
        kwargs = {"state": self.state, "request": self.request, "deadline": self.deadline}
        return f"{type(self).__module__}.{type(self).__qualname__}", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look at the state now and then.

        :raises StateUnwritable: when the state cannot be read for long.
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
    """In a thread: the first import of the engine takes longer than others who run in this process can wait."""
    from airflow_cdc_provider.engine.state.requests import Standing

    return Standing


def _event(status: str, waiting: str | None = None) -> TriggerEvent:
    return TriggerEvent({"status": status, "waiting": waiting})  # type: ignore[no-untyped-call]
