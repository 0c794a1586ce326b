"""The pipeline's state location: small JSON files, each replaced whole.

Everything in here can be rebuilt but requests: the ground truth is the sink's
commit record. Jobs report through it (heartbeat and progress), the command line
and Airflow read it, and requests to a running job are left in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from airflow_cdc_provider.engine.core.errors import StateDamaged, StateUnwritable
from airflow_cdc_provider.engine.state.private_files import make_folder, open_file

T = TypeVar("T")
SPARKS = re.compile(r"metadata|offsets|commits|sources|state|[.]metadata[.].*")
"""What Spark makes in a checkpoint; the last for sums of the file and for what it has not renamed yet."""


_CHECKPOINTS = "checkpoint"
_log = logging.getLogger(__name__)


class State:
    """The files below a pipeline's ``state`` URL.

    Whatever an implementation of fsspec raises, those of object stores have classes of their own, becomes
    :class:`.StateUnwritable`.

    :param url: any fsspec URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except Exception as e:  # a package is missing, or nothing knows the protocol
            raise StateUnwritable(f"state {self.url} cannot be used: {e}", state_remedy(None)) from e

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in file ``name``, as :meth:`read_as`."""
        return self.read_as(name, dict[str, Any])

    def read_as(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Return what the JSON object in file ``name`` stands for, ``None`` when there is no such file.

        :param parse: reads the object; what it raises tells that it is of another shape.
        :raises StateDamaged: when the file holds no such object.
        :raises StateUnwritable: when the file cannot be read.
        """
        try:
            data = self._fs.cat_file(f"{self._root}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError as e:
            raise self._damaged(name, "it is a folder") from e
        except Exception as e:
            raise self._unusable("read", name, e) from e
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as e:
            raise self._damaged(name, "it is no JSON object, or a part of one") from e
        try:
            return parse(found)
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            raise self._damaged(name, f"{type(e).__name__} {e}") from e

    def read_sound(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """As :meth:`read_as`, but a damaged file counts as none, and is named in the log: it will be written again."""
        try:
            return self.read_as(name, parse)
        except StateDamaged as e:
            _warn_once(f"{e.message}. It is left out. {e.solution}")
            return None

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
                try:
                    _write(Path(path), data, Path(self._root))
                except FileNotFoundError:  # another run has just ended, and removed the empty folder
                    _write(Path(path), data, Path(self._root))
            else:
                self._close_to_others()
                self._fs.pipe_file(path, data)
        except Exception as e:
            raise self._unusable("written", name, e) from e
        return f"{self.url}/{name}"

    def is_made(self) -> bool:
        """Return whether the location is there, be it empty."""
        try:
            return bool(self._fs.isdir(self._root))
        except Exception as e:
            raise self._unusable("read", "", e) from e

    def version(self, name: str) -> str | None:
        """Return a text that changes when file ``name`` is replaced; ``None`` when there is no such file."""
        try:
            return repr(self._fs.info(f"{self._root}/{name}", refresh=True))
        except FileNotFoundError:
            return None
        except Exception as e:
            raise self._unusable("read", name, e) from e

    def exists(self) -> bool:
        """Return whether there is anything in the state but what runs say that are about to begin."""
        return any(name != "/starting" for name in self.names(""))

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

    def entries(self, folder: str) -> list[str] | None:
        """Return the names of all that is in ``folder``, sorted; ``None`` when that is a file.

        :param folder: relative to the state; empty for that itself.
        """
        path = f"{self._root}/{folder}".rstrip("/")
        try:
            found = self._fs.ls(path, detail=True, refresh=True)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            return None
        except Exception as e:
            raise self._unusable("listed", folder, e) from e
        inside = [each for each in found if str(each["name"]).rstrip("/") != path]  # stores may list a folder in itself
        if any(each["type"] == "file" for each in found if each not in inside):
            return None
        return sorted(str(each["name"]).rstrip("/").rpartition("/")[2] for each in inside)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder if nothing is in it; object stores have none.

        :param folder: relative to the state; empty for that itself, unless it is a whole bucket.
        """
        path = f"{self._root}/{folder}".rstrip("/")
        if "/" not in path:
            return
        with contextlib.suppress(Exception):  # it is not empty, not there, or no folder
            if self._fs.isdir(path) and not self._fs.ls(path, detail=False, refresh=True):
                self._fs.rmdir(path)
                if self._fs.isdir(path):  # WebHDFS of fsspec does nothing there
                    self._fs.rm(path)

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it holds, if it exists."""
        path = f"{self._root}/{name}"
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
        if self._local:
            make_folder(Path(self._root) / _CHECKPOINTS, Path(self._root))
        for name in self.names(_CHECKPOINTS):
            folder = name.rpartition("/")[2]
            if SPARKS.fullmatch(folder) or (folder.isdigit() and int(folder) <= epoch):
                with contextlib.suppress(StateUnwritable):
                    self.remove(name)
        return f"{self.url}/{_CHECKPOINTS}/{epoch}/{uuid.uuid4().hex}"

    def _damaged(self, name: str, why: str) -> StateDamaged:
        return StateDamaged(
            f"{self.url}/{name} does not hold what the engine writes there: {why}",
            f"Delete that file: `rm -r '{self._root}/{name}'`." if self._local else f"Delete {self.url}/{name}.",
        )

    def _close_to_others(self) -> None:
        """Make the location so that nobody else reads it, where it is in HDFS: object stores have no modes."""
        if "webhdfs" in self._protocols and not self._fs.exists(self._root):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.chmod(self._root, "700")

    @property
    def _local(self) -> bool:
        return "file" in self._protocols

    @property
    def _protocols(self) -> tuple[str, ...]:
        return self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)

    def _unusable(self, what: str, name: str, error: Exception) -> StateUnwritable:
        reason = getattr(error, "strerror", None) or str(error)
        number = getattr(error, "errno", None)
        return StateUnwritable(
            f"{self.url}/{name} cannot be {what}: {reason}",
            state_remedy(number),
        )


def state_remedy(number: int | None) -> str:
    """Return what to do about a state location that cannot be used.

    :param number: the operating system's error number; ``None`` where there is none, as of object stores.
    """
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Make room on the disk of the state, or raise the quota there, then start again."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            "Let this user write there (`chown`, `chmod`, a file system that is not mounted read-only), or give `state`"
            " another location."
        )
    return "Give the pipeline a state location that this user can write, and that driver and Airflow both reach."


@lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _write(path: Path, data: bytes, root: Path) -> None:
    make_folder(path.parent, root)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "wb", opener=open_file) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
