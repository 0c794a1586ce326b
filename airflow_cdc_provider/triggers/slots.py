"""The trigger of the sensors: waits in the triggerer until a condition on a slot holds."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn
from airflow_cdc_provider.triggers.poll import Poll, Watcher
from airflow_cdc_provider.triggers.readers import RecordReader, SlotsReader, WatchedSlot

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.commands.wait_conditions import WaitCondition
    from airflow_cdc_provider.engine.core.record import Record
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.postgres.slots import Slots

_LOG_SECONDS = 60.0
_START_KEY = "slot_at_first_look"


def timeout_margin(timeout: float) -> float:
    """Return the seconds by which a trigger ends a task earlier than Airflow's own timeout, which gives no reason.

    :param timeout: seconds that the task may take.
    """
    return min(60.0, max(10.0, 0.1 * timeout))


class ExpectationTrigger(BaseTrigger):
    """A trigger that waits until a condition holds, and then ends the task without a worker.

    A server that cannot be reached is queried again. If the condition can no longer become true, or after a timeout,
    the task fails on a worker with the reason and the solution.

    :param kind: the kind of the condition, see :func:`.wait_conditions.create_condition`.
    :param interval: seconds between two queries.
    :param timeout: seconds that the task may take. Airflow's own deadline is :func:`timeout_margin` later.
    :param end_task: whether to end the task in the triggerer; a task whose assets must be updated ends on a worker.
    :param pipeline: path of a pipeline file, whose slot is watched.
    :param conn_id: without a pipeline, the connection of the slot's server.
    :param slot: without a pipeline, the slot's name.
    :param arguments: the arguments of the condition by name. They become attributes, which the triggerer renders.
    """

    def __init__(
        self,
        *,
        kind: str,
        interval: float,
        timeout: float,
        end_task: bool = True,
        pipeline: str | None = None,
        conn_id: str | None = None,
        slot: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.interval = interval
        self.timeout = timeout
        self.end_task = end_task
        self.pipeline = pipeline
        self.conn_id = conn_id
        self.slot = slot
        self._arguments = tuple(arguments)
        for name, value in arguments.items():
            setattr(self, name, value)
        self.timeout_after: datetime | None = None
        """Airflow's deadline, set by the triggerer."""
        self._first: Lsn | None = None
        self._sentence = "no server has answered"
        self._logged = -_LOG_SECONDS

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and the arguments, none of which is secret."""
        names = ("kind", "interval", "timeout", "end_task", "pipeline", "conn_id", "slot", *self._arguments)
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event when the condition holds, can no longer become true, or the time is exceeded."""
        from airflow_cdc_provider.engine.core.errors import CdcError

        remedy = ""
        try:
            condition = await asyncio.to_thread(self._condition)
            remedy = condition.remedy
            async with asyncio.timeout(self._left()):
                await self._await_condition(condition)
        except TimeoutError:
            yield _failure(f"{self._sentence}, after {self.timeout:g} seconds", remedy, timed_out=True)
        except CdcError as e:
            self.log.error("%s. %s", e.message, e.solution)
            yield _failure(e.message, e.solution, timed_out=False)
        else:
            yield TaskSuccessEvent() if self.end_task else TriggerEvent({})  # type: ignore[no-untyped-call]

    def _condition(self) -> WaitCondition:
        """Return the condition; runs in a thread, because the first import of the engine takes half a second."""
        from airflow_cdc_provider.engine.commands.wait_conditions import create_condition

        return create_condition(self.kind, {name: getattr(self, name) for name in self._arguments})

    def _left(self) -> float:
        """Return the seconds until the task's deadline, which does not change if the triggerer restarts."""
        if self.timeout_after is None:
            return self.timeout
        deadline = self.timeout_after.replace(tzinfo=self.timeout_after.tzinfo or UTC)
        # Leave time for at least one query, even if the deadline was exceeded before the trigger started.
        return max(1.0, (deadline - datetime.now(UTC)).total_seconds() - timeout_margin(self.timeout))

    async def _await_condition(self, condition: WaitCondition) -> None:
        """Wait for the condition, through outages of servers and changes of Airflow's connections."""
        from airflow_cdc_provider.engine.core.errors import CdcError, Retry

        shared = True
        while True:
            try:
                target = await asyncio.to_thread(WatchedSlot.resolve, self.pipeline, self.conn_id, self.slot)
                return await self._watch(condition, target, shared)
            except CdcError as e:
                if shared:
                    shared = False
                    continue
                if e.retry is not Retry.RETRY:
                    raise
                self._keep_sentence(f"{e.message}. {e.solution}")
                await asyncio.sleep(self.interval)

    async def _watch(self, condition: WaitCondition, target: WatchedSlot, shared: bool) -> None:
        from airflow_cdc_provider.engine.commands.wait_conditions import Seen

        async with AsyncExitStack() as stack:
            slots: Watcher[Slots] | None = None
            records: Watcher[Record | None] | None = None
            if condition.about_record and target.pipeline is not None:
                records = await stack.enter_async_context(record_of(target.pipeline, self.interval))
            if condition.about_slots:
                # If there is also a record, the slots are queried whenever the record has been read.
                slots = await stack.enter_async_context(
                    slots_of(target, math.inf if records else self.interval, shared)
                )
            while True:
                # The end of the log is read after the applied LSN, so that the lag is never underestimated.
                record = await records.next() if records else None
                seen = Seen(
                    slot=target.slot,
                    pipeline=target.pipeline,
                    slots=await slots.next(after=time.monotonic() if records else 0.0) if slots else None,
                    record=record,
                    start=self._first or LOG_START,
                    now=time.time(),
                )
                if self.kind == "progress" and self._first is None:
                    self._first = await asyncio.to_thread(self._start, seen.state.restart_lsn)
                    seen = replace(seen, start=self._first)
                evaluation = condition.evaluate(seen)
                self._keep_sentence(evaluation.sentence, at_once=evaluation.reached)
                if evaluation.reached:
                    return

    def _start(self, now: Lsn) -> Lsn:
        """Return the slot's position at the first query of this try; it is stored, so that it survives restarts."""
        from airflow.sdk.execution_time.xcom import XCom

        ti: Any = self.task_instance
        if ti is None:
            return now
        place = {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "map_index": ti.map_index}
        stored: Any = XCom.get_one(key=_START_KEY, **place)
        if isinstance(stored, dict) and stored.get("try") == ti.try_number:
            return Lsn(int(stored["restart_lsn"]))
        XCom.set(key=_START_KEY, value={"try": ti.try_number, "restart_lsn": str(now)}, **place)
        return now

    def _keep_sentence(self, sentence: str, at_once: bool = False) -> None:
        """Keep the sentence for a failure, and log it from time to time."""
        self._sentence = sentence.removesuffix(".")
        if at_once or time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            self.log.info("%s.", self._sentence)


def slots_of(target: WatchedSlot, interval: float, shared: bool) -> AbstractAsyncContextManager[Watcher[Slots]]:
    """Watch the slots of a target's server.

    :param shared: whether all triggers that watch this server share the poll. The first of them connects to its own
        database for all. After a failure, which may affect only that database, the poll is shared only by triggers with
        the same DSN.
    """
    from airflow_cdc_provider.engine.postgres.connection import without_database

    key = ("slots of a server", without_database(target.dsn)) if shared else ("slots", target.dsn)
    return Poll.watch(key, lambda: SlotsReader(target.dsn), interval)


def record_of(pipeline: Pipeline, interval: float) -> AbstractAsyncContextManager[Watcher[Record | None]]:
    """Watch a pipeline's commit record, in a poll that all triggers of this pipeline share."""
    key = ("record", pipeline.name, pipeline.sinks)
    return Poll.watch(key, lambda: RecordReader(pipeline), interval)


def _failure(message: str, solution: str, timed_out: bool) -> TriggerEvent:
    payload = {"message": message, "solution": solution, "timed_out": timed_out}
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]
