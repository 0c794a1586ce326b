"""The keeper, the process that stays with a Spark job: how it stops a job, and how it reports the end."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

# isort: split

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats, write_heartbeat
from airflow_cdc_provider.engine.state.job_watch import JobWatch
from airflow_cdc_provider.engine.state.submission import Asker, Status, Submission, ask_to_stop, askers, read, stop
from airflow_cdc_provider.hooks import keeper
from airflow_cdc_provider.hooks.keeper import Assignment, start_keeper
from airflow_cdc_provider.hooks.process_group import ProcessGroup
from tests.support.patience import SECONDS
from tests.support.submissions import HERE, beat, failing, state, submitted

__all__ = ["state"]


# The driver and a child in another process group; both refuse to end.
STUBBORN = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 600' & sleep 600"
POLITE = "trap 'echo ended in peace; exit 0' TERM; echo begun; while :; do sleep 0.1; done"


@pytest.fixture
def keep(state: State, tmp_path: Path) -> Iterator[Callable[[str], Kept]]:
    """Return a function that starts a job with a keeper, and kill what a failed test leaves running."""
    kept: list[Kept] = []

    def start(script: str) -> Kept:
        kept.append(Kept(state, tmp_path, script))
        return kept[-1]

    yield start
    for process in (process for each in kept for process in each.family()):
        process.kill()


class Kept:
    """A job with a keeper, whose driver is a shell script."""

    def __init__(self, state: State, tmp_path: Path, script: str) -> None:
        self.state = state
        self.job = submitted(state)
        self.log = tmp_path / "logs" / "job.log"
        (tmp_path / "work").mkdir()
        application = tmp_path / "driver.sh"
        application.write_text(script)
        environment = {**os.environ, "KEPT": self.job.id, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.assignment = Assignment(
            state.url,
            self.job.id,
            ["/bin/sh", str(application)],
            environment,
            str(application),
            cluster=False,
            directory=str(tmp_path / "work"),
            log=str(self.log),
            secrets=["n0tTelling"],
        )
        start_keeper(self.assignment, environment)

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KEPT") == self.job.id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def await_begin(self, processes: int = 3) -> list[psutil.Process]:
        assert await_condition(lambda: len(self.family()) >= processes, SECONDS), self.family()
        return self.family()

    def await_end(self) -> Submission:
        def over() -> bool:
            found = read(self.state, self.job.id)
            return found is not None and found.ended_at is not None and not self.family()

        assert await_condition(over, SECONDS), (read(self.state, self.job.id), self.family())
        ended = read(self.state, self.job.id)
        assert ended is not None
        return ended


def test_nobody_else_reads_the_output_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOG_BYTES", 100)
    before = os.umask(0)
    try:
        log = tmp_path / "job.log"
        output = keeper.Output(log, [])
        for _ in range(10):  # larger than the size at which it starts another file
            output._keep("a line of a job" * 5)
        output.finish()
    finally:
        os.umask(before)
    assert [stat.filemode(file.stat().st_mode) for file in tmp_path.iterdir()] == ["-rw-------"] * 2


def test_a_keeper_tells_how_a_job_ended_that_left_no_word(keep: Callable[[str], Kept], tmp_path: Path) -> None:
    kept = keep("echo the password is n0tTelling; exit 3")

    ended = kept.await_end()

    assert ended.exit_code == 3
    assert ended.error is not None
    assert (ended.error["message"], ended.error["retry"]) == ("the Spark job ended with exit code 3", "fail")
    assert ended.error["solution"] == "the password is ***"
    assert kept.log.read_text() == "the password is ***\n"
    assert not (tmp_path / "work").exists()


@pytest.mark.lengthy
@pytest.mark.parametrize(("script", "peaceful"), [(STUBBORN, False), (POLITE, True)])
def test_a_job_is_stopped_within_the_time_that_users_are_promised(
    state: State, keep: Callable[[str], Kept], script: str, peaceful: bool
) -> None:
    kept = keep(script)
    kept.await_begin(4)
    started = time.monotonic()

    assert stop(state, kept.job.id)

    assert time.monotonic() - started < 10
    kept.await_end()
    assert ("ended in peace" in kept.log.read_text()) == peaceful


def test_a_job_of_which_a_user_asks_to_stop_is_left_alone(state: State, keep: Callable[[str], Kept]) -> None:
    kept = keep(POLITE)
    kept.await_begin()
    ask_to_stop(state, kept.job.id, Asker.USER)
    time.sleep(3 * keeper.POLL_SECONDS)

    assert "ended" not in kept.log.read_text()
    stop(state, kept.job.id)
    kept.await_end()


def test_a_job_ends_with_its_keeper(state: State, keep: Callable[[str], Kept]) -> None:
    kept = keep(POLITE)
    kept.await_begin()
    job = read(state, kept.job.id)
    assert job is not None
    assert job.keeper is not None
    psutil.Process(job.keeper.pid).kill()

    assert await_condition(lambda: not kept.family(), SECONDS), kept.family()
    assert not Path(kept.assignment.directory).exists()

    lost = JobWatch(state, kept.job.id).look().submission
    assert lost.error is not None
    assert f"its keeper, {job.keeper}, was killed" in lost.error["message"]


def test_a_keeper_bears_a_state_that_is_out_of_reach_for_a_while(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(state)
    monkeypatch.setattr(State, "write", failing(State.write, times=2))
    monkeypatch.setattr(State, "read_as", failing(State.read_as, times=2))
    log = str(tmp_path / "job.log")
    work = tmp_path / "work"
    work.mkdir()
    assignment = Assignment(state.url, job.id, ["/bin/sh", "-c", "exit 4"], {}, "none", False, str(work), log, [])

    keeper.keep(assignment, threading.Event())

    ended = read(state, job.id)
    assert ended is not None
    assert (ended.keeper, ended.exit_code) == (HERE, 4)


def test_a_driver_insists_on_saying_how_it_ends(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(state)
    monkeypatch.setenv(submission.VARIABLE, job.id)
    monkeypatch.setenv(submission.STATE_VARIABLE, state.url)
    monkeypatch.setattr(State, "write", failing(State.write, times=2))

    submission.end_ours(0, {"caught_up": True}, None)

    ended = read(state, job.id)
    assert ended is not None
    assert ended.result == {"caught_up": True}


def test_a_job_that_is_not_wanted_any_more_is_not_begun(state: State, tmp_path: Path) -> None:
    job = submitted(state)
    ask_to_stop(state, job.id, Asker.AIRFLOW)
    command, log = ["/bin/touch", str(tmp_path / "begun")], str(tmp_path / "log")

    keeper.keep(Assignment(state.url, job.id, command, {}, "", False, "", log, []), threading.Event())

    ended = read(state, job.id)
    assert ended is not None
    assert ended.status(askers(state, job.id)) is Status.STOPPED
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    ("script", "beats", "asked", "told"),
    [
        ("echo no such master; exit 1", 0, False, "the Spark job ended with exit code 1"),
        ("exit 255", 8, False, None),  # spark-submit has lost its connection
        ("sleep 600", 0, True, None),  # the host is shut down
    ],
)
def test_a_driver_on_a_cluster_goes_on_without_spark_submit(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, beats: int, asked: bool, told: str
) -> None:
    monkeypatch.setattr(keeper, "STALE_SECONDS", 30.0 if beats else 2.0)
    job, ends = submitted(state, cluster=True), threading.Event()
    here, log, command = str(tmp_path), str(tmp_path / "logs" / "job.log"), ["/bin/sh", "-c", script]
    (tmp_path / "logs").mkdir()
    assignment = Assignment(state.url, job.id, command, {}, "", cluster=True, directory=here, log=log, secrets=[])

    def drive() -> None:
        for n in range(beats):
            write_heartbeat(state, beat(job, at=float(n)))
            time.sleep(0.4)
        if beats:
            submission.end(state, job.id, result={"caught_up": True})
        if asked:
            ends.set()

    driver = threading.Timer(0.1, drive)
    driver.start()

    keeper.keep(assignment, ends)

    driver.join()
    left = read(state, job.id)
    assert left is not None
    assert (left.ended_at is None) == asked
    assert (left.error or {}).get("message") == told
    assert askers(state, job.id) == ({Asker.WATCHER} if told else frozenset())


def test_the_output_of_a_job_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOG_BYTES", 1000)
    (tmp_path / "logs").mkdir()
    for number in range(60):
        (tmp_path / "logs" / f"{number:02}.log").touch()
    output = keeper.Output(tmp_path / "logs" / "99.log", [], {"07"})
    with subprocess.Popen(["seq", "10000"], stdout=subprocess.PIPE, text=True) as job:
        output.begin(job.stdout)
        output.finish()

    assert output.tail.splitlines()[-1] == "10000"
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 3000
    assert len(list((tmp_path / "logs").iterdir())) == 2 * keeper.LOGS + 3
    assert (tmp_path / "logs" / "07.log").exists()


def test_a_line_without_an_end_is_kept_in_pieces_and_tells_no_secret(tmp_path: Path) -> None:
    secret = "n0tTelling"
    # At every position within a piece, some character crosses the end.
    text = "".join(f"{'x' * (keeper.LINE_CHARACTERS - 9 + n)}{secret}" for n in range(20))
    output = keeper.Output(tmp_path / "job.log", [secret])
    output.begin(io.StringIO(text + "\nlast\n" + secret[:4]))
    output.finish()

    lines = (tmp_path / "job.log").read_text().splitlines()
    assert max(map(len, lines)) <= keeper.LINE_CHARACTERS + len(secret)
    assert not any(secret[:4] in line for line in lines[:-1])
    assert "".join(lines).count("***") >= 20
    assert output.tail.endswith("last\nn0tT")
    assert len(output.tail) <= keeper.TAIL_CHARACTERS


def test_a_group_ends_with_members_that_ignore_sigterm_or_left_it(tmp_path: Path) -> None:
    script = f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/pid; sleep 60' & sleep 60"

    with ProcessGroup() as group:
        psutil.Popen(["/bin/sh", "-c", script], process_group=group.id)
        assert await_condition(lambda: (tmp_path / "pid").exists() and len(group.members()) >= 4, 60)
        members = group.members()
        group.end(grace=0.2)
        assert group.members() == set()

    assert int((tmp_path / "pid").read_text()) in {member.pid for member in members}
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


def test_heartbeats_say_whose_they_are(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submitted(state)
    write_heartbeat(state, beat(job))

    (found,) = read_heartbeats(state)

    assert found == beat(job)
    assert asdict(found)["submission"] == job.id
