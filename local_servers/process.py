"""Runs servers as separate processes: starts, guards, awaits, stops and kills them in the same way for every kind.

Some servers refuse to run as root, so root starts all of them as an unprivileged user. A server that was stopped, or
killed as in a crash, starts again on the same port and data.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.waiting import await_condition

# The kernel assigns ports above 32767 to outgoing connections; a lower port stays free during a restart.
PORTS = range(20_000, 32_000)
START_SECONDS = 180.0
STOP_SECONDS = 20.0
LOG_TAIL_LINES = 25


class ServerError(CdcError):
    """A temporary server cannot be created, started or stopped."""


def find_free_port() -> int:
    """Return a port on loopback on which no process listens.

    The port is drawn by the operating system's random generator: test tools seed ``random``, and two runs must not try
    the same ports in the same order.
    """
    for port in random.SystemRandom().sample(PORTS, k=200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(
        f"No free port between {PORTS.start} and {PORTS.stop - 1} on 127.0.0.1.",
        "Stop leftover servers and try again.",
    )


@dataclass(frozen=True)
class Account:
    """The operating system's user that runs the server's processes."""

    uid: int
    gid: int

    @classmethod
    def choose(cls) -> Account:
        """Return the current user, or ``nobody`` if that is root."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        nobody = pwd.getpwnam("nobody")
        return cls(nobody.pw_uid, nobody.pw_gid)

    def popen_arguments(self) -> dict[str, Any]:
        """Return arguments of ``subprocess`` that start a process as this user."""
        if os.geteuid() != 0:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Make the user the owner of ``path`` itself."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)

    def can_enter(self, directory: Path) -> bool:
        """Return whether the user can reach files below ``directory``."""
        if os.geteuid() != 0:
            return os.access(directory, os.X_OK)
        return all(self._may_search(folder.stat()) for folder in (directory, *directory.parents))

    def _may_search(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & 0o100)
        if status.st_gid == self.gid:
            return bool(status.st_mode & 0o010)
        return bool(status.st_mode & 0o001)


def run_as(
    account: Account, command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as a user, in a directory, and return the result with its output.

    :param environment: environment of the command, ours by default.
    """
    return subprocess.run(
        list(command),
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **account.popen_arguments(),
    )


def claim_directory(directory: Path, server: str) -> tuple[Path, Account]:
    """Return the resolved directory for a server and the user that runs the server, who owns the directory from now on.

    :param directory: new or empty.
    :param server: its name in errors.
    :raises ServerError: if it is not empty, or the user cannot reach it.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ServerError(f"{directory} is not empty.", "Choose a directory that is new or empty.")
    account = Account.choose()
    account.own(directory)
    if not account.can_enter(directory):
        raise ServerError(
            f"{directory} cannot be reached by the user {pwd.getpwuid(account.uid).pw_name} that {server} runs as.",
            "Choose a directory whose parents are open to all users, for example directly below /tmp.",
        )
    return directory, account


# Kill all marked processes several times, because a process may start another one just before it dies.
_KILL_MARKED = (
    'for round in 1 2 3 4 5; do grep -lsFxz -- "$1" /proc/[0-9]*/environ'
    " | tr -dc '0-9\\n' | xargs kill -s KILL; sleep 0.2; done"
)


def start_guard(target: int, signals: tuple[str, ...] = ("INT",), mark: str = "") -> subprocess.Popen[bytes]:
    """Start a shell that ends processes when our end of its pipe closes, which happens when this process dies.

    ``atexit`` does not run after a SIGKILL. A parent-death signal is bound to the thread that started a child, not to
    the process.

    :param target: a process id, or a process group as a negative number.
    :param signals: signals to send, some seconds apart.
    :param mark: a ``NAME=value``; processes with it in their environment are killed last, if the system has ``/proc``.
    """
    kills = [f"kill -s {name} -- {target}" for name in signals] + ([_KILL_MARKED] if mark else [])
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read -r line || {{ {'; sleep 5; '.join(kills)}; }}", "guard", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes] | None) -> None:
    """End a guard before the ids that it watches can be reused."""
    if guard is not None:
        guard.kill()
        guard.communicate()


class ServerProcess(ABC):
    """One server with its directory and its port on loopback.

    A subclass defines the command, and how to probe the server.

    :ivar name: name of the server in errors.
    :ivar guard_signals: signals that end the server, some seconds apart, when this process dies.
    :ivar directory: folder that contains everything the server writes.
    """

    name: str
    guard_signals: tuple[str, ...] = ("TERM", "KILL")

    def __init__(self, directory: Path, port: int, account: Account) -> None:
        self.directory = directory
        self.port = port
        self.account = account
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def probe(self) -> Callable[[], bool]:
        """Return a function that returns whether the server, which has just been started, answers."""

    @property
    def environment(self) -> Mapping[str, str] | None:
        """Return the environment of the server's processes, or ``None`` for ours."""
        return None

    @abstractmethod
    def check_identity(self) -> None:
        """Verify that the process that answers is this server, before anything is created or dropped.

        :raises ServerError: if it is another server.
        """

    @property
    def data_directory(self) -> Path:
        """Return the directory of the server's data."""
        return self.directory / "data"

    @property
    def log_file(self) -> Path:
        """Return the path of the server's log."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Return whether the server's main process is alive."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the server's log."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def start(self) -> None:
        """Start the server and wait until it answers; do nothing if it is running.

        :raises ServerError: if it ends, or does not answer within :data:`START_SECONDS`.
        """
        if self.running:
            return
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                list(self.command()),
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # An interrupt at the terminal is meant for this process, which stops the server in order.
                start_new_session=True,
                **self.account.popen_arguments(),
            )
        self._process = process
        self._guard = start_guard(process.pid, self.guard_signals)
        atexit.register(self.kill)
        try:
            self._await_start(process)
            self.check_identity()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server; if it does not stop in time, kill it."""
        self.end(signal.SIGTERM)
        self.kill()

    def end(self, number: signal.Signals) -> bool:
        """Send the server a signal, and return whether it ends within :data:`STOP_SECONDS`."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        return not self.running

    def restart(self, mode: Literal["stop", "kill"] = "stop") -> None:
        """Stop or kill the server, and start it on the same port and data."""
        self.stop() if mode == "stop" else self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the server, like a crash of the machine."""
        if self._process is not None and self._process.poll() is None:
            self.kill_processes(self._process)
        end_guard(self._guard)
        self._guard = None
        self._process = None
        atexit.unregister(self.kill)

    def kill_processes(self, process: subprocess.Popen[bytes]) -> None:
        """Kill all processes of the server and wait for their end; by default there is only one."""
        process.kill()
        process.wait()

    def remove(self) -> None:
        """Kill the server and delete its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first answer; the server may be recovering from a crash."""

        answers = self.probe()

        def started() -> bool:
            if process.poll() is not None:
                raise self._start_failure(f"exited with code {process.returncode}")
            return answers()

        if not await_condition(started, START_SECONDS):
            raise self._start_failure(f"did not answer within {START_SECONDS:.0f} seconds")

    def _start_failure(self, what: str) -> ServerError:
        tail = re.sub(r"(?m)^", "  ", self.log_tail())
        return ServerError(
            f"{self.name} in {self.directory} {what}. The end of its log:\n{tail}",
            "Fix the problem that the log shows: for example a setting, a port in use, or a full disk.",
        )
