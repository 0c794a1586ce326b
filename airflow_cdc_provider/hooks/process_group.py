"""A group of processes that ends as a whole, even if its owner is killed.

A Spark job in client mode consists of a shell, a JVM, a Python driver and Python workers. If only the JVM is killed,
the driver remains and continues to write. The group's leader is a guard: a shell that waits on a pipe from the owner.
The pipe closes however the owner ends, and the guard then ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from types import TracebackType
from typing import Self

import psutil

from airflow_cdc_provider.engine.core.waiting import await_condition

# The guard ignores the signals that end the other processes, and is ended last by the KILL to its own group.
_GUARD = 'trap \'\' TERM INT HUP; read -r line; kill -TERM 0; sleep 3; [ -z "$1" ] || rm -rf -- "$1"; kill -KILL 0'
_POLL_SECONDS = 0.05


class ProcessGroup:
    """A new process group, as a context manager; no member is alive after the block.

    Start members with ``Popen(..., process_group=group.id)``.

    :param directory: a directory that is removed with the group if the owner is killed.
    """

    def __init__(self, directory: str = "") -> None:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def id(self) -> int:
        """Return the group's id, which no other group can get before the end of the block."""
        return self._guard.pid

    def members(self) -> set[psutil.Process]:
        """Return the living processes of the group and their descendants, which may be in other groups."""
        members = set()
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == self.id and process.pid != self.id:
                    members |= {process, *process.children(recursive=True)}
        return {process for process in members if _lives(process)}

    def await_end(self, seconds: float) -> bool:
        """Wait for the members to end, and return whether they did in time."""
        return _await_end(self.members(), seconds)

    def end(self, grace: float) -> None:
        """Send SIGTERM to the group, and SIGKILL to processes that are still alive after ``grace`` seconds."""
        members = self.members()
        if not members:
            return
        self._signal(signal.SIGTERM)
        if _await_end(members, grace):
            return
        for process in members | self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _await_end(members, grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(grace=2.0)
        self._signal(signal.SIGKILL)
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.id, number)


def _lives(process: psutil.Process) -> bool:
    """Return whether the process runs; a process that has ended and waits to be reaped does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _await_end(processes: set[psutil.Process], seconds: float) -> bool:
    # psutil's own wait would reap children of this process, so that Popen could not get their exit code.
    return await_condition(lambda: not any(map(_lives, processes)), seconds, _POLL_SECONDS)
