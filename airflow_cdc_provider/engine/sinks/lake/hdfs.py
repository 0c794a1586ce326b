"""HDFS by its REST interface, with files that come whole or not at all, as an object store's do.

HDFS has no such writes, but a rename is one step of the NameNode: it replaces no file unless it is told to. So a file
is written under another name beside its own, which it then gets.
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
from airflow_cdc_provider.engine.sinks.lake.temporary_names import beside

_SECONDS = 60.0
"""How long an answer is waited for; by itself, requests would for ever."""

_READINGS = 5

_KINDS = {
    "FileNotFoundException": FileNotFoundError,
    "AccessControlException": PermissionError,
    "SecurityException": PermissionError,
}


class BrokenOff(OSError):
    """An answer that ended before its end, or an error of a DataNode or NameNode that is no refusal."""


class Hdfs(WebHDFS):  # type: ignore[misc]
    """What fsspec has for ``webhdfs://``, configured as that is, and more careful."""

    def _connect(self) -> None:
        super()._connect()
        self.session.request = partial(_answer, self.session.request)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path)) or "/"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write a file whole.

        :param mode: ``create`` to do so only if there is none.
        :raises FileExistsError: when there is one then.
        """
        temporary = beside(path)
        try:
            self._write(temporary, value)
            failpoint("before-link")
            # Without an option, the NameNode answers whether it has renamed. With one, which fsspec does not offer,
            # it answers nothing or an error; but gateways that do not know of options go on as if there were none.
            options = {} if mode == "create" else {"renameoptions": "OVERWRITE"}
            answer = self._call("RENAME", "put", temporary, destination=path, **options)
        except BaseException:
            with suppress(OSError):
                self.rm(temporary)  # lest a rename whose answer was lost come later
            raise
        failpoint("after-link")
        if answer.content and not answer.json()["boolean"]:
            self.rm(temporary)
            if mode == "create":
                raise FileExistsError(path)
            raise OSError("the gateway cannot replace a file, unlike the NameNode itself")

    def _write(self, path: str, value: bytes) -> None:
        """Make a file by one write: what fsspec does, to make an empty one and append, suits large files."""
        location = self._call("CREATE", "put", path, redirect=False).headers["Location"]
        headers = {"content-type": "application/octet-stream"}
        self.session.put(self._apply_proxy(location), data=value, headers=headers)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read a file by one request, so that it is of one length and content if it is replaced meanwhile.

        A DataNode that has lost what it reads, because it was replaced, breaks off: then it is read from the beginning.
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
        """Whether there is a file or folder; fsspec takes any error for a no."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def find(self, path: str, **_: Any) -> list[str]:
        """All files below a folder; fsspec leaves out folders that it fails to list."""
        found: list[str] = []
        folders = [path]
        while folders:
            with suppress(FileNotFoundError):
                for info in self.ls(folders.pop(), detail=True):
                    (folders if info["type"] == "directory" else found).append(info["name"])
        return sorted(found)


def _answer(request: Callable[..., requests.Response], method: str, url: str, **given: Any) -> requests.Response:
    """What NameNode or DataNode answers, an error as one: fsspec takes a DataNode's for a file's content.

    URLs are not told, as they may have a token.
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
