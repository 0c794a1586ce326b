"""Jobs that no longer report: how long that is tolerated, and what is not considered silence."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

# isort: split
from airflow_cdc_provider.engine.core.errors import (
    SecondWriter,
    StateUnwritable,
)
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.state import job_watch
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STALE_SECONDS, Owner, write_heartbeat
from airflow_cdc_provider.engine.state.job_watch import PATIENCE_SECONDS, JobWatch, patience
from airflow_cdc_provider.engine.state.submission import (
    Asker,
    Status,
    Submission,
    askers,
)
from tests.state.owners import DEAD, ELSEWHERE
from tests.support.submissions import HERE, beat, failing, state, submitted

__all__ = ["state"]


@pytest.mark.parametrize(
    ("keeper", "driver", "cluster", "seconds"),
    [
        (None, None, False, STALE_SECONDS),
        (HERE, None, False, PATIENCE_SECONDS),
        (HERE, HERE, False, PATIENCE_SECONDS),
        (HERE, DEAD, False, PATIENCE_SECONDS),
        (DEAD, HERE, False, PATIENCE_SECONDS),
        (DEAD, DEAD, False, 0.0),
        (DEAD, None, False, 0.0),
        (ELSEWHERE, None, False, PATIENCE_SECONDS),
        (ELSEWHERE, ELSEWHERE, False, STALE_SECONDS),
        (DEAD, None, True, PATIENCE_SECONDS),
        (DEAD, ELSEWHERE, True, STALE_SECONDS),
        (HERE, ELSEWHERE, True, STALE_SECONDS),
        (HERE, DEAD, True, 0.0),
    ],
)
def test_how_long_silence_is_borne(keeper: Owner | None, driver: Owner | None, cluster: bool, seconds: float) -> None:
    job = replace(Submission.new("shop", "stream", []), keeper=keeper, cluster=cluster)

    assert patience(job, beat(job, driver) if driver else None) == seconds


def test_a_job_that_is_silent_is_lost_and_no_second_writer(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(state, keeper=ELSEWHERE)
    now = time.monotonic()
    monkeypatch.setattr(job_watch.time, "monotonic", lambda: now)
    watch = JobWatch(state, job.id)
    write_heartbeat(state, beat(job, ELSEWHERE, time.time(), changes=1))
    assert watch.look().progress == {"changes": 1}
    now += STALE_SECONDS - 1
    write_heartbeat(state, beat(job, ELSEWHERE, time.time() + 1))
    assert watch.look().submission.ended_at is None
    now += STALE_SECONDS - 1
    assert watch.look().submission.ended_at is None
    with pytest.raises(SecondWriter):
        refuse_second_writer(state, 7, None, takeover=False)
    now += 2

    lost = watch.look().submission

    assert lost.error is not None
    assert (
        lost.error["message"] == "the Spark job of stream is lost: there has been no further heartbeat for 31 seconds"
    )
    assert lost.status(askers(state, job.id)) is Status.FAILED
    assert askers(state, job.id) == {Asker.WATCHER}
    refuse_second_writer(state, 7, None, takeover=False)


def test_what_cannot_be_heard_is_no_silence(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(state)
    now = time.monotonic()
    monkeypatch.setattr(job_watch.time, "monotonic", lambda: now)
    watch = JobWatch(state, job.id)
    watch.look()
    now += STALE_SECONDS - 1
    with monkeypatch.context() as broken:
        broken.setattr(State, "read_as", failing(State.read_as, times=1))
        with pytest.raises(StateUnwritable):
            watch.look()
    now += STALE_SECONDS
    assert watch.look().submission.ended_at is None
    now += 2
    assert watch.look().submission.error is not None


def test_processes_of_another_container_are_not_looked_for_here() -> None:
    assert HERE.host.endswith(f"/{Path('/proc/self/ns/pid').readlink()}")
    assert HERE.lives
    assert replace(HERE, host=HERE.host.replace("pid:[", "pid:[1")).lives is None


def test_heartbeats_of_another_job_are_not_heard(state: State) -> None:
    job = submitted(state, keeper=DEAD)
    write_heartbeat(state, beat(None, HERE, time.time(), changes=1))

    seen = JobWatch(state, job.id).look()

    assert seen.progress == {}
    assert seen.submission.error is not None
