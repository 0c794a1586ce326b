"""The keeper of a Spark job: a separate process that outlives the task that has submitted the job.

``python -m airflow_cdc_provider.hooks.keeper`` reads an :class:`Assignment` from standard input, starts spark-submit
and stores its output. It stops spark-submit if the pipeline's state has a request to stop, and records the end of the
job in the state. It imports neither Airflow nor Spark. When the keeper is killed, the job's process group ends. A
driver on a cluster does not belong to that group: it reads requests from the state itself. It has ended when it has
recorded its end in the state, or has become silent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

import psutil

from airflow_cdc_provider.engine.core.errors import ExitCode, Retry, StateUnwritable, values_hidden
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.announcement import announcement_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STALE_SECONDS, Owner, read_heartbeat
from airflow_cdc_provider.engine.state.private_files import make_folder, open_file
from airflow_cdc_provider.hooks.process_group import ProcessGroup

# After a user marks a task as failed, everything has stopped within ten seconds; Airflow's delay is included.
POLL_SECONDS = 0.5
DRIVER_SECONDS = 4.0
GROUP_SECONDS = 1.0

LOG_BYTES = 5 << 20
"""Size of a job's log in bytes; one earlier log of that size is kept, too."""
LOGS = 20
"""Number of logs of a pipeline that are kept."""
LINE_CHARACTERS = 8192
"""Maximum length of a line of a job's output; longer lines are split."""
_INTERNET = (socket.AF_INET, socket.AF_INET6)
TAIL_LINES, TAIL_CHARACTERS = 40, 16384
"""Limits of the output's end that is reported for a job that has not recorded a result itself."""


@dataclass(frozen=True)
class Assignment:
    """The input of a keeper.

    :param state: URL of the pipeline's state.
    :param submission: id of the job's submission, whose file exists.
    :param command: spark-submit with its arguments.
    :param environment: the environment of the command.
    :param application: the argument that is the driver's script.
    :param cluster: whether the driver runs on a cluster.
    :param directory: the job's working directory, which is removed at the end.
    :param log: path of the file for the job's output.
    :param secrets: texts that the file must not have.
    """

    state: str
    submission: str
    command: list[str]
    environment: dict[str, str]
    application: str
    cluster: bool
    directory: str
    log: str
    secrets: list[str]


def start_keeper(assignment: Assignment, environment: dict[str, str]) -> None:
    """Start a keeper in a new session.

    :param environment: the environment of the keeper.
    """
    log = Path(assignment.log)
    make_folder(log.parent, log.parent.parent)
    with open(log, "ab", opener=open_file) as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, assignment.submission],  # the id helps people who list processes
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            cwd=assignment.directory,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(asdict(assignment)).encode())
    # This process will not wait for the keeper; setting a return code avoids the warning about that.
    process.returncode = 0


def keep(assignment: Assignment, asked: threading.Event) -> None:
    """Run a job from its start to its last process.

    :param asked: set when this process is asked to end.
    """
    state, id_ = State(assignment.state), assignment.submission
    hosts = [] if assignment.cluster else hosts_of(assignment)
    if not submission.retry_until_success(lambda: register(state, id_, hosts)):
        return
    output = Output(
        Path(assignment.log), assignment.secrets, submission.retry_until_success(lambda: submission.unended(state))
    )
    ours = {submission.VARIABLE: id_, submission.STATE_VARIABLE: state.url}
    code: int | None = None
    if not wants_end(state, id_, asked):
        with ProcessGroup(assignment.directory) as group:
            job = subprocess.Popen(
                assignment.command,
                process_group=group.id,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=assignment.directory,
                env=assignment.environment | ours,
                encoding="utf-8",
                errors="replace",
            )
            output.begin(job.stdout)
            while job.poll() is None:
                if asked.is_set() if assignment.cluster else wants_end(state, id_, asked):
                    end_group(group, assignment.application)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(POLL_SECONDS)
            code = job.wait()
            if not assignment.cluster and not wants_end(state, id_, asked):
                group.await_end(DRIVER_SECONDS)  # a driver that has lost its JVM records that
        output.finish()
        if assignment.cluster and code is not None and not await_silence(state, id_, asked):
            return
    submission.retry_until_success(
        lambda: submission.end(state, id_, exit_code=code, error=job_failure(code, output.tail))
    )


def await_silence(state: State, id_: str, asked: threading.Event) -> bool:
    """Wait until a driver on a cluster has recorded its end, or is silent; a silent driver is asked to stop.

    :returns: ``False`` if this process was asked to end first.
    """
    heard, since = None, time.monotonic()
    while time.monotonic() - since < STALE_SECONDS:
        try:
            found = submission.read(state, id_)
            if found is None or found.ended_at is not None:
                return True
            beat = read_heartbeat(state, found.part)
            if beat is None or beat.submission != id_:
                beat = announcement_of(state, id_)
            if beat is not None and beat.at != heard:
                heard, since = beat.at, time.monotonic()
        except StateUnwritable:  # an unreadable state does not mean that the driver is silent
            since = time.monotonic()
        if asked.wait(POLL_SECONDS):
            return False
    submission.retry_until_success(lambda: submission.ask_to_stop(state, id_, submission.Asker.WATCHER))
    return True


def hosts_of(assignment: Assignment) -> list[str]:
    """Return the names and addresses under which a driver on this host may report its web UI."""
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names |= {each.address.partition("%")[0] for each in addresses if each.family in _INTERNET}
    names |= {assignment.environment.get(name, "") for name in ("SPARK_PUBLIC_DNS", "SPARK_LOCAL_HOSTNAME")}
    given = (argument.partition("=") for argument in assignment.command)
    names |= {value for name, _, value in given if name == "spark.driver.host"}
    return sorted(name.lower() for name in names if name)


def register(state: State, id_: str, hosts: list[str]) -> bool:
    """Record this process as the keeper of the job.

    :param hosts: names and addresses at which the job's web UI may be.
    :returns: ``False`` if the job was given up before it began.
    """
    found = submission.read(state, id_)
    if found is None or found.ended_at is not None:
        return False
    submission.write(state, replace(found, keeper=Owner.this(), hosts=hosts))
    return True


def wants_end(state: State, id_: str, asked: threading.Event) -> bool:
    """Return whether the job must end soon; a user's request to stop is left to the job itself."""
    if asked.is_set():
        return True
    with contextlib.suppress(StateUnwritable):
        return bool(submission.askers(state, id_) & submission.KILLERS)
    return False


def end_group(group: ProcessGroup, application: str) -> None:
    """Ask the driver to end after its unit, and end all processes after some seconds."""
    # First ask only the driver, because it could not finish its unit without the JVM.
    asked = False
    for process in group.members():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:2] == [application]:
                process.terminate()
                asked = True
    if not (asked and group.await_end(DRIVER_SECONDS)):
        group.end(GROUP_SECONDS)


def job_failure(code: int | None, tail: str) -> dict[str, str]:
    """Return the error of a job that has not recorded a result itself.

    :param code: the exit code of spark-submit, which is the engine's if the engine has run; ``None`` if the job never
        began.
    :param tail: the end of its output.
    """
    wrong = code in (ExitCode.INVALID, ExitCode.REFUSED)
    message = (
        "the Spark job was ended before it began" if code is None else f"the Spark job ended with exit code {code}"
    )
    return {
        "kind": "StreamFailed",
        "message": message,
        "solution": ("See its log." if values_hidden() else tail) or "The job has written no output.",
        "retry": (Retry.FAIL if wrong else Retry.RETRY).value,
    }


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        file = BufferedWriter(FileIO(self.baseFilename, self.mode, opener=open_file))
        return TextIOWrapper(file, encoding=self.encoding, errors=self.errors)


class Output:
    """The output of a job, with secrets masked, in a file of limited size.

    :param path: path of the file; older logs in its folder are removed if there are too many.
    :param unended: ids of the submissions whose logs are not removed.
    """

    def __init__(self, path: Path, secrets: Sequence[str], unended: Collection[str] = ()) -> None:
        for old in sorted(path.parent.glob("*.log*"))[: -2 * LOGS]:
            if not old.name.startswith(tuple(unended)):
                old.unlink(missing_ok=True)
        self._secrets = sorted(secrets, key=len, reverse=True)
        # A part of a secret of this length may be at the end of a piece without being recognized.
        self._seam = max(map(len, secrets), default=1) - 1
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._file = _PrivateFile(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace")
        self._thread: threading.Thread | None = None

    @property
    def tail(self) -> str:
        """Return the last lines of the output."""
        return "\n".join(self._lines)[-TAIL_CHARACTERS:]

    def begin(self, stream: IO[str] | None) -> None:
        """Read a stream to its end in a thread, because a job blocks if its output is not read."""
        assert stream is not None
        self._thread = threading.Thread(target=self._drain, args=[stream], name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the rest of the output, and close the file."""
        if self._thread is not None:
            self._thread.join(DRIVER_SECONDS)
        self._file.close()

    def _drain(self, stream: IO[str]) -> None:
        held = ""
        while piece := stream.readline(LINE_CHARACTERS):
            text = self._masked(held + piece)
            end = len(text) if piece.endswith("\n") else max(len(text) - self._seam, 0)
            held = text[end:]
            if end:
                self._keep(text[:end])
        if held:
            self._keep(held)

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _keep(self, text: str) -> None:
        line = text.removesuffix("\n")
        self._lines.append(line)
        self._file.emit(logging.LogRecord("job", logging.INFO, "", 0, line, None, None))


def main() -> None:
    """Read the assignment and execute it."""
    assignment = Assignment(**json.load(sys.stdin))
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        keep(assignment, asked)
    finally:
        shutil.rmtree(assignment.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
