"""What can be waited for: that a slot moves, keeps little log, is well; that the sink follows, and has all chunks.

Pure: what was seen of the servers goes in, a judgement comes out. It says whether the
expectation has come true, and in a sentence how things stand; what cannot come true any
more is refused with the repair.
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
    """What is known of a slot and its pipeline at one moment.

    :param slot: the slot's name.
    :param pipeline: the pipeline whose slot it is, if one was named.
    :param slots: of the source, where the expectation is about them.
    :param record: the sink's, where the expectation is about it; ``None`` when there is none yet.
    :param start: where the slot's ``restart_lsn`` was at the first look.
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
        """The slot's.

        :raises GateClosed: when there is no such slot, or it is lost.
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
class Judgement:
    """Whether an expectation has come true, and a sentence that tells how things stand."""

    reached: bool
    sentence: str


@dataclass(frozen=True)
class Expectation(ABC):
    """Something to wait for."""

    about_slots: ClassVar[bool] = True
    about_record: ClassVar[bool] = False
    remedy: ClassVar[str]
    """What to do if it does not come true for too long."""

    @abstractmethod
    def judge(self, seen: Seen) -> Judgement:
        """Judge what was seen.

        :raises GateClosed: when it cannot come true any more.
        """


@dataclass(frozen=True)
class Progress(Expectation):
    """The slot has moved, so that the source can remove log; everything that is given must hold.

    Without a position: ``restart_lsn`` has moved since the first look.

    :param moved_since: ``restart_lsn`` is beyond it.
    :param restart_lsn: ``restart_lsn`` is at or beyond it.
    :param confirmed_flush_lsn: ``confirmed_flush_lsn`` is at or beyond it.
    """

    remedy = (
        "See whether a stream reads from the slot and what it waits for (`airflow-cdc status`), and whether an old"
        " transaction of the source holds restart_lsn back (pg_stat_activity, pg_prepared_xacts)."
    )

    moved_since: Lsn | None = None
    restart_lsn: Lsn | None = None
    confirmed_flush_lsn: Lsn | None = None

    def judge(self, seen: Seen) -> Judgement:
        """See :meth:`Expectation.judge`."""
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
        return Judgement(
            not missing,
            f"slot {seen.slot!r} is at restart_lsn {format_lsn(state.restart_lsn)}, confirmed_flush_lsn"
            f" {format_lsn(state.confirmed_flush_lsn)}" + (f"; awaited: {', '.join(missing)}" if missing else ""),
        )


@dataclass(frozen=True)
class Retained(Expectation):
    """The source keeps less log for the slot than a budget.

    :param below: bytes; without it ``stream.max_retained_wal`` of the pipeline file.
    """

    remedy = (
        "See what keeps the stream from applying the log (`airflow-cdc status`), and look for old transactions on the"
        " source. Make room on its disk, or raise the budget."
    )

    below: int | None = None

    def judge(self, seen: Seen) -> Judgement:
        """See :meth:`Expectation.judge`."""
        if self.below is None and seen.pipeline is None:
            raise ConfigError("there is no budget for the slot", "Give `below`, or `pipeline`, whose file has one.")
        limit = self.below if self.below is not None or seen.pipeline is None else seen.pipeline.stream.max_retained_wal
        retained = seen.state.retained
        return Judgement(
            retained < (limit or 0),
            f"slot {seen.slot!r} retains {human_bytes(retained)} of log; the budget is {human_bytes(limit)}",
        )


@dataclass(frozen=True)
class Lag(Expectation):
    """The sink is behind the source by less than this; everything that is given must hold.

    :param below_bytes: of log between what is applied and its end.
    :param below_seconds: since the sink last advanced while it is behind.
    """

    about_record = True
    remedy = "See whether the stream runs and what it waits for: `airflow-cdc status`."

    below_bytes: int | None = None
    below_seconds: float | None = None

    def judge(self, seen: Seen) -> Judgement:
        """See :meth:`Expectation.judge`."""
        if seen.record is None or seen.slots is None:
            return Judgement(False, _NO_RECORD)
        _ = seen.state  # made before the record
        behind, seconds = seen.record.lag(seen.slots.end, seen.now)
        reached = (self.below_bytes is None or behind < self.below_bytes) and (
            self.below_seconds is None or seconds < self.below_seconds
        )
        limits = [human_bytes(self.below_bytes)] if self.below_bytes is not None else []
        limits += [f"{self.below_seconds:g} s"] if self.below_seconds is not None else []
        return Judgement(
            reached,
            f"the sink is {human_bytes(behind)} and {seconds:.1f} s behind"
            + ("" if reached else f"; awaited: less than {' and '.join(limits)}"),
        )


@dataclass(frozen=True)
class Healthy(Expectation):
    """The server keeps all that the slot needs, and is not about to remove it."""

    remedy = (
        "Let the stream catch up, or raise max_slot_wal_keep_size on the source: at the next checkpoint the slot may be"
        " lost, and all tables would have to be read again."
    )

    def judge(self, seen: Seen) -> Judgement:
        """See :meth:`Expectation.judge`."""
        state = seen.state
        return Judgement(
            state.wal_status in ("reserved", "extended"),
            f"slot {seen.slot!r} has wal_status {state.wal_status} and retains {human_bytes(state.retained)} of log"
            + ("; it exceeds max_slot_wal_keep_size" if state.wal_status == "unreserved" else ""),
        )


@dataclass(frozen=True)
class Finished(Expectation):
    """All chunks of the snapshot are in the sink.

    :param consistent: also the changes made while they were read, so that the tables are as the source once was.
    """

    about_slots = False
    about_record = True
    remedy = "See whether the snapshot runs and what it waits for: `airflow-cdc status`."

    consistent: bool = False

    def judge(self, seen: Seen) -> Judgement:
        """See :meth:`Expectation.judge`."""
        if seen.record is None:
            return Judgement(False, _NO_RECORD)
        chunks, unfinished = len(seen.record.chunks), len(seen.record.unfinished)
        sentence = f"{chunks - unfinished} of {chunks} chunks are finished"
        if unfinished or not self.consistent:
            return Judgement(not unfinished, sentence)
        applied, high = seen.record.applied, seen.record.high
        return Judgement(applied >= high, f"{sentence}; applied up to {format_lsn(applied)} of {format_lsn(high)}")


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
_KINDS: Mapping[str, type[Expectation]] = {
    "progress": Progress,
    "retained": Retained,
    "lag": Lag,
    "healthy": Healthy,
    "finished": Finished,
}


def expect(kind: str, arguments: Mapping[str, object]) -> Expectation:
    """Make an expectation of what a task was given, texts as templates render them.

    :param kind: ``progress``, ``retained``, ``lag``, ``healthy`` or ``finished``.
    :param arguments: of the expectation, by name; ``None`` for those that are not given.
    :raises ConfigError: naming the argument that is wrong.
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
