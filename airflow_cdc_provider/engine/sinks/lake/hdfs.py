"""HDFS through its REST interface, with atomic writes of files like those of an object store.

HDFS has no such writes, but a rename is one step of the NameNode, which replaces a file only on request. So a file is
written under a temporary name next to its final name, and then renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
from fsspec.implementations.webhdfs import WebHDFS

from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.lake.temporary_names import temporary_name

_SECONDS = 60.0
"""Seconds to wait for an answer; by default, requests would wait forever."""

_READINGS = 5

_KINDS = {
    "FileNotFoundException": FileNotFoundError,
    "AccessControlException": PermissionError,
    "SecurityException": PermissionError,
}


class BrokenOff(OSError):
    """A truncated answer, or an error of a DataNode or NameNode that is not a refusal."""


class Hdfs(WebHDFS):  # type: ignore[misc]
    """fsspec's file system for ``webhdfs://``, with the same configuration and stricter error handling."""

    def _connect(self) -> None:
        super()._connect()
        self.session.request = partial(_answer, self.session.request)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path)) or "/"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a whole file.

        :param mode: ``create`` to write it only if it does not exist.
        :raises FileExistsError: when it exists in that mode.
        """
        temporary = temporary_name(path)
        try:
            self._write(temporary, value)
            failpoint("before-link")
            # Without an option, the NameNode answers whether it has renamed. With one, which fsspec does not support,
            # it answers nothing or an error. Gateways that do not know options proceed as if there were none.
            options = {} if mode == "create" else {"renameoptions": "OVERWRITE"}
            answer = self._call("RENAME", "put", temporary, destination=path, **options)
        except BaseException:
            with suppress(OSError):
                self.rm(temporary)  # a rename whose answer was lost must not take effect later
            raise
        failpoint("after-link")
        if answer.content and not answer.json()["boolean"]:
            self.rm(temporary)
            if mode == "create":
                raise FileExistsError(path)
            raise OSError("the gateway cannot replace a file, although the NameNode can")

    def _write(self, path: str, value: bytes) -> None:
        """Create a file with one write. Creating an empty file and appending, like fsspec, suits large files only."""
        location = self._call("CREATE", "put", path, redirect=False).headers["Location"]
        headers = {"content-type": "application/octet-stream"}
        self.session.put(self._apply_proxy(location), data=value, headers=headers)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read a file with one request, so that its length and content match even if it is replaced meanwhile.

        If a DataNode loses the file while reading because it was replaced, the answer is truncated. The file is then
        read again from the beginning.
        """
        bounds = {"offset": start or 0} | ({} if end is None else {"length": end - (start or 0)})
        for _reading in range(_READINGS - 1):
            with suppress(BrokenOff):
                return self._read(path, bounds)
        return self._read(path, bounds)

    def _read(self, path: str, bounds: Mapping[str, int]) -> bytes:
        answer = self._call("OPEN", path=path, redirect=False, **bounds)
        if "Location" in answer.headers:
            answer = self.session.get(self._apply_proxy(answer.headers["Location"]))
        return bytes(answer.content)

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether a file or folder exists; fsspec would treat any error as a no."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def find(self, path: str, **_: Any) -> list[str]:
        """Return all files below a folder; fsspec would omit folders that it fails to list."""
        found: list[str] = []
        folders = [path]
        while folders:
            with suppress(FileNotFoundError):
                for info in self.ls(folders.pop(), detail=True):
                    (folders if info["type"] == "directory" else found).append(info["name"])
        return sorted(found)


def _answer(request: Callable[..., requests.Response], method: str, url: str, **given: Any) -> requests.Response:
    """Return an answer of NameNode or DataNode, or raise its error; fsspec would treat a DataNode's error as file
    content.

    Messages do not contain URLs, which may include a token.
    """
    try:
        answer = request(method=method, url=url, timeout=_SECONDS, **given)
    except requests.RequestException as e:
        broken = isinstance(e, requests.exceptions.ChunkedEncodingError)
        said = f"no answer from {urlsplit(url).netloc} ({type(e).__name__})"
        raise (BrokenOff if broken else OSError)(said) from None
    if answer.status_code < 400:
        return answer
    try:
        remote = answer.json()["RemoteException"]
        kind, message = _KINDS.get(remote["exception"], BrokenOff), str(remote["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        kind = PermissionError if answer.status_code == 401 else OSError
        message = f"HTTP {answer.status_code} {answer.reason} from {urlsplit(url).netloc}"
    raise kind(message)
