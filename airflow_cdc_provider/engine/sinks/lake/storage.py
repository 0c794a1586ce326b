"""A folder of files, local, in an object store or in HDFS, and the few operations that commits are made of.

The one that matters is :meth:`Place.create`: it makes a file with its whole content if there is none of that name, and
otherwise nothing, whoever else tries at the same moment. File systems in which that cannot be had are refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.lake.temporary_names import TEMPORARY, beside

LOCAL = frozenset({"file", "local"})
CREATING = LOCAL | {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "webhdfs"}
"""Protocols of the file systems that create a file only if it is absent, as one step."""


_UNFINISHED_SECONDS = 3600.0
_memory = threading.Lock()


@dataclass(frozen=True)
class Place:
    """A folder; the names of its files are relative, with slashes.

    :param url: any URL that fsspec knows, or a local path.
    """

    url: str

    def __truediv__(self, name: str) -> Place:
        """A folder below."""
        return Place(f"{self.url.rstrip('/')}/{name}")

    @property
    def local(self) -> bool:
        """Whether it is a folder of a local, or mounted, file system."""
        return bool(LOCAL & set(self._protocols))

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return protocol if isinstance(protocol, tuple) else (protocol,)

    @property
    def _fs(self) -> Any:
        return self._located[0]

    @property
    def _located(self) -> tuple[Any, str]:
        """The file system, and the path that it has for the folder."""
        if self.url.startswith("webhdfs://"):
            from airflow_cdc_provider.engine.sinks.lake.hdfs import Hdfs

            return Hdfs(**Hdfs._get_kwargs_from_urls(self.url)), Hdfs._strip_protocol(self.url)
        system, path = fsspec.core.url_to_fs(self.url)
        return system, str(path)

    def path(self, name: str = "") -> str:
        """The path of a file, as its file system has it, without a protocol."""
        root = self._located[1].rstrip("/")
        return f"{root}/{name}" if name else root

    def location(self, name: str) -> str:
        """The URL of a file, or its path where it is local: what readers are told."""
        return self.path(name) if self.local else f"{self.url.rstrip('/')}/{name}"

    def require_create(self) -> None:
        """Try that files are created only if they are absent.

        :raises ConfigError: when the file system cannot do that.
        :raises CdcError: when it cannot be written.
        """
        solution = (
            "Use a local or mounted path with hard links, or s3://, gs:// or abfs://, whose stores create an object"
            " only if it is absent; a sink of type files also takes HDFS, by webhdfs://namenode:9870/path."
        )
        protocol = self.url.partition("://")[0] if "://" in self.url else "file"
        if protocol not in CREATING:
            raise ConfigError(f"{self.url}: {protocol} cannot create a file only if it is absent", solution)
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            if not self.create(probe, b"1") or self.create(probe, b"2") or self.read(probe) != b"1":
                raise ConfigError(f"{self.url}: a file was created twice", solution)
            self.replace(probe, b"3")
        finally:
            self.remove(probe)

    def create(self, name: str, data: bytes) -> bool:
        """Make a file with its whole content, durably, unless there is one of that name.

        :param data: such as nobody else writes to that name, so that a file that was made tells by whom.
        :returns: whether it was made.
        """
        with self._told("written", name):
            try:
                if self.local:
                    _link(Path(self.path(name)), data)
                    return True
                with _memory if "memory" in self._protocols else contextlib.nullcontext():
                    self._fs.pipe_file(self.path(name), data, mode="create")
                return True
            except FileExistsError:
                if self.local:
                    return False
                return self.read(name) == data  # a request is sent again when its answer is lost
            except Exception:
                found = self.read(name)
                if found is None:
                    raise
                return found == data

    def replace(self, name: str, data: bytes) -> None:
        """Make or replace a file, durably; a reader sees the old content or the new."""
        with self._told("written", name):
            path = self.path(name)
            if self.local:
                temporary = _temporary(Path(path), data)
                temporary.replace(path)
                _sync_directory(Path(path).parent)
            else:
                self._fs.pipe_file(path, data)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A new file to write to, which is durable at the end of the block, and gone if that fails."""
        try:
            with self._told("written", name):
                path = self.path(name)
                if self.local:
                    _make_directory(Path(path).parent)
                file = self._fs.open(path, "wb")
            try:
                yield cast(IO[bytes], _Written(file, lambda: self._told("written", name)))
            except BaseException:
                _abandon(file)
                raise
            with self._told("written", name):
                file.close()
                if self.local:
                    with Path(path).open("rb") as written:
                        os.fsync(written.fileno())
                    _sync_directory(Path(path).parent)
        except BaseException:
            with contextlib.suppress(CdcError):
                self.remove(name)
            raise

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """A file to read from."""
        with self._told("read", name), self._fs.open(self.path(name), "rb") as file:
            yield file

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """The content of a file, ``None`` when there is none.

        :param limit: bytes to read at most.
        """
        with self._told("read", name):
            try:
                # By name, as s3fs has another parameter before them.
                bounds = {} if limit is None else {"start": 0, "end": limit}
                return bytes(self._fs.cat_file(self.path(name), **bounds))
            except FileNotFoundError:
                return None

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders in a folder, sorted, those not included that are being made."""
        return sorted(name for name in self._listed(folder) if not name.startswith(TEMPORARY))

    def _listed(self, folder: str) -> set[str]:
        with self._told("listed", folder):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self.path(folder), detail=False)
            except FileNotFoundError:
                return set()
        return {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}

    def files(self, folder: str = "") -> list[str]:
        """Names of all files below a folder, relative to the place, sorted."""
        with self._told("listed", folder):
            self._fs.invalidate_cache()
            root = f"{self.path()}/"
            found = (str(path) for path in self._fs.find(self.path(folder)))
            return sorted(path.removeprefix(root) for path in found)

    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970; ``None`` when it is gone."""
        with self._told("read", name):
            try:
                return float(self._fs.modified(self.path(name)).timestamp())
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        """Bytes of a file; ``None`` when there is none."""
        with self._told("read", name):
            try:
                self._fs.invalidate_cache()
                return int(self._fs.size(self.path(name)))
            except FileNotFoundError:
                return None

    def remove(self, name: str = "") -> None:
        """Remove a file, or a folder with all it holds, if it is there."""
        with self._told("removed", name), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            if self._fs.exists(self.path(name)):
                self._fs.rm(self.path(name), recursive=True)

    def remove_unfinished(self) -> None:
        """Remove what writers that have died have left of files that they were making in the folder."""
        for name in self._listed(""):
            if name.startswith(TEMPORARY):
                made = self.modified(name)
                if made is not None and time.time() - made > _UNFINISHED_SECONDS:
                    self.remove(name)

    @contextmanager
    def _told(self, what: str, name: str) -> Iterator[None]:
        """Say what the file system refuses; libraries of object stores have exceptions of their own."""
        try:
            yield
        except CdcError:
            raise
        except ImportError as e:
            raise ConfigError(
                f"{self.url} cannot be {what}: {e}", "Install the package that fsspec names, on executors, too."
            ) from e
        except PermissionError as e:
            raise MissingPrivilege(
                f"{self.url}/{name} cannot be {what}: {e.strerror or e}",
                "Let the user, or the role, that runs the pipeline read, write and delete there.",
            ) from e
        except Exception as e:
            reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise ConnectionFailed(
                f"{self.url}/{name} cannot be {what}: {reason}",
                "See that the store is there and has space, and that the driver and all executors reach it.",
            ) from e


class _Written:
    """A file that is being written to.

    :param told: says what its store refuses, see :meth:`Place._told`.
    """

    def __init__(self, file: IO[bytes], told: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._told = file, told

    def write(self, data: bytes) -> int:
        with self._told():
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _abandon(file: Any) -> None:
    """Close a file that is not to be kept, without completing it where that can be helped."""
    with contextlib.suppress(Exception):
        file.discard()
        file.closed = True
    with contextlib.suppress(Exception):
        file.close()


def _temporary(path: Path, data: bytes) -> Path:
    """Write what is to become a file beside it, durably."""
    _make_directory(path.parent)
    temporary = Path(beside(str(path)))
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _link(path: Path, data: bytes) -> None:
    """A hard link is made or it is not, and its file is whole by then; a rename would replace what is there."""
    temporary = _temporary(path, data)
    failpoint("before-link")
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()
    failpoint("after-link")
    _sync_directory(path.parent)


def _make_directory(path: Path) -> None:
    """Make a directory and those above, each of which is durable in the one that it is in."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
