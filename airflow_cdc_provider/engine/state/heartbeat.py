"""Heartbeats of jobs: what each says of itself every few seconds, and whether it lives."""

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
"""Names of parts of a run, and of the command that it begins with."""


STALE_SECONDS = 30.0
"""A job whose heartbeat is older is taken for dead."""


@dataclass(frozen=True)
class Owner:
    """A process, identified well enough to tell whether it is still the same and alive.

    :param started: start time of the process in clock ticks since boot, which guards against reuse of its id.
    """

    host: str
    pid: int
    started: int

    @classmethod
    @cache
    def this(cls) -> Owner:
        """The current process."""
        return cls(_host(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def lives(self) -> bool | None:
        """Whether the process runs; ``None`` when it is of another host."""
        return _started(self.pid) == self.started if self.host == _host() else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Heartbeat:
    """What a job says of itself every few seconds.

    :param part: ``stream``, ``snapshot`` …
    :param at: seconds since 1970.
    :param ended: whether the job has ended in an orderly way.
    :param progress: what the job has done, see ``status``.
    :param submission: id of the job's submission, see :mod:`.submission`; ``None`` if nobody submitted it.
    :param application: id of its Spark application; ``None`` before that has begun, and of parts that need none.
    :param ui: address of the application's web UI; ``None`` also where that is switched off.
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
        """Whether the job must be taken for alive: on this host by its process, elsewhere by its age."""
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
    "waiting": str | None,
}
"""What of a job's progress others rely on, and its type; what else stands there is only shown."""


def read_heartbeats(state: State) -> list[Heartbeat]:
    """The heartbeats of all jobs of a pipeline, dead ones included."""
    parts = (name.rpartition("/")[2].removesuffix(".json") for name in state.names("jobs"))
    found = (read_heartbeat(state, part) for part in parts)
    return [beat for beat in found if beat is not None]


def read_heartbeat(state: State, part: str) -> Heartbeat | None:
    """Return the last heartbeat of a part; ``None`` too when its file is damaged, which the next one replaces."""
    return state.read_sound(f"jobs/{part}.json", heartbeat_of)


def heartbeat_of(values: dict[str, Any]) -> Heartbeat:
    """Return the heartbeat that a file holds."""
    for name in _PROGRESS.keys() & values["progress"]:
        as_type(values["progress"][name], _PROGRESS[name], f"progress.{name}")
    return as_shape(Heartbeat, values)


def write_heartbeat(state: State, heartbeat: Heartbeat) -> None:
    """Replace the heartbeat of a job, unless it is that of a later run, which is alive: this one has been overtaken."""
    found = None
    with contextlib.suppress(StateUnwritable):  # writing says more
        found = read_heartbeat(state, heartbeat.part)
    if found is None or found.epoch <= heartbeat.epoch or not found.alive:
        state.write(f"jobs/{heartbeat.part}.json", asdict(heartbeat))


def forget_heartbeats(state: State, epoch: int, prefix: str) -> None:
    """Remove heartbeats that parts of earlier runs have left, whose names will not come again.

    :param prefix: with which the parts' names begin.
    """
    for beat in read_heartbeats(state):
        if beat.part.startswith(prefix) and beat.epoch < epoch and not beat.alive:
            state.remove(f"jobs/{beat.part}.json")


@cache
def _host() -> str:
    """Name of this host, of this boot of it, and of what its process ids are valid in: a container has its own."""
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
