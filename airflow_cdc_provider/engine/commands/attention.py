"""Finds reasons why a pipeline needs its user: a source that cannot continue it, a failed last run, or a lost job.

Also finds jobs that are about to begin, which are not a problem yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    Fenced,
    JobLost,
    SecondWriter,
    StateUnwritable,
)
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.run_errors import forget_error, last_error, note_error, record_error
from airflow_cdc_provider.engine.state.announcement import announcements
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, read_heartbeats
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS
from airflow_cdc_provider.engine.state.location import is_of_others
from airflow_cdc_provider.engine.state.submission import Status, Submission, askers, newest_first

NEEDED = "needs attention"
"""The ``state``, in ``status``, of a pipeline that does not continue without its user's help."""
STARTING = "starting"
"""The ``state`` of a pipeline that has a submitted or started job without a heartbeat so far."""


def problem_in_state(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return the error that ended the last run according to the state: its ``kind``, ``message`` and ``solution``.

    :param beats: the heartbeats of all jobs, dead ones included.
    :returns: ``None`` if the last run has ended successfully.
    """
    return last_error(state) or _failed_submission(state, beats) or _silent_job(state, beats)


def _failed_submission(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return the error of the latest submission, if no job has worked since."""
    latest = next(newest_first(state), None)
    if latest is None or latest.ended_at is None or any(beat.at > latest.ended_at for beat in beats):
        return None
    return latest.error if latest.status(askers(state, latest.id)) is Status.FAILED else None


def _silent_job(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return the error of the latest job if it is lost, unless its end was requested."""
    latest = max(beats, key=lambda beat: (beat.epoch, beat.at), default=None)
    if latest is None or latest.ended or latest.alive:
        return None
    if latest.submission is not None and askers(state, latest.submission):
        return None
    return JobLost(
        f"{latest.owner} has ended during {latest.part} without reporting a result: killed, or lost with its host",
        "Start it again; committed data remains. In Airflow, clear the task.",
    ).as_dict()


def starting(state: State, beats: Sequence[Heartbeat]) -> list[str]:
    """Return the parts of runs that have been submitted or started, and have no heartbeat yet.

    :param beats: the heartbeats of all jobs, dead ones included.
    """
    heard = {beat.submission for beat in beats}
    recent = takewhile(lambda each: time.time() - each.submitted_at < PATIENCE_SECONDS, newest_first(state))
    begun = [each.part for each in recent if each.id not in heard and _about_to_begin(each)]
    return [beat.part for beat in announcements(state)] + begun[::-1]


def _about_to_begin(submission: Submission) -> bool:
    kept = submission.cluster or submission.keeper is None or submission.keeper.lives is not False
    return submission.ended_at is None and kept


@contextmanager
def noting_errors(pipeline: Pipeline, command: str, *, ends_run: bool = True) -> Iterator[None]:
    """Record an error of a command for ``status`` and the page, and remove it once the command succeeds.

    An error is not recorded if another run works, because that run owns the state; if the state belongs to another
    pipeline; or if there is no state yet, because a refused command changes nothing.

    :param ends_run: whether the pipeline needs attention after the error. Otherwise, and while another job works, the
        error is recorded only in the history.
    """
    try:
        yield
    except CdcError as e:
        with suppress(StateUnwritable):  # the command's own error is more useful
            state = State(pipeline.state)
            noted = isinstance(e, SecondWriter | Fenced) or e.noted
            if not noted and state.exists() and not is_of_others(state, pipeline.name):
                alone = not any(beat.alive for beat in read_heartbeats(state))
                (record_error if ends_run and alone else note_error)(state, command, e)
        raise
    state = State(pipeline.state)
    if not is_of_others(state, pipeline.name):
        forget_error(state, command)
