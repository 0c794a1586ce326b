"""A lookout for a submitted job: what the state says of it, and when its silence means that it is lost.

Silence is measured from what the lookout itself has heard last, by its own clock: that of the job's host may differ.
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
"""So long a job may take to its first heartbeat, and may be silent while its processes are known to live."""


@dataclass(frozen=True)
class Sight:
    """What has been seen of a job.

    :param progress: of its last heartbeat; empty before the first.
    """

    submission: Submission
    progress: dict[str, Any]


class Lookout:
    """Looks at a job again and again.

    :param id_: of its submission.
    """

    def __init__(self, state: State, id_: str) -> None:
        self._state = state
        self._id = id_
        self._heard: object = None
        self._since = time.monotonic()
        self._blind_since: float | None = None

    def look(self) -> Sight:
        """See how the job is; one that is silent for too long is given up.

        :raises JobLost: when the state does not know the job any more.
        :raises StateUnwritable: when the state cannot be read.
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
        if self._blind_since is not None:  # what could not be heard meanwhile is no silence
            self._since += time.monotonic() - self._blind_since
            self._blind_since = None
        sight = Sight(submission, beat.progress if beat else {})
        if submission.ended_at is not None:
            return sight
        heard = submission.keeper, beat and beat.at
        if heard != self._heard:
            self._heard, self._since = heard, time.monotonic()
        silent, borne = time.monotonic() - self._since, patience(submission, beat)
        if silent < borne:
            return sight
        submission = self._read()  # it may just have ended
        if submission.ended_at is None:
            give_up(self._state, submission, _reason(submission, beat, silent, borne))
            submission = self._read()
        return Sight(submission, sight.progress)

    def _read(self) -> Submission:
        submission = read(self._state, self._id)
        if submission is None:
            raise JobLost(
                f"the state {self._state.url} does not know the job {self._id} any more",
                "Has the pipeline been dropped, or its state been removed? Then provision it first.",
            )
        return submission


def patience(submission: Submission, beat: Heartbeat | None) -> float:
    """For how many seconds of silence a job is not lost.

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
        return "its processes have ended without a word"
    return f"{'no' if beat is None else 'no further'} heartbeat has come for {silent:.0f} seconds"
