"""The pipeline's state location: small JSON files, each replaced whole.

Everything in here can be rebuilt but requests: the ground truth is the sink's
commit record. Jobs report through it (heartbeat and progress), the command line
and Airflow read it, and requests to a running job are left in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fsspec

from airflow_cdc_provider.engine.errors import StateUnwritable

STALE_SECONDS = 30.0
"""A job whose heartbeat is older is taken for dead."""
_CHECKPOINTS = "checkpoint"


class State:
    """The files below a pipeline's ``state`` URL.

    Whatever an implementation of fsspec raises, those of object stores have classes of their own, becomes
    :class:`.StateUnwritable`.

    :param url: any fsspec URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.url)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in file ``name``, ``None`` when there is none."""
        try:
            return dict(json.loads(self._fs.cat_file(f"{self._root}/{name}")))
        except FileNotFoundError:
            return None
        except Exception as e:
            raise self._unusable("read", name, e) from e

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace file ``name`` by a JSON object, atomically.

        :raises StateUnwritable: when that is not possible.
        """
        self.put(name, json.dumps(value, indent=1).encode())

    def put(self, name: str, data: bytes) -> str:
        """Replace file ``name``, atomically, and return its URL.

        :raises StateUnwritable: when that is not possible.
        """
        path = f"{self._root}/{name}"
        try:
            if self._local:
                _replace(Path(path), data)
            else:
                self._fs.pipe_file(path, data)
        except Exception as e:
            raise self._unusable("written", name, e) from e
        return f"{self.url}/{name}"

    def names(self, folder: str) -> list[str]:
        """Names, relative to the state, of the files in ``folder``, sorted."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except Exception as e:
            raise self._unusable("listed", folder, e) from e
        names = (str(path).rsplit("/", 1)[-1] for path in paths)
        return sorted(f"{folder}/{name}" for name in names if not name.startswith("."))

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it holds, if it exists."""
        path = f"{self._root}/{name}" if name else self._root
        try:
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)
        except FileNotFoundError:  # another has removed it as well
            return
        except Exception as e:
            raise self._unusable("removed", name, e) from e

    def new_checkpoint(self, epoch: int) -> str:
        """URL for the checkpoint of a query of Spark, which no other query has; earlier ones are removed.

        A query of a run that is overtaken writes on until it notices. What it leaves, a later one removes.

        :param epoch: of the query's run; checkpoints of later ones are left alone.
        """
        for name in self.names(_CHECKPOINTS):
            folder = name.rpartition("/")[2]
            if not (folder.isdigit() and int(folder) > epoch):
                with contextlib.suppress(StateUnwritable):
                    self.remove(name)
        return f"{self.url}/{_CHECKPOINTS}/{epoch}/{uuid.uuid4().hex}"

    @property
    def _local(self) -> bool:
        return "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def _unusable(self, what: str, name: str, error: Exception) -> StateUnwritable:
        reason = getattr(error, "strerror", None) or str(error)
        return StateUnwritable(
            f"{self.url}/{name} cannot be {what}: {reason}",
            "Give the pipeline a state location that this user can write, and that driver and Airflow both reach.",
        )


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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


def read_heartbeats(state: State) -> list[Heartbeat]:
    """The heartbeats of all jobs of a pipeline, dead ones included."""
    parts = (name.rpartition("/")[2].removesuffix(".json") for name in state.names("jobs"))
    found = (read_heartbeat(state, part) for part in parts)
    return [beat for beat in found if beat is not None]


def read_heartbeat(state: State, part: str) -> Heartbeat | None:
    """The last heartbeat of a part."""
    values = state.read(f"jobs/{part}.json")
    return Heartbeat(**(values | {"owner": Owner(**values["owner"])})) if values else None


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
