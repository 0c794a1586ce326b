"""Any error of a store of files, even an unknown one, at any step, is reported with a remedy."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.sinks.files import manifest
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake import log, record
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from tests.sinks.begun_sink import begin
from tests.support.files_store import FilesStore
from tests.support.refusals import steps

CALLS: dict[type, tuple[str, ...]] = {
    MemoryFileSystem: ("pipe_file", "cat_file", "ls", "find", "modified", "size", "exists", "rm", "_open"),
    MemoryFile: ("write", "read"),
}


# What a process remembers of stores.
MEMORIES: tuple[dict[Any, Any], ...] = (log._heads, record._decided, manifest._listed)


class StoreError(Exception):
    """An error of a store's library, which is not one of Python's classes."""


class Trouble:
    """Lets one call of the store fail on request, or all calls from one on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
        self._once = once
        self._left: int | None = None
        self.met = False
        for kind, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(kind, name, self._failing(getattr(kind, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **named: Any) -> Any:
            if self._left is not None:
                self._left -= 1
                if self._left == -1 or (self._left < 0 and not self._once):
                    self.met = True
                    raise StoreError("on purpose")
            return call(*arguments, **named)

        return failing

    def begin(self, after: int) -> None:
        """Let calls fail after the next ones."""
        self._left, self.met = after, False

    def end(self) -> None:
        """Let no call fail."""
        self._left = None


class Kept:
    """A copy of the store and of what the process remembers of it, to be restored."""

    def __init__(self) -> None:
        self._files = {path: (file.getvalue(), file.modified) for path, file in MemoryFileSystem.store.items()}
        self._folders = list(MemoryFileSystem.pseudo_dirs)
        self._remembered = [dict(memory) for memory in MEMORIES]

    def restore(self) -> None:
        """Put everything back."""
        system = MemoryFileSystem()
        MemoryFileSystem.store.clear()
        for path, (content, modified) in self._files.items():
            file = MemoryFileSystem.store[path] = MemoryFile(system, path, content)
            file.modified = modified
        MemoryFileSystem.pseudo_dirs[:] = self._folders
        for memory, before in zip(MEMORIES, self._remembered, strict=True):
            memory.clear()
            memory.update(before)


@pytest.mark.parametrize("once", [True, False])
def test_no_error_of_a_store_leaves_the_files_sink(monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    sink = FilesSink(Storage(f"memory://{uuid.uuid4().hex}"), "p", "changelog", "parquet")
    tried = steps(begin(FilesStore(sink), "changelog"))
    begun, recorded = Kept(), sink.record()
    trouble = Trouble(monkeypatch, once)
    for step, attempt in tried.items():
        for after in itertools.count():
            begun.restore()
            assert sink.record() == recorded
            trouble.begin(after)
            try:
                attempt()
                refused = None
            except CdcError as e:
                refused = e
            finally:
                trouble.end()
            # What was written although its call failed is seen on the next read.
            assert refused is not None or not trouble.met or (once and step == "prepare"), (step, after)
            assert refused is None or (trouble.met and refused.solution), (step, after)
            if not trouble.met:
                assert after, step
                break
    sink.root.remove()
