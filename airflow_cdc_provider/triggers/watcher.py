"""The trigger of an asset watcher: a slot has advanced, so new data is in the sink.

::

    applied = Asset(
        "shop",
        watchers=[AssetWatcher(name="slot", trigger=SlotProgressTrigger(pipeline="/opt/airflow/pipelines/shop.yaml"))],
    )
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Literal

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_cdc_provider.triggers.readers import WatchedSlot
from airflow_cdc_provider.triggers.slots import slots_of

SlotPosition = Literal["confirmed_flush_lsn", "restart_lsn"]

_TOLD = ("restart_lsn", "confirmed_flush_lsn", "retained_bytes")


class SlotProgressTrigger(BaseEventTrigger):
    """A trigger that updates an asset each time a slot has advanced; data below ``confirmed_flush_lsn`` is in the sink.

    The event's payload has ``slot``, ``restart_lsn`` and ``confirmed_flush_lsn`` as text, and ``retained_bytes``. The
    last position is stored with the asset, so that a restart of the triggerer neither repeats nor misses an event. The
    trigger waits for a missing slot or server; use the sensors and the slot guard to be notified of such problems.

    :param pipeline: path of a pipeline file, whose slot is watched.
    :param conn_id: without a pipeline, a connection of type ``postgres_cdc`` or ``postgres``.
    :param slot: without a pipeline, the slot's name.
    :param position: the position of the slot that must advance.
    :param interval: minimum number of seconds between two events.
    """

    def __init__(
        self,
        *,
        pipeline: str | None = None,
        conn_id: str | None = None,
        slot: str | None = None,
        position: SlotPosition = "confirmed_flush_lsn",
        interval: float = 60.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if (pipeline is None) == (conn_id is None) or (conn_id is None) != (slot is None):
            raise ValueError("give either pipeline, or conn_id and slot")
        self.pipeline = pipeline
        self.conn_id = conn_id
        self.slot = slot
        self.position = position
        self.interval = interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and the arguments."""
        names = ("pipeline", "conn_id", "slot", "position", "interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event each time the slot has advanced, without end."""
        last = await self._recall()
        async with aclosing(self._looks()) as looks:
            async for seen in looks:
                position = seen[self.position]
                if position == last:
                    continue
                if last is not None:
                    yield TriggerEvent(seen)  # type: ignore[no-untyped-call]
                last = position
                await self._remember(position)
                await asyncio.sleep(self.interval)

    async def _looks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the slot's state after each query, through outages of its server."""
        from airflow_cdc_provider.engine.core.errors import CdcError

        shared = True
        while True:
            try:
                target = await asyncio.to_thread(WatchedSlot.resolve, self.pipeline, self.conn_id, self.slot)
                async with slots_of(target, self.interval, shared) as slots:
                    while True:
                        state = (await slots.next()).states.get(target.slot)
                        if state is None or state.lost:
                            self.log.error("Slot %s %s.", target.slot, "is lost" if state else "does not exist")
                            await asyncio.sleep(self.interval)
                        else:
                            values = state.as_dict()
                            yield {"slot": target.slot} | {name: values[name] for name in _TOLD}
            except CdcError as e:
                if shared:
                    shared = False
                    continue
                self.log.warning("%s. %s", e.message, e.solution)
                await asyncio.sleep(self.interval)

    async def _recall(self) -> str | None:
        """Return the last reported position; ``None`` if two assets share the trigger, as the store cannot do that."""
        if self.asset_state_store is None:
            return None
        with suppress(ValueError):
            kept = await self.asset_state_store.aget(self.position)
            return None if kept is None else str(kept)
        return None

    async def _remember(self, position: str) -> None:
        if self.asset_state_store is not None:
            with suppress(ValueError):
                await self.asset_state_store.aset(self.position, position)
