"""Jobs that another process submits and watches; the state has a file for each of them.

The submitting process writes the file before it starts anything, and passes the id to the job in the environment. The
job's heartbeats have the id, and when the job ends, it writes its result into the file. A request to stop the job is a
separate file that outlives the job, so that a process that would restart it sees that it is not wanted any more.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
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
"""Environment variable that passes the id to the job."""
STATE_VARIABLE = "AIRFLOW_CDC_STATE"
"""Environment variable that passes the URL of the state, so that the job can report an unreadable pipeline file."""
KEPT = 20
"""Number of the latest submissions that are kept whatever their age; others are kept for an hour after their end."""
_KEPT_SECONDS = 3600.0
WRITE_SECONDS = 120.0
"""Seconds for which writing is retried if only this process has the information."""
STOP_SECONDS = 15.0
"""Seconds to wait for a job to stop; the keeper of a job needs half of it."""
_AGAIN_SECONDS = 0.5
_FOLDER, _STOPS = "submissions", "stops"


class Status(StrEnum):
    """The status of a job.

    A job that is to be killed and has not ended yet is ``ending``. A job that a user asked to stop is ``done``, too. A
    job that ended without such a request before its work was done is ``stopped``, as is one that Airflow has killed.
    """

    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Asker(StrEnum):
    """The origin of a request to stop a job.

    After a user's request (``airflow-cdc stop``), the job finishes its unit and is not restarted. After a request by
    Airflow, or by a watcher that considers the job lost, the job is killed after some seconds.
    """

    USER = "user"
    AIRFLOW = "airflow"
    WATCHER = "watcher"


Askers: TypeAlias = frozenset[Asker]
KILLERS = frozenset({Asker.AIRFLOW, Asker.WATCHER})


@dataclass(frozen=True)
class TaskAddress:
    """The task of Airflow that submitted a job, and its try."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int


@dataclass(frozen=True)
class Submission:
    """A submitted job, from its submission to its end.

    :param pipeline: the pipeline's name.
    :param part: the part of the run that the job works on.
    :param command: its command line.
    :param submitted_at: time of the submission, like the other times in seconds since 1970.
    :param keeper: the process that started it and waits for its end; ``None`` before that.
    :param log: path of its output on the keeper's host.
    :param ended_at: time when its end was recorded.
    :param result: the result of the command.
    :param error: ``kind``, ``message``, ``solution`` and ``retry`` of the error with which it failed.
    :param application: id of its Spark application; written at its end.
    :param cluster: whether its driver runs on a cluster, where it outlives its keeper.
    :param hosts: names and addresses of the host on which the keeper started it, where its Spark UI may be.
    :param task: the task that submitted it; ``None`` in files of older versions.
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
    task: TaskAddress | None = None

    @classmethod
    def new(cls, pipeline: str, part: str, command: list[str]) -> Submission:
        """Return a submission that is about to be started; ids sort by time."""
        now = time.time()
        return cls(f"{int(now * 1000):014d}-{uuid.uuid4().hex[:8]}", pipeline, part, command, now)

    def status(self, askers: Askers) -> Status:
        """Return the status of the job.

        :param askers: the origins of requests to stop it.
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
        """Return whether the job counts as alive: it has not ended, or the keeper to which it belongs has not."""
        return self.ended_at is None or bool(not self.cluster and self.keeper and self.keeper.lives)

    @property
    def keeper_killed(self) -> bool:
        """Return whether the keeper to which the job belongs is known to have ended before the job."""
        return self.ended_at is None and not self.cluster and self.keeper is not None and self.keeper.lives is False

    @property
    def may_be_tried_again(self) -> bool:
        """Return whether it failed with an error that a retry may overcome."""
        return self.error is not None and self.error["retry"] == Retry.RETRY.value

    @property
    def finished(self) -> bool:
        """Return whether its result shows that its work is done."""
        return is_finished(self.result or {})


def is_finished(result: Mapping[str, Any]) -> bool:
    """Return whether the result of ``snapshot`` or ``stream`` shows that the work is done."""
    return bool(result.get("caught_up", result.get("finished") == result.get("chunks")))


def read(state: State, id_: str) -> Submission | None:
    """Return a submission; ``None`` if its file has been removed or is damaged."""
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
    """Record the end of a job; if it is already recorded, add only the exit code."""
    submission = read(state, id_)
    if submission is None:
        return
    if submission.ended_at is None:
        known = replace(submission, result=result, error=error, application=_application(state, submission))
        if error is None and not known.finished and submission.keeper_killed and not askers(state, id_):
            # Its driver has ended in an orderly way, as it does when the keeper is gone.
            known = replace(known, error=as_outcome(_without_keeper(submission)))
        submission = replace(known, ended_at=time.time())
    write(state, replace(submission, exit_code=submission.exit_code if exit_code is None else exit_code))
    with contextlib.suppress(Exception):  # the end is recorded, and files of other jobs may be damaged
        _forget_old(state)


def _application(state: State, submission: Submission) -> str | None:
    """Return the id of a job's Spark application, if its heartbeat has it."""
    with contextlib.suppress(Exception):  # the heartbeat may be damaged, and the end must be recorded
        beat = read_heartbeat(state, submission.part)
        return beat.application if beat is not None and beat.submission == submission.id else None
    return None


def end_ours(exit_code: int, result: dict[str, Any] | None, error: CdcError | None) -> None:
    """Record the end of this process, if it was submitted."""
    id_, url = os.environ.get(VARIABLE), os.environ.get(STATE_VARIABLE)
    if id_ and url:
        outcome = as_outcome(error) if error is not None else None
        with contextlib.suppress(StateUnwritable):  # a watcher notices the end anyway, only later
            state = State(url)
            retry_until_success(lambda: end(state, id_, exit_code=exit_code, result=result, error=outcome))


def cause_of(error: CdcError) -> CdcError:
    """Return the error that caused another: if the keeper of this process is gone, its end and not the consequence."""
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
    """Return the error of a job that has ended, or counts as ended, without reporting a result."""
    return JobLost(
        f"the Spark job of {submission.part} is lost: {why}",
        "If Airflow retries, do nothing: committed data remains, and if the job is alive after all, it cannot commit"
        " at the same time as its successor.",
    )


def check_wanted() -> None:
    """Refuse to begin a job that is not wanted any more, because a cluster may start a driver long after submission.

    :raises JobLost: if this process was submitted, and has been given up or is to be killed.
    """
    id_, url = os.environ.get(VARIABLE), os.environ.get(STATE_VARIABLE)
    if not (id_ and url):
        return
    state = State(url)
    if retry_until_success(lambda: given_up(state, id_) or bool(askers(state, id_) & KILLERS)):
        raise JobLost("the Spark job was ended before it began", "Do nothing: its successor continues the work.")


def retry_until_success(step: Callable[[], T]) -> T:
    """Repeat a step until it succeeds, because the state may be temporarily unreachable.

    :raises StateUnwritable: if it still fails after :data:`WRITE_SECONDS`.
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
    """Return an error as written to a submission."""
    return error.as_dict() | {"retry": error.retry.value}


def give_up(state: State, submission: Submission, why: str) -> None:
    """Declare a job lost, and ask it to stop in case it is still alive; other jobs may then ignore it."""
    ask_to_stop(state, submission.id, Asker.WATCHER)
    end(state, submission.id, error=as_outcome(lost(submission, why)))


def given_up(state: State, id_: str | None) -> bool:
    """Return whether other jobs may ignore a job with a heartbeat, because its end is recorded."""
    submission = read(state, id_) if id_ else None
    return submission is not None and submission.ended_at is not None


def ask_to_stop(state: State, id_: str, asker: Asker) -> None:
    """Ask a job to stop, even if it has not begun."""
    state.write(f"{_STOPS}/{id_}.json", {"askers": sorted({*askers(state, id_), asker}), "at": time.time()})


def stop(state: State, id_: str, seconds: float = STOP_SECONDS) -> bool:
    """Stop a job and wait for its end; its current unit is finished or aborted.

    :returns: whether it has ended in time.
    """

    def ended() -> bool:
        job = read(state, id_)
        return job is None or not job.lives

    ask_to_stop(state, id_, Asker.AIRFLOW)
    return await_condition(ended, seconds, 0.2)


def askers(state: State, id_: str) -> Askers:
    """Return the origins of requests to stop a job; empty if the file is damaged, so that requests can be repeated."""
    asked = state.read_sound(f"{_STOPS}/{id_}.json", lambda values: frozenset(map(Asker, values["askers"])))
    return asked or frozenset()


def awaited(state: State) -> list[Submission]:
    """Return each part's latest submission if it is alive or will be retried, unless a user has asked it to stop."""
    latest = {submission.part: submission for submission in read_all(state)}
    return [
        submission
        for submission in latest.values()
        if (submission.ended_at is None or submission.may_be_tried_again)
        and Asker.USER not in askers(state, submission.id)
    ]


def unended(state: State) -> frozenset[str]:
    """Return the ids of submissions whose end is not recorded."""
    return frozenset(submission.id for submission in read_all(state) if submission.ended_at is None)


def read_all(state: State) -> list[Submission]:
    """Return all submissions that are kept, oldest first."""
    return [*newest_first(state)][::-1]


def newest_first(state: State) -> Iterator[Submission]:
    """Yield submissions from the newest to the oldest; each file is read only when it is needed."""
    for name in reversed(state.names(_FOLDER)):
        submission = read(state, name.rpartition("/")[2].removesuffix(".json"))
        if submission is not None:
            yield submission


def _forget_old(state: State) -> None:
    """Remove submissions that ended long ago, and silent ones whose part has ended since."""
    submissions = read_all(state)
    ended = {s.part: s.id for s in submissions if s.ended_at is not None}
    beating = {beat.submission for beat in read_heartbeats(state)}
    for submission in submissions[:-KEPT]:
        superseded = submission.id < ended.get(submission.part, "") and submission.id not in beating
        over = submission.ended_at is not None or superseded
        if over and (submission.ended_at or submission.submitted_at) < time.time() - _KEPT_SECONDS:
            state.remove(f"{_FOLDER}/{submission.id}.json")
            state.remove(f"{_STOPS}/{submission.id}.json")
