"""The trigger of the asset watcher of a table or a view: a running stream has changed it.

A task can add events to an asset only when it ends, and a stream may run for months. Therefore the triggerer reads the
reports of the stream, which the stream writes every few seconds. See :func:`.table_asset` and :func:`.view_asset`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_cdc_provider.engine.core.typed_json import as_shape

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.state.heartbeat import Heartbeat

_KEY = "seen"


@dataclass(frozen=True)
class Seen:
    """The last report of a stream on a table or a view.

    :param job: identifies the process of the stream; empty for a view, whose marks are the same for all processes.
    :param mark: a value that differs after a change, as long as the same job runs.
    :param applied_lsn: the position up to which the table or the view has all changes.
    :param ended: whether the job has ended in an orderly way, so that this is its last report.
    """

    job: str = ""
    mark: list[list[Any]] = field(default_factory=list)
    applied_lsn: str = ""
    ended: bool = True

    @classmethod
    def of(cls, beat: Heartbeat | None, table: str | None, view: str | None) -> Seen | None:
        """Return what a heartbeat reports; ``None`` if it reports nothing on the table or the view."""
        from airflow_cdc_provider.engine.core.lsn import parse_lsn

        if beat is None or not beat.progress.get("applied_lsn"):
            return None
        if view is None:
            changes = beat.progress.get("tables", {}).get(table, 0)
            return cls(f"{beat.epoch} {beat.owner}", [[changes]], beat.progress["applied_lsn"], beat.ended)
        shown = [
            each for each in beat.progress.get("views", ()) if each["view"] == view and each.get("as_of") is not None
        ]
        if not shown:
            return None
        mark = [[each["units"], each["as_of"] if each["behind"] else None] for each in shown]
        return cls("", mark, min((each["as_of"] for each in shown), key=parse_lsn))

    def follows(self, last: Seen) -> bool:
        """Return whether the table or the view may have changed since the last report."""
        if self.job == last.job:
            return self.mark != last.mark
        # Each job counts from zero. One that died, or whose end was not seen, may have committed more than was seen.
        return self.mark != [[0]] or (not last.ended and self.applied_lsn != last.applied_lsn)


class ChangesTrigger(BaseEventTrigger):
    """A trigger that updates an asset while a stream changes a table or a view, and after it has ended.

    The event's payload has ``pipeline`` and ``applied_lsn``. The last report is stored with the asset, one interval
    after its event, so that a restart of the triggerer may repeat an event but misses none. A stream that begins and
    ends between two reads is not seen here; its task reports it at its end. A state that cannot be read is read again.

    :param pipeline: absolute path of the pipeline file, for the triggerer, which reads the state that the file names.
    :param table: the source table, ``schema.table``.
    :param view: instead of a table, the view as in the pipeline file, ``schema.name``.
    :param interval: seconds between two reads, and the minimum between two events.
    """

    def __init__(
        self, *, pipeline: str, table: str | None = None, view: str | None = None, interval: float = 60.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if (table is None) == (view is None):
            raise ValueError("give either table or view")
        self.pipeline = pipeline
        self.table = table
        self.view = view
        self.interval = interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and the arguments."""
        names = ("pipeline", "table", "view", "interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event each time the table or the view has changed, without end."""
        from airflow_cdc_provider.engine.core.errors import CdcError

        last = stored = await self._recall()
        while True:
            try:
                name, seen = await asyncio.to_thread(self._look)
            except CdcError as e:
                self.log.warning("%s. %s", e.message, e.solution)
            else:
                if seen is None and last is None:
                    seen = Seen()  # the first report after this one is a change
                if seen is not None and seen != last:
                    if last is not None and seen.follows(last):
                        payload = {"pipeline": name, "applied_lsn": seen.applied_lsn}
                        yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
                    last = seen
            await asyncio.sleep(self.interval)
            if last is not None and last != stored:
                await self._remember(last)
                stored = last

    def _look(self) -> tuple[str, Seen | None]:
        """Read the last report.

        :raises CdcError: if the file is invalid here, or the state cannot be read.
        """
        from airflow_cdc_provider.engine.core.errors import ConfigError
        from airflow_cdc_provider.engine.core.section import VARIABLE
        from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.heartbeat import STREAM, read_heartbeat

        outline = Pipeline.outline(self.pipeline)  # the connections are not needed
        if unknown := VARIABLE.search(outline.state):
            raise ConfigError(
                f"state names the environment variable {unknown[1]}, which is not set",
                f"Set {unknown[1]} also for Airflow's triggerer, because watchers of assets read the state.",
            )
        return outline.name, Seen.of(read_heartbeat(State(outline.state), STREAM), self.table, self.view)

    async def _recall(self) -> Seen | None:
        """Return the last report; ``None`` if two assets share the trigger, as the store cannot do that."""
        if self.asset_state_store is None:
            return None
        with suppress(ValueError):
            kept: Any = await self.asset_state_store.aget(_KEY)
            return None if kept is None else as_shape(Seen, kept)  # another version may have stored another shape
        return None

    async def _remember(self, seen: Seen) -> None:
        if self.asset_state_store is not None:
            with suppress(ValueError):
                await self.asset_state_store.aset(_KEY, asdict(seen))
