"""Waits for a submitted Spark job, in the triggerer or in a worker, by watching the pipeline's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cdc_provider.engine.core.errors import CdcError, StateUnwritable
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS, JobWatch
from airflow_cdc_provider.engine.state.submission import (
    STOP_SECONDS,
    Asker,
    Status,
    Submission,
    as_outcome,
    ask_to_stop,
    askers,
)
from airflow_cdc_provider.hooks.metrics import report_pipeline
from airflow_cdc_provider.hooks.progress import progress_line

POLL_SECONDS = 2.0
PROGRESS_SECONDS = 30.0
METRICS_SECONDS = 10.0
TIMEOUT = "timeout"
"""The status of an event if the task has exceeded its time; otherwise it is a :class:`Status`."""
_DEFERRED = "deferred"


class SparkJobTrigger(BaseTrigger):
    """A trigger that fires when a submitted job has ended or is lost.

    A restart of the triggerer does not affect the job.

    :param state: URL of the pipeline's state.
    :param submission: id of the job's submission.
    :param deadline: the end of the task's time, in seconds since 1970.
    """

    def __init__(self, state: str, submission: str, deadline: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.submission = submission
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and the arguments as plain JSON."""
        arguments = {"state": self.state, "submission": self.submission, "deadline": self.deadline}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Watch the job until there is an event."""
        # A triggerer takes seconds to answer its first request, and a user who marks the task must not wait for that.
        await self._is_deferred()
        state = await asyncio.to_thread(State, self.state)
        watch = JobMonitor(state, self.submission, self.deadline, self.log.info)
        while (event := await asyncio.to_thread(watch.look)) is None:
            await asyncio.sleep(POLL_SECONDS)
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Ask the job to end if a user has marked or cleared the task, but not if another triggerer has taken over."""
        if await self._is_deferred():
            self.log.info("The task is still deferred: another triggerer waits for its Spark job.")
            return
        self.log.info("The Spark job is asked to end.")
        # There is no need to wait for the job's end: its keeper ends it, and the next try makes sure of that.
        await asyncio.to_thread(lambda: ask_to_stop(State(self.state), self.submission, Asker.AIRFLOW))

    async def _is_deferred(self) -> bool:
        """Return whether the task is still deferred according to Airflow; ``False`` if Airflow cannot be asked."""
        task = self.task_instance
        if task is None:
            return False
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        try:
            found = await asyncio.to_thread(
                RuntimeTaskInstance.get_task_states,
                task.dag_id,
                map_index=task.map_index,
                task_ids=[task.task_id],
                run_ids=[task.run_id],
            )
        except Exception as e:  # whatever the error is, a job that is not wanted must not continue
            self.log.warning("The state of the task cannot be read from Airflow: %s", e)
            return False
        return any(state == _DEFERRED for states in found.values() for state in states.values())


class JobMonitor:
    """A repeated observation of a job until it has ended, which logs its progress and sends it to Airflow's metrics.

    :param deadline: time when the job is stopped, in seconds since 1970.
    :param log: called with each line.
    """

    def __init__(self, state: State, submission: str, deadline: float | None, log: Callable[[str], object]) -> None:
        self._state = state
        self._id = submission
        self._deadline = deadline
        self._late_since: float | None = None
        self._log = log
        self._job_watch = JobWatch(state, submission)
        self._read_at = time.monotonic()
        self._logged_at = -PROGRESS_SECONDS
        self._reported_at = -METRICS_SECONDS
        self._line = ""

    def look(self) -> dict[str, Any] | None:
        """Observe the job once.

        :returns: the event if the wait is over: ``status``, and from the submission ``id``, ``part``, ``result``,
            ``error``, ``log``, ``keeper`` and ``application``; if the job has ended, also whether it has
            ``progressed``, and the ``deadline``.
        """
        late = self._late_for()
        try:
            seen = self._job_watch.look()
            asked, ended = askers(self._state, self._id), seen.submission.ended_at is not None
            if late is not None and not ended and Asker.AIRFLOW not in asked:
                ask_to_stop(self._state, self._id, Asker.AIRFLOW)
        except StateUnwritable as e:
            if late is not None and late > STOP_SECONDS:
                return _event(TIMEOUT, Submission(self._id, "", "", [], 0.0))
            if time.monotonic() - self._read_at > PATIENCE_SECONDS:
                return _broken(self._id, e) | {"deadline": self._deadline}
            self._log_line(f"The state cannot be read at the moment: {e.message}")
            return None
        except CdcError as e:
            return _broken(self._id, e) | {"deadline": self._deadline}
        self._read_at = time.monotonic()
        if late is not None and (Asker.AIRFLOW in asked if ended else late > STOP_SECONDS):
            return _event(TIMEOUT, seen.submission)
        if ended:
            details = {"progressed": bool(seen.progress.get("progressed")), "deadline": self._deadline}
            return _event(seen.submission.status(asked), seen.submission) | details
        self._log_line(f"{seen.submission.part}: {progress_line(seen.progress)}")
        if time.monotonic() - self._reported_at >= METRICS_SECONDS:
            self._reported_at = time.monotonic()
            report_pipeline(seen.submission.pipeline, seen.progress)
        return None

    def _late_for(self) -> float | None:
        """Return the seconds since the deadline was seen to be exceeded; ``None`` if it is not."""
        if self._late_since is None and self._deadline is not None and time.time() > self._deadline:
            self._late_since = time.monotonic()
        return None if self._late_since is None else time.monotonic() - self._late_since

    def _log_line(self, line: str) -> None:
        if line != self._line and time.monotonic() - self._logged_at >= PROGRESS_SECONDS:
            self._line, self._logged_at = line, time.monotonic()
            self._log(line)


def _event(status: str, submission: Submission) -> dict[str, Any]:
    values = asdict(submission)
    keys = ("id", "part", "result", "error", "log", "keeper", "application")
    return {"status": str(status)} | {key: values[key] for key in keys}


def _broken(id_: str, error: CdcError) -> dict[str, Any]:
    """Return the event for a job whose state cannot be determined any more."""
    failed = Submission(id_, "", "", [], 0.0, error=as_outcome(error) | {"retry": "retry"})
    return _event(Status.FAILED, failed)
