"""Watches a submitted job through the state, and decides when a silent job is lost.

Silence is measured by the watcher's own clock, from the last change that it saw, because the clock of the job's host
may differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import JobLost, StateUnwritable
from airflow_cdc_provider.engine.state.announcement import announcement_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STALE_SECONDS, Heartbeat, read_heartbeat
from airflow_cdc_provider.engine.state.submission import Submission, give_up, read

PATIENCE_SECONDS = 300.0
"""Seconds that a job may take until its first heartbeat, and may be silent while its processes are known to live."""


@dataclass(frozen=True)
class JobSeen:
    """The observed state of a job.

    :param progress: the progress in its last heartbeat; empty before the first one.
    """

    submission: Submission
    progress: dict[str, Any]


class JobWatch:
    """A repeated observation of a job.

    :param id_: the id of its submission.
    """

    def __init__(self, state: State, id_: str) -> None:
        self._state = state
        self._id = id_
        self._heard: object = None
        self._since = time.monotonic()
        self._blind_since: float | None = None

    def look(self) -> JobSeen:
        """Return the state of the job, and give it up if it has been silent for too long.

        :raises JobLost: if the state does not know the job any more.
        :raises StateUnwritable: if the state cannot be read.
        """
        try:
            submission = self._read()
            beat = read_heartbeat(self._state, submission.part)
            if beat is not None and beat.submission != self._id:
                beat = None
            if beat is None and submission.ended_at is None:
                beat = announcement_of(self._state, self._id)
        except StateUnwritable:
            self._blind_since = self._blind_since or time.monotonic()
            raise
        if self._blind_since is not None:  # the time in which the state could not be read is not silence
            self._since += time.monotonic() - self._blind_since
            self._blind_since = None
        seen = JobSeen(submission, beat.progress if beat else {})
        if submission.ended_at is not None:
            return seen
        heard = submission.keeper, beat and beat.at
        if heard != self._heard:
            self._heard, self._since = heard, time.monotonic()
        silent, borne = time.monotonic() - self._since, patience(submission, beat)
        if silent < borne:
            return seen
        submission = self._read()  # it may just have ended
        if submission.ended_at is None:
            give_up(self._state, submission, _reason(submission, beat, silent, borne))
            submission = self._read()
        return JobSeen(submission, seen.progress)

    def _read(self) -> Submission:
        submission = read(self._state, self._id)
        if submission is None:
            raise JobLost(
                f"the state {self._state.url} does not know the job {self._id} any more",
                "If the pipeline has been dropped or its state removed, provision it first.",
            )
        return submission


def patience(submission: Submission, beat: Heartbeat | None) -> float:
    """Return the seconds of silence after which a job counts as lost.

    :param beat: its last heartbeat.
    """
    driver = beat.owner if beat is not None else None
    owners = (driver,) if submission.cluster else (submission.keeper, driver)
    lives = {owner.lives for owner in owners if owner is not None}
    if True in lives:
        return PATIENCE_SECONDS
    if lives == {False}:
        return 0.0
    return PATIENCE_SECONDS if beat is None and submission.keeper is not None else STALE_SECONDS


def _reason(submission: Submission, beat: Heartbeat | None, silent: float, borne: float) -> str:
    if not borne and submission.keeper_killed:
        return f"its keeper, {submission.keeper}, was killed, and all its processes with it"
    if not borne:
        return "its processes have ended without reporting a result"
    return f"there has been {'no' if beat is None else 'no further'} heartbeat for {silent:.0f} seconds"
