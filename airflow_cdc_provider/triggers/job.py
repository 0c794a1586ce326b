"""Waiting for a submitted Spark job, in the triggerer or in a worker, by what the pipeline's state says of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cdc_provider.engine.core.errors import CdcError, StateUnwritable
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS, Lookout
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
"""The status of an event when the task's time is up; otherwise it is a :class:`Status`."""
_DEFERRED = "deferred"


class SparkJobTrigger(BaseTrigger):
    """Fires when a submitted job has ended, or is lost. A restart of the triggerer does nothing to the job.

    :param state: URL of the pipeline's state.
    :param submission: id of the job's submission.
    :param deadline: when the task's time is up, in seconds since 1970.
    """

    def __init__(self, state: str, submission: str, deadline: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.submission = submission
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The arguments, plain JSON."""
        arguments = {"state": self.state, "submission": self.submission, "deadline": self.deadline}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is something to tell."""
        # A triggerer takes seconds to answer its first question, and who marks the task must not wait for that.
        await self._is_deferred()
        state = await asyncio.to_thread(State, self.state)
        watch = Watch(state, self.submission, self.deadline, self.log.info)
        while (event := await asyncio.to_thread(watch.look)) is None:
            await asyncio.sleep(POLL_SECONDS)
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Ask the job to end if a user has marked or cleared the task, and not if another triggerer has taken over."""
        if await self._is_deferred():
            self.log.info("The task is deferred as before: another triggerer waits for its Spark job.")
            return
        self.log.info("The Spark job is asked to end.")
        # Its end is not waited for: its keeper sees to that, and a next try makes sure of it.
        await asyncio.to_thread(lambda: ask_to_stop(State(self.state), self.submission, Asker.AIRFLOW))

    async def _is_deferred(self) -> bool:
        """Whether Airflow knows that the task is still to wait; ``False`` when Airflow cannot be asked."""
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
        except Exception as e:  # whatever it is, a job that nobody wants must not go on
            self.log.warning("Airflow does not tell the state of the task: %s", e)
            return False
        return any(state == _DEFERRED for states in found.values() for state in states.values())


class Watch:
    """Looks at a job until it has ended, logs its progress and sends it to Airflow's metrics.

    :param deadline: when it is stopped, in seconds since 1970.
    :param log: takes each line.
    """

    def __init__(self, state: State, submission: str, deadline: float | None, log: Callable[[str], object]) -> None:
        self._state = state
        self._id = submission
        self._deadline = deadline
        self._late_since: float | None = None
        self._log = log
        self._lookout = Lookout(state, submission)
        self._read_at = time.monotonic()
        self._logged_at = -PROGRESS_SECONDS
        self._reported_at = -METRICS_SECONDS
        self._line = ""

    def look(self) -> dict[str, Any] | None:
        """Look once.

        :returns: what there is to tell when the waiting is over: ``status``, and of the submission ``id``, ``part``,
            ``result``, ``error``, ``log``, ``keeper`` and ``application``; of one that has ended, too, whether it has
            ``progressed``, and the ``deadline``.
        """
        late = self._late_for()
        try:
            sight = self._lookout.look()
            asked, ended = askers(self._state, self._id), sight.submission.ended_at is not None
            if late is not None and not ended and Asker.AIRFLOW not in asked:
                ask_to_stop(self._state, self._id, Asker.AIRFLOW)
        except StateUnwritable as e:
            if late is not None and late > STOP_SECONDS:
                return _event(TIMEOUT, Submission(self._id, "", "", [], 0.0))
            if time.monotonic() - self._read_at > PATIENCE_SECONDS:
                return _broken(self._id, e) | {"deadline": self._deadline}
            self._tell(f"The state cannot be read at the moment: {e.message}")
            return None
        except CdcError as e:
            return _broken(self._id, e) | {"deadline": self._deadline}
        self._read_at = time.monotonic()
        if late is not None and (Asker.AIRFLOW in asked if ended else late > STOP_SECONDS):
            return _event(TIMEOUT, sight.submission)
        if ended:
            told = {"progressed": bool(sight.progress.get("progressed")), "deadline": self._deadline}
            return _event(sight.submission.status(asked), sight.submission) | told
        self._tell(f"{sight.submission.part}: {progress_line(sight.progress)}")
        if time.monotonic() - self._reported_at >= METRICS_SECONDS:
            self._reported_at = time.monotonic()
            report_pipeline(sight.submission.pipeline, sight.progress)
        return None

    def _late_for(self) -> float | None:
        """For how many seconds the time has been seen to be up; ``None`` while it is not."""
        if self._late_since is None and self._deadline is not None and time.time() > self._deadline:
            self._late_since = time.monotonic()
        return None if self._late_since is None else time.monotonic() - self._late_since

    def _tell(self, line: str) -> None:
        if line != self._line and time.monotonic() - self._logged_at >= PROGRESS_SECONDS:
            self._line, self._logged_at = line, time.monotonic()
            self._log(line)


def _event(status: str, submission: Submission) -> dict[str, Any]:
    told = asdict(submission)
    keys = ("id", "part", "result", "error", "log", "keeper", "application")
    return {"status": str(status)} | {key: told[key] for key in keys}


def _broken(id_: str, error: CdcError) -> dict[str, Any]:
    """The event when nothing can be known of a job any more."""
    failed = Submission(id_, "", "", [], 0.0, error=as_outcome(error) | {"retry": "retry"})
    return _event(Status.FAILED, failed)
