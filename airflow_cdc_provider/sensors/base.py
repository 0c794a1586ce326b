"""The base of the sensors: each names a condition and its arguments, and waits for it in the triggerer."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, XComArg
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from airflow.triggers.base import StartTriggerArgs

from airflow_cdc_provider.deferral import default_deferrable
from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn
from airflow_cdc_provider.hooks.cdc import airflow_failures
from airflow_cdc_provider.triggers.slots import ExpectationTrigger, timeout_margin

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.engine.commands.wait_conditions import Evaluation, WaitCondition

_START_KEY = "slot_at_first_poke"

# A triggerer of Airflow 3.3 supports only a few kinds of requests; others, such as for the XComs of a task, hang
# forever.
_FOR_WORKERS = re.compile(
    r"\{[{%].*\b(ti|task_instance|inlet_events|outlet_events|triggering_asset_events|prev_\w+_success)\b", re.DOTALL
)


class CdcSensor(BaseSensorOperator):
    """A sensor that waits until a condition on a slot, or on its pipeline, holds.

    The task starts in the triggerer and ends there: no worker is used unless it fails. Mapped tasks, and those with
    arguments that only a worker can resolve (an ``XComArg``, a template with ``ti``), start on a worker and are
    deferred immediately. If the condition can no longer become true, the task fails without retries, also with
    ``soft_fail``, which applies only to timeouts.

    :param arguments: the arguments of the condition by name. They become attributes and template fields.
    :param pipeline: path of a pipeline file, whose slot is watched. (templated)
    :param conn_id: a connection of type ``postgres_cdc`` or ``postgres``. (templated)
    :param slot: the slot's name, with ``conn_id``. (templated)
    :param deferrable: whether to wait in the triggerer, see :func:`.default_deferrable`; otherwise on a worker,
        according to ``mode``.
    """

    template_fields: Sequence[str] = ("pipeline", "conn_id", "slot")
    start_trigger_args = StartTriggerArgs(
        trigger_cls=f"{ExpectationTrigger.__module__}.{ExpectationTrigger.__qualname__}",
        next_method="execute_complete",
    )
    # Set only on instances: if the class had it, Airflow would start mapped tasks without their arguments.
    start_from_trigger = False

    kind: str
    """The kind of the condition, a class attribute of each sensor."""

    def __init__(
        self,
        *,
        arguments: Mapping[str, Any],
        pipeline: str | None = None,
        conn_id: str | None = None,
        slot: str | None = None,
        deferrable: bool | None = None,
        mode: str = "reschedule",
        poke_interval: timedelta | float = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode=mode, poke_interval=poke_interval, **kwargs)
        if (pipeline is None) == (conn_id is None) or (conn_id is None) != (slot is None):
            raise ValueError("give either pipeline, or conn_id and slot")
        self.pipeline = pipeline
        self.conn_id = conn_id
        self.slot = slot
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self._arguments = tuple(arguments)
        for name, value in arguments.items():
            setattr(self, name, value)
        self._first_poke: Lsn | None = None
        trigger_kwargs = self._trigger().serialize()[1]
        if self.deferrable and not any(map(_needs_worker, trigger_kwargs.values())):
            self.start_from_trigger = True
            self.start_trigger_args = dataclasses.replace(
                self.start_trigger_args, trigger_kwargs=trigger_kwargs, timeout=self._airflow_timeout()
            )

    def execute(self, context: Context) -> None:
        """Wait; if Airflow has not started the task in the triggerer, defer it."""
        if self.deferrable:
            self.defer(trigger=self._trigger(), method_name="execute_complete", timeout=self._airflow_timeout())
        with self._soft_for_timeouts_only():
            super().execute(context)

    def execute_complete(self, context: Context, event: object = None) -> None:
        """Fail with the trigger's message; an event without a message is a success."""
        if isinstance(event, Mapping) and "message" in event:
            kind = AirflowSensorTimeout if event["timed_out"] else AirflowFailException
            raise kind(f"{event['message']}.\n{event['solution']}")

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue after the trigger."""
        with self._soft_for_timeouts_only():
            return super().resume_execution(next_method, next_kwargs, context)

    def poke(self, context: Context) -> bool:
        """Evaluate the condition once in this process."""
        from airflow_cdc_provider.engine.commands.wait_conditions import create_condition

        with airflow_failures():
            condition = create_condition(self.kind, {name: getattr(self, name) for name in self._arguments})
            evaluation = self._look(context, condition)
        self.log.info("%s.", evaluation.sentence)
        return evaluation.reached

    def _look(self, context: Context, condition: WaitCondition) -> Evaluation:
        from airflow_cdc_provider.engine.commands.wait_conditions import Seen
        from airflow_cdc_provider.triggers.readers import RecordReader, SlotsReader, WatchedSlot

        target = WatchedSlot.resolve(self.pipeline, self.conn_id, self.slot)
        slots = record = None
        # The end of the log is read after the applied LSN, so that the lag is never underestimated.
        if condition.about_record and target.pipeline is not None:
            record = RecordReader(target.pipeline).read()
        if condition.about_slots:
            with closing(SlotsReader(target.dsn)) as reader:
                slots = reader.read()
        seen = Seen(target.slot, target.pipeline, slots, record, LOG_START, time.time())
        if slots is not None:
            seen = dataclasses.replace(seen, start=self._at_first_poke(seen.state.restart_lsn, context))
        return condition.evaluate(seen)

    def _at_first_poke(self, restart_lsn: Lsn, context: Context) -> Lsn:
        """Return the position at the first poke of this try; each rescheduled poke is a new process."""
        store = context.get("task_state_store")
        if store is None:
            self._first_poke = restart_lsn if self._first_poke is None else self._first_poke
            return self._first_poke
        # Stored values survive when a task is cleared, which begins a new try.
        attempt = context["ti"].try_number
        stored = store.get(_START_KEY)
        if isinstance(stored, dict) and stored.get("try") == attempt:
            return Lsn(int(str(stored["restart_lsn"])))
        store.set(_START_KEY, {"try": attempt, "restart_lsn": str(restart_lsn)})
        return restart_lsn

    def _trigger(self) -> ExpectationTrigger:
        return ExpectationTrigger(
            kind=self.kind,
            interval=self.poke_interval,
            timeout=self._limit(),
            # Airflow 3.3 calls no success callbacks for a task that ends in the triggerer.
            end_task=not (self.outlets or self.on_success_callback),
            pipeline=self.pipeline,
            conn_id=self.conn_id,
            slot=self.slot,
            **{name: getattr(self, name) for name in self._arguments},
        )

    def _limit(self) -> float:
        """Return the seconds that the task may take."""
        if self.execution_timeout is None:
            return self.timeout
        return min(self.timeout, self.execution_timeout.total_seconds())

    def _airflow_timeout(self) -> timedelta:
        limit = self._limit()
        return timedelta(seconds=limit + timeout_margin(limit))

    @contextmanager
    def _soft_for_timeouts_only(self) -> Iterator[None]:
        try:
            yield
        except AirflowSkipException as skipped:
            if self.never_fail or not isinstance(skipped.__cause__, AirflowFailException):
                raise
            raise skipped.__cause__ from None


def _needs_worker(argument: object) -> bool:
    return isinstance(argument, XComArg) or (isinstance(argument, str) and bool(_FOR_WORKERS.search(argument)))
