"""A job that goes on through outages: attempts, and the wait between them.

Only what a caller may try again is tried again (:attr:`.CdcError.retry`), as often as the
pipeline's restart strategy says. An attempt begins as a start of the command does, with the
record, the fence and the gate, since nobody knows what happened meanwhile; what stays is
the epoch, the Spark session and the heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConnectionFailed,
    Refused,
    Retry,
    SlotBudgetExceeded,
    SparkLost,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.restart_strategy import Attempt, Failure
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.runs.run import Run, rejoin
from airflow_cdc_provider.engine.runs.single_writer import require_latest

T = TypeVar("T")

_UNREACHABLE: tuple[type[Exception], ...] = (ConnectionFailed, StreamFailed, *DRIVER_ERRORS)

_log = logging.getLogger(__name__)


def keep_trying(run: Run, record: Record, attempt: Callable[[Record], T]) -> T | None:
    """Make attempts until one ends well, the run is asked to stop, or the restart strategy gives up.

    :param record: the commit record for the first attempt; each later one gets its own.
    :param attempt: does the work; whatever it has opened is closed when it raises.
    :returns: what the last attempt returned; ``None`` when the run was asked to stop meanwhile.
    :raises CdcError: what must not be tried again, or what has been tried often enough.
    """
    try:
        _look_at_slot(run)
        return _attempts(run, record, attempt)
    except SlotBudgetExceeded as e:
        if run.pipeline.stream.on_max_retained_wal == "drop-slot":
            run.source.give_up_slot(e, partial(_fenced, run))
        raise


@contextlib.contextmanager
def _fenced(run: Run) -> Iterator[None]:
    """Keep others from taking over.

    :raises Fenced: when another has.
    """
    with contextlib.ExitStack() as fence:
        try:
            fence.enter_context(run.commit_record.fenced(run.epoch))
        except _UNREACHABLE:
            # Nobody can take over now. Who has before the sink was lost, beats in the state.
            require_latest(run.state, run.epoch)
        yield


def _attempts(run: Run, record: Record, attempt: Callable[[Record], T]) -> T | None:
    failures: list[Failure] = []
    committed: str | int | None = None
    error: CdcError | None = None
    while error is None or not run.stopping:
        try:
            return attempt(record if error is None else rejoin(run))
        except CdcError as e:
            error = e
        except DRIVER_ERRORS as e:
            error = driver_failure(e, run.part)
        if error.retry is not Retry.RETRY:
            if isinstance(error, Refused):
                # A run that has taken over may have made slot and publication anew: that it has is what to say then.
                with _fenced(run):
                    pass
            raise error
        if run.stopping:  # whoever ends all processes of a job ends Spark's JVM, too
            break
        if isinstance(error, SparkLost):  # a session does not come back
            raise error
        before, committed = committed, run.committed
        failures.append(Failure(time.monotonic(), before is not None and committed != before))
        following = run.pipeline.stream.restart.after(failures)
        if following is None:
            raise error
        _await(run, following, error)
    return None


def _await(run: Run, following: Attempt, error: CdcError) -> None:
    """Wait for the next attempt, in sight of everybody; not longer than until the run is asked to stop."""
    _log.warning(
        "%s: %s: %s. Attempt %d of %d begins in %g s.",
        run.part,
        error.kind,
        error.message,
        following.number,
        following.of,
        following.delay,
    )
    run.history.error(error)
    run.restarts += 1
    run.progress = {
        **run.progress,
        "restart": {
            "attempt": following.number,
            "of": following.of,
            "next_attempt_at": round(time.time() + following.delay, 3),
            "error": error.as_dict(),
        },
    }
    run.try_beat()
    deadline = time.monotonic() + following.delay
    while (left := deadline - time.monotonic()) > 0 and not run.stopping:
        run.check()
        _look_at_slot(run)
        run.wait(min(left, run.pipeline.stream.heartbeat))


def _look_at_slot(run: Run) -> None:
    """Hold the slot against its budget; the source may itself be what is waited for."""
    state = run.look_at_slot()
    if state is not None:
        run.budget.look(state)
