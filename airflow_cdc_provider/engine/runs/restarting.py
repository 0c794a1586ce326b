"""Keeps a job running through outages: repeats attempts, and waits between them.

Only errors that allow a retry (:attr:`.CdcError.retry`) are retried, as often as the pipeline's restart strategy
allows. An attempt begins like a start of the command, with the record, the fence and the gate, because anything may
have happened in the meantime. Only the epoch, the Spark session and the heartbeat are kept.
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
    """Repeat attempts until one succeeds, the run is asked to stop, or the restart strategy gives up.

    :param record: the commit record for the first attempt; each later attempt reads its own.
    :param attempt: does the work; must close everything that it opened if it raises.
    :returns: the result of the last attempt; ``None`` if the run was asked to stop in the meantime.
    :raises CdcError: if an error does not allow a retry, or if the strategy allows no further one.
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
    """Keep other runs from taking over during the block.

    :raises Fenced: if another run has taken over.
    """
    with contextlib.ExitStack() as fence:
        try:
            fence.enter_context(run.commit_record.fenced(run.epoch))
        except _UNREACHABLE:
            # No run can take over now. A run that has taken over before the sink was lost has a heartbeat in the state.
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
                # A run that has taken over may have recreated slot and publication. In this case, report the takeover.
                with _fenced(run):
                    pass
            raise error
        if run.stopping:  # a stop that ends all processes of a job also ends Spark's JVM
            break
        if isinstance(error, SparkLost):  # a lost session cannot be restored
            raise error
        before, committed = committed, run.committed
        failures.append(Failure(time.monotonic(), before is not None and committed != before))
        following = run.pipeline.stream.restart.after(failures)
        if following is None:
            raise error
        _await(run, following, error)
    return None


def _await(run: Run, following: Attempt, error: CdcError) -> None:
    """Wait for the next attempt or until the run is asked to stop, and show in the progress that the job waits."""
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
    """Compare the slot with its budget, if the source can be reached; it may be the cause of the wait."""
    state = run.look_at_slot()
    if state is not None:
        run.budget.look(state)
