"""The pipeline's state location: small JSON files, each replaced as a whole.

All files except requests can be rebuilt, because the sink's commit record is authoritative. Jobs write heartbeats and
progress into the state, the command line and Airflow read it, and it has the requests to a running job.
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
"""Names that Spark creates in a checkpoint; the last are checksums and files that are not yet renamed."""


_CHECKPOINTS = "checkpoint"
_log = logging.getLogger(__name__)


class State:
    """The files below a pipeline's ``state`` URL.

    Every error of an fsspec implementation becomes :class:`.StateUnwritable`; those of object stores have their own
    classes.

    :param url: any fsspec URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except Exception as e:  # a package is missing, or the protocol is unknown
            raise StateUnwritable(f"state {self.url} cannot be used: {e}", state_remedy(None)) from e

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in file ``name``, as :meth:`read_as` does."""
        return self.read_as(name, dict[str, Any])

    def read_as(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Parse the JSON object in file ``name``; ``None`` if there is no such file.

        :param parse: converts the object; raises an error if the object has another structure.
        :raises StateDamaged: if the file has no such object.
        :raises StateUnwritable: if the file cannot be read.
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
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as e:
            raise self._damaged(name, "it is not a complete JSON object") from e
        try:
            return parse(found)
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            raise self._damaged(name, f"{type(e).__name__} {e}") from e

    def read_sound(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Parse a file as :meth:`read_as` does, but log and ignore a damaged file, because it will be written again."""
        try:
            return self.read_as(name, parse)
        except StateDamaged as e:
            _warn_once(f"{e.message}. The file is ignored. {e.solution}")
            return None

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace file ``name`` by a JSON object, atomically.

        :raises StateUnwritable: if it cannot be written.
        """
        self.put(name, json.dumps(value, indent=1).encode())

    def put(self, name: str, data: bytes) -> str:
        """Replace file ``name`` atomically, and return its URL.

        :raises StateUnwritable: if it cannot be written.
        """
        path = f"{self._root}/{name}"
        try:
            if self._local:
                try:
                    _write(Path(path), data, Path(self._root))
                except FileNotFoundError:  # another run has just ended and removed the empty folder
                    _write(Path(path), data, Path(self._root))
            else:
                self._close_to_others()
                self._fs.pipe_file(path, data)
        except Exception as e:
            raise self._unusable("written", name, e) from e
        return f"{self.url}/{name}"

    def is_made(self) -> bool:
        """Return whether the location exists, even if it is empty."""
        try:
            return bool(self._fs.isdir(self._root))
        except Exception as e:
            raise self._unusable("read", "", e) from e

    def version(self, name: str) -> str | None:
        """Return a text that changes when file ``name`` is replaced; ``None`` if there is no such file."""
        try:
            return repr(self._fs.info(f"{self._root}/{name}", refresh=True))
        except FileNotFoundError:
            return None
        except Exception as e:
            raise self._unusable("read", name, e) from e

    def exists(self) -> bool:
        """Return whether the state has anything except announcements of runs that are about to begin."""
        return any(name != "/starting" for name in self.names(""))

    def names(self, folder: str) -> list[str]:
        """Return the sorted names, relative to the state, of the files in ``folder``."""
        try:
            paths = self._fs.ls(f"{self._root}/{folder}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except Exception as e:
            raise self._unusable("listed", folder, e) from e
        names = (str(path).rsplit("/", 1)[-1] for path in paths)
        return sorted(f"{folder}/{name}" for name in names if not name.startswith("."))

    def entries(self, folder: str) -> list[str] | None:
        """Return the sorted names of all entries of ``folder``; ``None`` if it is a file.

        :param folder: path relative to the state; empty for the state itself.
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
        """Remove a folder if it is empty; object stores have no folders.

        :param folder: path relative to the state; empty for the state itself, which is kept if it is a whole bucket.
        """
        path = f"{self._root}/{folder}".rstrip("/")
        if "/" not in path:
            return
        with contextlib.suppress(Exception):  # it is not empty, does not exist, or is not a folder
            if self._fs.isdir(path) and not self._fs.ls(path, detail=False, refresh=True):
                self._fs.rmdir(path)
                if self._fs.isdir(path):  # rmdir of fsspec's WebHDFS has no effect
                    self._fs.rm(path)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        path = f"{self._root}/{name}"
        try:
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)
        except FileNotFoundError:  # another process has removed it
            return
        except Exception as e:
            raise self._unusable("removed", name, e) from e

    def new_checkpoint(self, epoch: int) -> str:
        """Return a unique URL for the checkpoint of a Spark query, and remove checkpoints of earlier queries.

        A query whose run has lost its epoch continues to write until it notices. A later query removes its files.

        :param epoch: the epoch of the query's run; checkpoints of later epochs are kept.
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
            f"{self.url}/{name} has contents that the engine did not write: {why}",
            f"Delete that file: `rm -r '{self._root}/{name}'`." if self._local else f"Delete {self.url}/{name}.",
        )

    def _close_to_others(self) -> None:
        """Create the location in HDFS so that no other user can read it; object stores have no modes."""
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
    """Return the remedy for a state location that cannot be used.

    :param number: the operating system's error number; ``None`` without one, as for object stores.
    """
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on the disk of the state, or raise the quota there, then start again."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            "Allow this user to write there (`chown`, `chmod`, a file system that is not mounted read-only), or set"
            " `state` to another location."
        )
    return "Set `state` to a location that this user can write, and that driver and Airflow can both reach."


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
