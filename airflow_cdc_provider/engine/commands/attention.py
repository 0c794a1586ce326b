"""What a pipeline needs its user for: a source that cannot continue it, an error that ended its last run, a lost job.

Also who is about to begin, which is no trouble yet.
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
"""The ``state`` of a pipeline, in ``status``, that does not go on before somebody has looked at it."""
STARTING = "starting"
"""The ``state`` of a pipeline of which a job has been submitted, or started, that has not sent a heartbeat yet."""


def trouble_in_state(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return what the state says has ended the last run, as an error's ``kind``, ``message`` and ``solution``.

    :param beats: the heartbeats of all jobs, dead ones included.
    :returns: ``None`` when the last run has ended well.
    """
    return last_error(state) or _failed_submission(state, beats) or _silent_job(state, beats)


def _failed_submission(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return the error of the latest submission, if nothing has worked since."""
    latest = next(newest_first(state), None)
    if latest is None or latest.ended_at is None or any(beat.at > latest.ended_at for beat in beats):
        return None
    return latest.error if latest.status(askers(state, latest.id)) is Status.FAILED else None


def _silent_job(state: State, beats: Sequence[Heartbeat]) -> dict[str, Any] | None:
    """Return that the latest job is lost, unless somebody wanted its end."""
    latest = max(beats, key=lambda beat: (beat.epoch, beat.at), default=None)
    if latest is None or latest.ended or latest.alive:
        return None
    if latest.submission is not None and askers(state, latest.submission):
        return None
    return JobLost(
        f"{latest.owner} has ended without a word, in the middle of {latest.part}: killed, or lost with its host",
        "Start it again: what has been committed stays. In Airflow, clear the task.",
    ).as_dict()


def starting(state: State, beats: Sequence[Heartbeat]) -> list[str]:
    """Return the parts of runs that have been submitted or started, and have not sent a heartbeat yet.

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
    """Leave an error of a command where ``status`` and the page find it, and take it back once the command works.

    What is refused because another run works is not noted, as the state is the other's, nor anything in the state of
    another pipeline; nor where there is no state yet, since a refusal touches nothing.

    :param ends_run: whether the pipeline needs attention after it; else, and while another job works, it is in the
        history only.
    """
    try:
        yield
    except CdcError as e:
        with suppress(StateUnwritable):  # the error itself says more
            state = State(pipeline.state)
            noted = isinstance(e, SecondWriter | Fenced) or e.noted
            if not noted and state.exists() and not is_of_others(state, pipeline.name):
                alone = not any(beat.alive for beat in read_heartbeats(state))
                (record_error if ends_run and alone else note_error)(state, command, e)
        raise
    state = State(pipeline.state)
    if not is_of_others(state, pipeline.name):
        forget_error(state, command)
