"""The trigger of the sensors: waits in the triggerer until what is expected of a slot has come true."""

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
from airflow_cdc_provider.triggers.poll import Poll, Watch
from airflow_cdc_provider.triggers.readers import RecordReader, SlotsReader, Target

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.commands.wait_conditions import Expectation
    from airflow_cdc_provider.engine.core.record import Record
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.postgres.slots import Slots

_LOG_SECONDS = 60.0
_START_KEY = "slot_at_first_look"


def notice(timeout: float) -> float:
    """How much earlier than Airflow, whose clock gives no reason, a trigger ends a task that takes too long.

    :param timeout: seconds that the task may take.
    """
    return min(60.0, max(10.0, 0.1 * timeout))


class ExpectationTrigger(BaseTrigger):
    """Waits until an expectation has come true, and then ends the task without a worker.

    A server that cannot be asked is asked again. What cannot come true any more, and a time-out, send the task to a
    worker with the reason and the solution.

    :param kind: of the expectation, see :func:`~airflow_cdc_provider.engine.commands.wait_conditions.expect`.
    :param interval: seconds between two looks.
    :param timeout: seconds that the task may take. Airflow's own deadline is :func:`notice` later.
    :param end_task: end the task here; a task whose assets must be updated ends on a worker.
    :param pipeline: path of a pipeline file, whose slot is watched.
    :param conn_id: without a pipeline, the connection of the slot's server.
    :param slot: without a pipeline, the slot's name.
    :param arguments: of the expectation, by name. They become attributes, which the triggerer renders.
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
        """The class's path, and what makes the same trigger again; nothing of it is secret."""
        names = ("kind", "interval", "timeout", "end_task", "pipeline", "conn_id", "slot", *self._arguments)
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event, when the expectation has come true, or cannot come true, or time is over."""
        from airflow_cdc_provider.engine.core.errors import CdcError

        remedy = ""
        try:
            expectation = await asyncio.to_thread(self._expectation)
            remedy = expectation.remedy
            async with asyncio.timeout(self._left()):
                await self._come_true(expectation)
        except TimeoutError:
            yield _failure(f"{self._sentence}, after {self.timeout:g} seconds", remedy, timed_out=True)
        except CdcError as e:
            self.log.error("%s. %s", e.message, e.solution)
            yield _failure(e.message, e.solution, timed_out=False)
        else:
            yield TaskSuccessEvent() if self.end_task else TriggerEvent({})  # type: ignore[no-untyped-call]

    def _expectation(self) -> Expectation:
        """In a thread, as the first import of the engine takes half a second."""
        from airflow_cdc_provider.engine.commands.wait_conditions import expect

        return expect(self.kind, {name: getattr(self, name) for name in self._arguments})

    def _left(self) -> float:
        """Seconds until the task has taken too long; the deadline outlives a restart of the triggerer."""
        if self.timeout_after is None:
            return self.timeout
        deadline = self.timeout_after.replace(tzinfo=self.timeout_after.tzinfo or UTC)
        # At least one look, also where time was over before the triggerer came to it.
        return max(1.0, (deadline - datetime.now(UTC)).total_seconds() - notice(self.timeout))

    async def _come_true(self, expectation: Expectation) -> None:
        """Wait, also for servers, and for connections of Airflow that are being changed."""
        from airflow_cdc_provider.engine.core.errors import CdcError, Retry

        shared = True
        while True:
            try:
                target = await asyncio.to_thread(Target.resolve, self.pipeline, self.conn_id, self.slot)
                return await self._watch(expectation, target, shared)
            except CdcError as e:
                if shared:
                    shared = False
                    continue
                if e.retry is not Retry.RETRY:
                    raise
                self._tell(f"{e.message}. {e.solution}")
                await asyncio.sleep(self.interval)

    async def _watch(self, expectation: Expectation, target: Target, shared: bool) -> None:
        from airflow_cdc_provider.engine.commands.wait_conditions import Seen

        async with AsyncExitStack() as stack:
            slots: Watch[Slots] | None = None
            records: Watch[Record | None] | None = None
            if expectation.about_record and target.pipeline is not None:
                records = await stack.enter_async_context(record_of(target.pipeline, self.interval))
            if expectation.about_slots:
                # Beside a record they are wanted whenever that has been read.
                slots = await stack.enter_async_context(
                    slots_of(target, math.inf if records else self.interval, shared)
                )
            while True:
                # The log's end is read after what has been applied: the lag is never less than it was.
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
                judgement = expectation.judge(seen)
                self._tell(judgement.sentence, at_once=judgement.reached)
                if judgement.reached:
                    return

    def _start(self, now: Lsn) -> Lsn:
        """Where the slot was at the first look of this try, which a restart of the triggerer does not forget."""
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

    def _tell(self, sentence: str, at_once: bool = False) -> None:
        """Keep the sentence for the failure, and log it now and then."""
        self._sentence = sentence.removesuffix(".")
        if at_once or time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            self.log.info("%s.", self._sentence)


def slots_of(target: Target, interval: float, shared: bool) -> AbstractAsyncContextManager[Watch[Slots]]:
    """The poll of the slots of a target's server.

    :param shared: with all triggers that look at this server. The first of them connects for all, to its database:
        after a failure, which may be that database's alone, only with those that look by the same one.
    """
    from airflow_cdc_provider.engine.postgres.connection import without_database

    key = ("slots of a server", without_database(target.dsn)) if shared else ("slots", target.dsn)
    return Poll.watch(key, lambda: SlotsReader(target.dsn), interval)


def record_of(pipeline: Pipeline, interval: float) -> AbstractAsyncContextManager[Watch[Record | None]]:
    """The poll of a pipeline's commit record, shared by all triggers that look at this pipeline."""
    key = ("record", pipeline.name, pipeline.sinks)
    return Poll.watch(key, lambda: RecordReader(pipeline), interval)


def _failure(message: str, solution: str, timed_out: bool) -> TriggerEvent:
    payload = {"message": message, "solution": solution, "timed_out": timed_out}
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]
