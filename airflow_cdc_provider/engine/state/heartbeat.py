"""Heartbeats of jobs: the reports that each job writes every few seconds, and whether it is alive."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.core.typed_json import as_shape, as_type
from airflow_cdc_provider.engine.state.files import State

STREAM, RESNAPSHOT, PROVISION = "stream", "resnapshot", "provision"
"""Names of parts of a run, and of the command that a run begins with."""


STALE_SECONDS = 30.0
"""Seconds after its last heartbeat when a job counts as dead."""


@dataclass(frozen=True)
class Owner:
    """A process, with enough information to determine whether it is still the same and alive.

    :param started: start time of the process in clock ticks since boot; detects that its id was reused.
    """

    host: str
    pid: int
    started: int

    @classmethod
    @cache
    def this(cls) -> Owner:
        """Return the current process."""
        return cls(_host(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def lives(self) -> bool | None:
        """Return whether the process runs; ``None`` if it is on another host."""
        return _started(self.pid) == self.started if self.host == _host() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Heartbeat:
    """The report that a job writes every few seconds.

    :param part: ``stream``, ``snapshot`` …
    :param at: time in seconds since 1970.
    :param ended: whether the job has ended in an orderly way.
    :param progress: the work that the job has done, see ``status``.
    :param submission: id of the job's submission, see :mod:`.submission`; ``None`` if it was not submitted.
    :param application: id of its Spark application; ``None`` before it has started, and for parts that need none.
    :param ui: address of the application's web UI; ``None`` also if the UI is disabled.
    """

    owner: Owner
    part: str
    epoch: int
    at: float
    ended: bool
    progress: dict[str, Any]
    submission: str | None = None
    application: str | None = None
    ui: str | None = None

    @property
    def alive(self) -> bool:
        """Return whether the job counts as alive: by its process on this host, by the heartbeat's age elsewhere."""
        if self.ended:
            return False
        lives = self.owner.lives
        return time.time() - self.at < STALE_SECONDS if lives is None else lives


@dataclass(frozen=True)
class _Restart:
    attempt: int
    of: int
    next_attempt_at: float
    error: dict[str, str]


@dataclass(frozen=True)
class _Activity:
    inserts: int
    updates: int
    deletes: int
    per_minute: tuple[int, int, int]
    changed_at: float
    applied_at: float


_PROGRESS: dict[str, Any] = {
    **dict.fromkeys(("changes", "chunks", "finished", "rows", "restarts", "seconds"), float),
    **dict.fromkeys(("lag_bytes", "lag_seconds", "rows_per_second", "eta_seconds", "batch_seconds"), float | None),
    **dict.fromkeys(("finished_chunks", "running_chunks"), list[tuple[str, int, int]]),
    "acknowledgement_seconds": float | None,
    "progressed": bool,
    "applied_lsn": str | None,
    "slot": dict[str, Any] | None,
    "tables": dict[str, int],
    "restart": _Restart,
    "activity": dict[str, _Activity],
    "views": list[dict[str, Any]],
    "waiting": str | None,
}
"""The types of those values in a job's progress that other code relies on; further values are only shown."""


def read_heartbeats(state: State) -> list[Heartbeat]:
    """Return the heartbeats of all jobs of a pipeline, dead ones included."""
    parts = (name.rpartition("/")[2].removesuffix(".json") for name in state.names("jobs"))
    found = (read_heartbeat(state, part) for part in parts)
    return [beat for beat in found if beat is not None]


def read_heartbeat(state: State, part: str) -> Heartbeat | None:
    """Return the last heartbeat of a part; ``None`` also if its file is damaged, which the next heartbeat replaces."""
    return state.read_sound(f"jobs/{part}.json", heartbeat_of)


def heartbeat_of(values: dict[str, Any]) -> Heartbeat:
    """Parse the heartbeat in a file."""
    for name in _PROGRESS.keys() & values["progress"]:
        as_type(values["progress"][name], _PROGRESS[name], f"progress.{name}")
    return as_shape(Heartbeat, values)


def write_heartbeat(state: State, heartbeat: Heartbeat) -> None:
    """Replace the heartbeat of a job, unless the existing one belongs to a later run that is alive."""
    found = None
    with contextlib.suppress(StateUnwritable):  # the error of writing is more useful
        found = read_heartbeat(state, heartbeat.part)
    if found is None or found.epoch <= heartbeat.epoch or not found.alive:
        state.write(f"jobs/{heartbeat.part}.json", asdict(heartbeat))


def forget_heartbeats(state: State, epoch: int, prefix: str) -> None:
    """Remove heartbeats of parts of earlier runs whose names will not be used again.

    :param prefix: the prefix of the parts' names.
    """
    for beat in read_heartbeats(state):
        if beat.part.startswith(prefix) and beat.epoch < epoch and not beat.alive:
            state.remove(f"jobs/{beat.part}.json")


@cache
def _host() -> str:
    """Return an identifier of this host, its current boot, and the namespace of its process ids, as in containers."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    booted = boot.read_text().strip()[:8] if boot.exists() else ""
    return f"{socket.gethostname()}/{booted}/{space.readlink() if space.is_symlink() else ''}"


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def is_streaming(state: State) -> bool:
    return any(beat.alive and beat.part == STREAM for beat in read_heartbeats(state))
