"""A folder of files, local, in an object store or in HDFS, with the few operations that commits need.

The essential one is :meth:`Storage.create`. It creates a file with its whole content if no file of that name exists,
and otherwise does nothing, even if other processes try at the same moment. File systems that cannot do this are
refused.
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
from airflow_cdc_provider.engine.sinks.lake.temporary_names import TEMPORARY, temporary_name

LOCAL = frozenset({"file", "local"})
CREATING = LOCAL | {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "webhdfs"}
"""Protocols of file systems that can create a file only if it is absent, in one step."""


_UNFINISHED_SECONDS = 3600.0
_memory = threading.Lock()


@dataclass(frozen=True)
class Storage:
    """A folder; the names of its files are relative, with slashes.

    :param url: any URL for fsspec, or a local path.
    """

    url: str

    def __truediv__(self, name: str) -> Storage:
        """Return a folder below this one."""
        return Storage(f"{self.url.rstrip('/')}/{name}")

    @property
    def local(self) -> bool:
        """Return whether the folder is in a local or mounted file system."""
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
        """Return the file system, and its path of the folder."""
        if self.url.startswith("webhdfs://"):
            from airflow_cdc_provider.engine.sinks.lake.hdfs import Hdfs

            return Hdfs(**Hdfs._get_kwargs_from_urls(self.url)), Hdfs._strip_protocol(self.url)
        system, path = fsspec.core.url_to_fs(self.url)
        return system, str(path)

    def path(self, name: str = "") -> str:
        """Return the path of a file in its file system, without a protocol."""
        root = self._located[1].rstrip("/")
        return f"{root}/{name}" if name else root

    def location(self, name: str) -> str:
        """Return the URL of a file for readers, or its path if it is local."""
        return self.path(name) if self.local else f"{self.url.rstrip('/')}/{name}"

    def require_create(self) -> None:
        """Test that files are created only if they are absent.

        :raises ConfigError: when the file system cannot do that.
        :raises CdcError: when the folder is not writable.
        """
        solution = (
            "Use a local or mounted path with hard links, or s3://, gs:// or abfs://, whose stores create an object"
            " only if it is absent. Sinks of type files also support HDFS, with webhdfs://namenode:9870/path."
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
        """Create a file with its whole content, durably, unless a file of that name exists.

        :param data: content that no other process writes to that name, so that the file shows who created it.
        :returns: whether this call created it.
        """
        with self._translated_errors("written", name):
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
                return self.read(name) == data  # a request is repeated when its answer is lost
            except Exception:
                found = self.read(name)
                if found is None:
                    raise
                return found == data

    def replace(self, name: str, data: bytes) -> None:
        """Create or replace a file, durably; readers see either the old or the new content."""
        with self._translated_errors("written", name):
            path = self.path(name)
            if self.local:
                temporary = _temporary(Path(path), data)
                temporary.replace(path)
                _sync_directory(Path(path).parent)
            else:
                self._fs.pipe_file(path, data)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing; it is durable at the end of the block, and removed if the block fails."""
        try:
            with self._translated_errors("written", name):
                path = self.path(name)
                if self.local:
                    _make_directory(Path(path).parent)
                file = self._fs.open(path, "wb")
            try:
                yield cast(IO[bytes], _Written(file, lambda: self._translated_errors("written", name)))
            except BaseException:
                _abandon(file)
                raise
            with self._translated_errors("written", name):
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
        """Open a file for reading."""
        with self._translated_errors("read", name), self._fs.open(self.path(name), "rb") as file:
            yield file

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """Return the content of a file; ``None`` if it does not exist.

        :param limit: maximum number of bytes to read.
        """
        with self._translated_errors("read", name):
            try:
                # Passed by name, because s3fs has another parameter before them.
                bounds = {} if limit is None else {"start": 0, "end": limit}
                return bytes(self._fs.cat_file(self.path(name), **bounds))
            except FileNotFoundError:
                return None

    def names(self, folder: str = "") -> list[str]:
        """Return names of the files and folders in a folder, sorted, without unfinished files."""
        return sorted(name for name in self._listed(folder) if not name.startswith(TEMPORARY))

    def _listed(self, folder: str) -> set[str]:
        with self._translated_errors("listed", folder):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self.path(folder), detail=False)
            except FileNotFoundError:
                return set()
        return {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}

    def files(self, folder: str = "") -> list[str]:
        """Return names of all files below a folder, relative to this one, sorted."""
        with self._translated_errors("listed", folder):
            self._fs.invalidate_cache()
            root = f"{self.path()}/"
            found = (str(path) for path in self._fs.find(self.path(folder)))
            return sorted(path.removeprefix(root) for path in found)

    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds since 1970; ``None`` if it does not exist."""
        with self._translated_errors("read", name):
            try:
                return float(self._fs.modified(self.path(name)).timestamp())
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; ``None`` if it does not exist."""
        with self._translated_errors("read", name):
            try:
                self._fs.invalidate_cache()
                return int(self._fs.size(self.path(name)))
            except FileNotFoundError:
                return None

    def remove(self, name: str = "") -> None:
        """Remove a file, or a folder with its contents, if it exists."""
        with self._translated_errors("removed", name), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            if self._fs.exists(self.path(name)):
                self._fs.rm(self.path(name), recursive=True)

    def remove_unfinished(self) -> None:
        """Remove unfinished files that dead writers have left in the folder."""
        for name in self._listed(""):
            if name.startswith(TEMPORARY):
                made = self.modified(name)
                if made is not None and time.time() - made > _UNFINISHED_SECONDS:
                    self.remove(name)

    @contextmanager
    def _translated_errors(self, what: str, name: str) -> Iterator[None]:
        """Translate errors of the file system; libraries of object stores have their own exceptions."""
        try:
            yield
        except CdcError:
            raise
        except ImportError as e:
            raise ConfigError(
                f"{self.url} cannot be {what}: {e}", "Install the package that fsspec names, also on executors."
            ) from e
        except PermissionError as e:
            raise MissingPrivilege(
                f"{self.url}/{name} cannot be {what}: {e.strerror or e}",
                "Allow the user or role that runs the pipeline to read, write and delete there.",
            ) from e
        except Exception as e:
            reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
            raise ConnectionFailed(
                f"{self.url}/{name} cannot be {what}: {reason}",
                "Check that the store runs and has space, and that the driver and all executors can reach it.",
            ) from e


class _Written:
    """A file that is being written.

    :param translated_errors: translates errors of the store, see :meth:`Storage._translated_errors`.
    """

    def __init__(self, file: IO[bytes], translated_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._translated_errors = file, translated_errors

    def write(self, data: bytes) -> int:
        with self._translated_errors():
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _abandon(file: Any) -> None:
    """Close a file that is to be discarded, without completing it if possible."""
    with contextlib.suppress(Exception):
        file.discard()
        file.closed = True
    with contextlib.suppress(Exception):
        file.close()


def _temporary(path: Path, data: bytes) -> Path:
    """Write the content of a file to a temporary file next to it, durably."""
    _make_directory(path.parent)
    temporary = Path(temporary_name(str(path)))
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _link(path: Path, data: bytes) -> None:
    """Create a hard link to a complete file, which fails if the name exists; a rename would replace the
    existing file.
    """
    temporary = _temporary(path, data)
    failpoint("before-link")
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()
    failpoint("after-link")
    _sync_directory(path.parent)


def _make_directory(path: Path) -> None:
    """Create a directory and its parents, each durable in its own parent."""
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
