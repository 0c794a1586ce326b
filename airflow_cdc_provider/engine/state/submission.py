"""Jobs that somebody else submits and watches: the life of each stands in a file of the state.

Whoever submits a job writes its file before anything is started, and gives the job its id in the environment. The
job's heartbeats carry the id, and when the job ends it writes how. A request to stop it is a file of its own, which
outlives the job: who would begin it again sees that it is not wanted any more.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from airflow_cdc_provider.engine.core.errors import CdcError, JobLost, Retry, StateUnwritable
from airflow_cdc_provider.engine.core.typed_json import as_shape
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Owner, read_heartbeat, read_heartbeats

T = TypeVar("T")

VARIABLE = "AIRFLOW_CDC_SUBMISSION"
"""Carries the id to the job."""
STATE_VARIABLE = "AIRFLOW_CDC_STATE"
"""Carries the URL of the pipeline's state to the job, which so can say that it cannot read the pipeline file."""
KEPT = 20
"""So many of the latest submissions are remembered however old they are, others until an hour after their end."""
_KEPT_SECONDS = 3600.0
WRITE_SECONDS = 120.0
"""So long it is tried to write what only this process knows."""
STOP_SECONDS = 15.0
"""So long a stop is waited for; the keeper of a job needs half of it."""
_AGAIN_SECONDS = 0.5
_FOLDER, _STOPS = "submissions", "stops"


class Status(StrEnum):
    """What has become of a job.

    ``ending`` is one that is to be killed and has not ended yet. ``done`` is also one that a user asked to stop; one
    that ended without that, before its work was done, and one that Airflow has killed, are ``stopped``.
    """

    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Asker(StrEnum):
    """Who asks a job to stop.

    A user, by ``airflow-cdc stop``, waits until the job has ended its unit, and does not want it to be begun again.
    Airflow, and a watcher that takes the job for lost, let it be killed after some seconds.
    """

    USER = "user"
    AIRFLOW = "airflow"
    WATCHER = "watcher"


Askers: TypeAlias = frozenset[Asker]
KILLERS = frozenset({Asker.AIRFLOW, Asker.WATCHER})


@dataclass(frozen=True)
class Submission:
    """The life of a job.

    :param pipeline: the pipeline's name.
    :param part: the part of the run that the job is.
    :param command: its command line.
    :param submitted_at: as the other times in seconds since 1970.
    :param keeper: the process that started it and will see its end; ``None`` before.
    :param log: path of its output on the keeper's host.
    :param ended_at: when somebody wrote how it ended.
    :param result: what the command returned.
    :param error: ``kind``, ``message``, ``solution`` and ``retry`` of what it failed of.
    :param application: id of the Spark application that it was; written at its end.
    :param cluster: whether its driver runs on a cluster, where it outlives its keeper.
    :param hosts: names and addresses of the host where the keeper has started it, at which its Spark UI may be.
    """

    id: str
    pipeline: str
    part: str
    command: list[str]
    submitted_at: float
    keeper: Owner | None = None
    log: str | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    application: str | None = None
    cluster: bool = False
    hosts: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, pipeline: str, part: str, command: list[str]) -> Submission:
        """A submission that is about to be started; ids sort by time."""
        now = time.time()
        return cls(f"{int(now * 1000):014d}-{uuid.uuid4().hex[:8]}", pipeline, part, command, now)

    def status(self, askers: Askers) -> Status:
        """What has become of it.

        :param askers: who has asked it to stop.
        """
        if self.ended_at is None:
            return Status.ENDING if askers & KILLERS else Status.RUNNING
        if self.error is not None and not self.may_be_tried_again:
            return Status.FAILED
        if Asker.USER in askers:
            return Status.DONE
        if Asker.AIRFLOW in askers:
            return Status.STOPPED
        if self.error is not None:
            return Status.FAILED
        return Status.DONE if self.finished else Status.STOPPED

    @property
    def lives(self) -> bool:
        """Whether it must be taken for alive: it has not ended, or the keeper to which it belongs has not."""
        return self.ended_at is None or bool(not self.cluster and self.keeper and self.keeper.lives)

    @property
    def keeper_killed(self) -> bool:
        """Whether the process to which the job belongs is known to have ended before it."""
        return self.ended_at is None and not self.cluster and self.keeper is not None and self.keeper.lives is False

    @property
    def may_be_tried_again(self) -> bool:
        """Whether it failed of what another try may overcome."""
        return self.error is not None and self.error["retry"] == Retry.RETRY.value

    @property
    def finished(self) -> bool:
        """Whether its result says that its work is done."""
        result = self.result or {}
        return bool(result.get("caught_up", result.get("finished") == result.get("chunks")))


def read(state: State, id_: str) -> Submission | None:
    """Return a submission, ``None`` when its file has been removed, or is damaged."""
    return state.read_sound(f"{_FOLDER}/{id_}.json", _as_submission)


def _as_submission(values: dict[str, Any]) -> Submission:
    found = as_shape(Submission, values)
    if found.error is not None:
        Retry(found.error["retry"])
    return found


def write(state: State, submission: Submission) -> None:
    """Replace the file of a submission."""
    state.write(f"{_FOLDER}/{submission.id}.json", asdict(submission))


def end(
    state: State,
    id_: str,
    *,
    exit_code: int | None = None,
    result: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> None:
    """Write how a job ended, unless it is known; only the exit code is added then."""
    submission = read(state, id_)
    if submission is None:
        return
    if submission.ended_at is None:
        known = replace(submission, result=result, error=error, application=_application(state, submission))
        if error is None and not known.finished and submission.keeper_killed and not askers(state, id_):
            # Its driver has ended in order, as it was told to when the keeper was gone.
            known = replace(known, error=as_outcome(_without_keeper(submission)))
        submission = replace(known, ended_at=time.time())
    write(state, replace(submission, exit_code=submission.exit_code if exit_code is None else exit_code))
    with contextlib.suppress(Exception):  # the end is written, and files of other jobs may be anything
        _forget_old(state)


def _application(state: State, submission: Submission) -> str | None:
    """The id of a job's Spark application, if its heartbeat tells."""
    with contextlib.suppress(Exception):  # which may be anything, and the end has to be written
        beat = read_heartbeat(state, submission.part)
        return beat.application if beat is not None and beat.submission == submission.id else None
    return None


def end_ours(exit_code: int, result: dict[str, Any] | None, error: CdcError | None) -> None:
    """Write how this process ends, if it was submitted."""
    id_, url = os.environ.get(VARIABLE), os.environ.get(STATE_VARIABLE)
    if id_ and url:
        outcome = as_outcome(error) if error is not None else None
        with contextlib.suppress(StateUnwritable):  # who watches learns it otherwise, if later
            state = State(url)
            insist(lambda: end(state, id_, exit_code=exit_code, result=result, error=outcome))


def cause_of(error: CdcError) -> CdcError:
    """Return what has ended this process: the end of its keeper, if that is gone, and not what broke by it."""
    id_, url = os.environ.get(VARIABLE), os.environ.get(STATE_VARIABLE)
    if error.retry is Retry.RETRY and id_ and url:
        with contextlib.suppress(StateUnwritable):
            found = read(State(url), id_)
            if found is not None and found.keeper_killed:
                return _without_keeper(found)
    return error


def _without_keeper(submission: Submission) -> JobLost:
    return lost(submission, f"its keeper, {submission.keeper}, was killed, and the job ended with it")


def lost(submission: Submission, why: str) -> JobLost:
    """Return the error of a job that has ended, or must be taken to have ended, without a word of its own."""
    return JobLost(
        f"the Spark job of {submission.part} is lost: {why}",
        "Nothing to do if Airflow tries again: what has been committed stays, and a job that is alive after all"
        " cannot commit beside its successor.",
    )


def check_wanted() -> None:
    """Do not begin what nobody wants any more. A cluster may begin a driver long after it was submitted.

    :raises JobLost: when this process was submitted, and has been given up or is to be killed.
    """
    id_, url = os.environ.get(VARIABLE), os.environ.get(STATE_VARIABLE)
    if not (id_ and url):
        return
    state = State(url)
    if insist(lambda: given_up(state, id_) or bool(askers(state, id_) & KILLERS)):
        raise JobLost("the Spark job was ended before it began", "Nothing to do: its successor goes on.")


def insist(step: Callable[[], T]) -> T:
    """Do something with the state, which may be out of reach for a while.

    :raises StateUnwritable: when it stays so for :data:`WRITE_SECONDS`.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    while True:
        try:
            return step()
        except StateUnwritable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_SECONDS)


def as_outcome(error: CdcError) -> dict[str, str]:
    """An error as it stands in a submission."""
    return error.as_dict() | {"retry": error.retry.value}


def give_up(state: State, submission: Submission, why: str) -> None:
    """Take a job for lost; should it be alive after all, it is asked to end, and others need not heed it."""
    ask_to_stop(state, submission.id, Asker.WATCHER)
    end(state, submission.id, error=as_outcome(lost(submission, why)))


def given_up(state: State, id_: str | None) -> bool:
    """Whether a job with a heartbeat has ended as far as others are concerned."""
    submission = read(state, id_) if id_ else None
    return submission is not None and submission.ended_at is not None


def ask_to_stop(state: State, id_: str, asker: Asker) -> None:
    """Ask a job to stop, whether it has begun or not."""
    state.write(f"{_STOPS}/{id_}.json", {"askers": sorted({*askers(state, id_), asker}), "at": time.time()})


def stop(state: State, id_: str, seconds: float = STOP_SECONDS) -> bool:
    """Stop a job, and wait for its end: its current unit ends or is aborted.

    :returns: whether it has ended in time.
    """

    def ended() -> bool:
        job = read(state, id_)
        return job is None or not job.lives

    ask_to_stop(state, id_, Asker.AIRFLOW)
    return await_condition(ended, seconds, 0.2)


def askers(state: State, id_: str) -> Askers:
    """Return who has asked a job to stop; nobody where the request is damaged, so that it can be made again."""
    asked = state.read_sound(f"{_STOPS}/{id_}.json", lambda values: frozenset(map(Asker, values["askers"])))
    return asked or frozenset()


def awaited(state: State) -> list[Submission]:
    """The latest submission of each part that is alive or will be tried again, unless a user has asked it to stop."""
    latest = {submission.part: submission for submission in read_all(state)}
    return [
        submission
        for submission in latest.values()
        if (submission.ended_at is None or submission.may_be_tried_again)
        and Asker.USER not in askers(state, submission.id)
    ]


def unended(state: State) -> frozenset[str]:
    """The ids of submissions of which nobody knows an end."""
    return frozenset(submission.id for submission in read_all(state) if submission.ended_at is None)


def read_all(state: State) -> list[Submission]:
    """All submissions that are remembered, in the order of their beginning."""
    return [*newest_first(state)][::-1]


def newest_first(state: State) -> Iterator[Submission]:
    """Read submissions from the last one on, each file only when it is asked for."""
    for name in reversed(state.names(_FOLDER)):
        submission = read(state, name.rpartition("/")[2].removesuffix(".json"))
        if submission is not None:
            yield submission


def _forget_old(state: State) -> None:
    """Remove submissions that ended long ago, and those without a sign of life whose part has ended since."""
    submissions = read_all(state)
    ended = {s.part: s.id for s in submissions if s.ended_at is not None}
    beating = {beat.submission for beat in read_heartbeats(state)}
    for submission in submissions[:-KEPT]:
        superseded = submission.id < ended.get(submission.part, "") and submission.id not in beating
        over = submission.ended_at is not None or superseded
        if over and (submission.ended_at or submission.submitted_at) < time.time() - _KEPT_SECONDS:
            state.remove(f"{_FOLDER}/{submission.id}.json")
            state.remove(f"{_STOPS}/{submission.id}.json")
