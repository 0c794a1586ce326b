"""The conditions to wait for: a slot advances, retains little log, or is healthy; a sink keeps up, or has all chunks.

The evaluation is a pure function of the observed state of the servers. Its result is whether the condition holds, and a
sentence that describes the current state. A condition that can no longer become true raises an error with the repair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.section_values import parse_bytes
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.slots import Slots, SlotState
from airflow_cdc_provider.engine.sources.postgres.provision.gate import REPAIR, refuse_lost


@dataclass(frozen=True)
class Seen:
    """The observed state of a slot and its pipeline at one moment.

    :param slot: the slot's name.
    :param pipeline: the pipeline of the slot, if one was named.
    :param slots: the slots of the source, if the condition depends on them.
    :param record: the commit record of the sink, if the condition depends on it; ``None`` if there is none yet.
    :param start: ``restart_lsn`` of the slot at the first observation.
    :param now: seconds since 1970.
    """

    slot: str
    pipeline: Pipeline | None
    slots: Slots | None
    record: Record | None
    start: Lsn
    now: float

    @property
    def state(self) -> SlotState:
        """Return the state of the slot.

        :raises GateClosed: if the slot does not exist or is lost.
        """
        state = self.slots.states.get(self.slot) if self.slots else None
        if state is None:
            raise GateClosed(
                f"replication slot {self.slot!r} does not exist",
                "If the pipeline was never provisioned, do that first. If the slot was dropped, changes are lost."
                f" {REPAIR}",
            )
        refuse_lost(self.slot, state)
        return state


@dataclass(frozen=True)
class Evaluation:
    """The result of a condition: whether it holds, and a sentence that describes the current state."""

    reached: bool
    sentence: str


@dataclass(frozen=True)
class WaitCondition(ABC):
    """A condition to wait for."""

    about_slots: ClassVar[bool] = True
    about_record: ClassVar[bool] = False
    remedy: ClassVar[str]
    """The remedy if the condition does not hold in time."""

    @abstractmethod
    def evaluate(self, seen: Seen) -> Evaluation:
        """Evaluate the condition for an observed state.

        :raises GateClosed: if the condition can no longer become true.
        """


@dataclass(frozen=True)
class Progress(WaitCondition):
    """The condition that the slot has advanced, so that the source can remove log; all given positions must be reached.

    If no position is given, ``restart_lsn`` must have advanced since the first observation.

    :param moved_since: position beyond which ``restart_lsn`` must be.
    :param restart_lsn: position that ``restart_lsn`` must have reached.
    :param confirmed_flush_lsn: position that ``confirmed_flush_lsn`` must have reached.
    """

    remedy = (
        "Check with `airflow-cdc status` whether a stream reads from the slot and what it waits for. Check whether an"
        " old transaction of the source holds restart_lsn back (pg_stat_activity, pg_prepared_xacts)."
    )

    moved_since: Lsn | None = None
    restart_lsn: Lsn | None = None
    confirmed_flush_lsn: Lsn | None = None

    def evaluate(self, seen: Seen) -> Evaluation:
        state = seen.state
        since = self.moved_since
        if (since, self.restart_lsn, self.confirmed_flush_lsn) == (None, None, None):
            since = seen.start
        wanted = [
            (since is None or state.restart_lsn > since, f"restart_lsn beyond {format_lsn(since or LOG_START)}"),
            (state.restart_lsn >= (self.restart_lsn or 0), f"restart_lsn {format_lsn(self.restart_lsn or LOG_START)}"),
            (
                state.confirmed_flush_lsn >= (self.confirmed_flush_lsn or 0),
                f"confirmed_flush_lsn {format_lsn(self.confirmed_flush_lsn or LOG_START)}",
            ),
        ]
        missing = [what for reached, what in wanted if not reached]
        return Evaluation(
            not missing,
            f"slot {seen.slot!r} is at restart_lsn {format_lsn(state.restart_lsn)}, confirmed_flush_lsn"
            f" {format_lsn(state.confirmed_flush_lsn)}" + (f"; awaited: {', '.join(missing)}" if missing else ""),
        )


@dataclass(frozen=True)
class Retained(WaitCondition):
    """The condition that the source retains less log for the slot than a budget.

    :param below: bytes; ``stream.max_retained_wal`` of the pipeline file by default.
    """

    remedy = (
        "Check with `airflow-cdc status` what keeps the stream from applying the log, and look for old transactions on"
        " the source. Free space on its disk, or raise the budget."
    )

    below: int | None = None

    def evaluate(self, seen: Seen) -> Evaluation:
        if self.below is None and seen.pipeline is None:
            raise ConfigError("there is no budget for the slot", "Give `below`, or `pipeline`, whose file has one.")
        limit = self.below if self.below is not None or seen.pipeline is None else seen.pipeline.stream.max_retained_wal
        retained = seen.state.retained
        return Evaluation(
            retained < (limit or 0),
            f"slot {seen.slot!r} retains {human_bytes(retained)} of log; the budget is {human_bytes(limit)}",
        )


@dataclass(frozen=True)
class LagBelow(WaitCondition):
    """The condition that the sink's lag is below limits; all given limits must hold.

    :param below_bytes: bytes of log between the applied LSN and the end of the log.
    :param below_seconds: seconds since the sink last advanced, if it is behind.
    """

    about_record = True
    remedy = "Check with `airflow-cdc status` whether the stream runs and what it waits for."

    below_bytes: int | None = None
    below_seconds: float | None = None

    def evaluate(self, seen: Seen) -> Evaluation:
        if seen.record is None or seen.slots is None:
            return Evaluation(False, _NO_RECORD)
        _ = seen.state  # raises an error if the slot is missing; it is created before the record
        behind, seconds = seen.record.lag(seen.slots.end, seen.now)
        reached = (self.below_bytes is None or behind < self.below_bytes) and (
            self.below_seconds is None or seconds < self.below_seconds
        )
        limits = [human_bytes(self.below_bytes)] if self.below_bytes is not None else []
        limits += [f"{self.below_seconds:g} s"] if self.below_seconds is not None else []
        return Evaluation(
            reached,
            f"the sink is {human_bytes(behind)} and {seconds:.1f} s behind"
            + ("" if reached else f"; awaited: less than {' and '.join(limits)}"),
        )


@dataclass(frozen=True)
class Healthy(WaitCondition):
    """The condition that the server retains all the log that the slot needs, and is not about to remove it."""

    remedy = (
        "Let the stream catch up, or raise max_slot_wal_keep_size on the source: at the next checkpoint the slot may be"
        " lost, and all tables would have to be read again."
    )

    def evaluate(self, seen: Seen) -> Evaluation:
        state = seen.state
        return Evaluation(
            state.wal_status in ("reserved", "extended"),
            f"slot {seen.slot!r} has wal_status {state.wal_status} and retains {human_bytes(state.retained)} of log"
            + ("; it exceeds max_slot_wal_keep_size" if state.wal_status == "unreserved" else ""),
        )


@dataclass(frozen=True)
class Finished(WaitCondition):
    """The condition that all chunks of the snapshot are in the sink.

    :param consistent: whether the sink must also have the changes made while the chunks were read, so that the tables
        are in a state that the source once had.
    """

    about_slots = False
    about_record = True
    remedy = "Check with `airflow-cdc status` whether the snapshot runs and what it waits for."

    consistent: bool = False

    def evaluate(self, seen: Seen) -> Evaluation:
        if seen.record is None:
            return Evaluation(False, _NO_RECORD)
        chunks, unfinished = len(seen.record.chunks), len(seen.record.unfinished)
        sentence = f"{chunks - unfinished} of {chunks} chunks are finished"
        if unfinished or not self.consistent:
            return Evaluation(not unfinished, sentence)
        applied, high = seen.record.applied, seen.record.high
        return Evaluation(applied >= high, f"{sentence}; applied up to {format_lsn(applied)} of {format_lsn(high)}")


_NO_RECORD = "the sink has no commit record of the pipeline yet: it has not been provisioned"


def _seconds(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("a number of seconds") from None


def _flag(value: object) -> bool:
    if str(value) not in ("True", "False", "true", "false"):
        raise ValueError("true or false")
    return str(value).lower() == "true"


def _lsn(value: object) -> Lsn:
    try:
        return parse_lsn(str(value))
    except ValueError:
        raise ValueError("an LSN such as 16/B374D848") from None


_ARGUMENTS: Mapping[str, Callable[[object], Any]] = {
    "moved_since": _lsn,
    "restart_lsn": _lsn,
    "confirmed_flush_lsn": _lsn,
    "below": parse_bytes,
    "below_bytes": parse_bytes,
    "below_seconds": _seconds,
    "consistent": _flag,
}
_KINDS: Mapping[str, type[WaitCondition]] = {
    "progress": Progress,
    "retained": Retained,
    "lag": LagBelow,
    "healthy": Healthy,
    "finished": Finished,
}


def create_condition(kind: str, arguments: Mapping[str, object]) -> WaitCondition:
    """Create a condition from the arguments of a task, which may be texts that templates rendered.

    :param kind: ``progress``, ``retained``, ``lag``, ``healthy`` or ``finished``.
    :param arguments: the arguments of the condition by name; ``None`` for those that are not given.
    :raises ConfigError: if an argument is invalid; names it.
    """
    parsed = {}
    for name, value in arguments.items():
        try:
            parsed[name] = None if value is None else _ARGUMENTS[name](value)
        except ValueError as e:
            raise ConfigError(
                f"the argument {name} is {value!r}", f"Give {e}, or check that the task it comes from has run."
            ) from None
    return _KINDS[kind](**parsed)
