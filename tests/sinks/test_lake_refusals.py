"""Whatever a store of files refuses, with an error that nobody knows and at any step, is told with what helps."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake.storage import Place
from tests.sinks.begun_sink import Begun, begin
from tests.support.files_store import FilesStore
from tests.support.refusals import steps

CALLS: dict[type, tuple[str, ...]] = {
    MemoryFileSystem: ("pipe_file", "cat_file", "ls", "find", "modified", "size", "exists", "rm", "_open"),
    MemoryFile: ("write", "read"),
}


class StoreError(Exception):
    """An error of a store's library: of none of Python's classes."""


class Trouble:
    """Lets one call of the store fail, or all from one on, when it is told to."""

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
        """Let calls fail but for the next ones."""
        self._left, self.met = after, False

    def end(self) -> None:
        """Let no call fail."""
        self._left = None


@pytest.mark.parametrize("once", [True, False])
def test_no_error_of_a_store_leaves_the_files_sink(monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    trouble = Trouble(monkeypatch, once)
    for step in steps(_begun()):
        for after in itertools.count():
            attempt = steps(_begun())[step]
            trouble.begin(after)
            try:
                attempt()
                refused = None
            except CdcError as e:
                refused = e
            finally:
                trouble.end()
            # What was written although its call has failed is seen when it is read again.
            assert refused is not None or not trouble.met or (once and step == "prepare"), (step, after)
            assert refused is None or (trouble.met and refused.solution), (step, after)
            if not trouble.met:
                assert after, step
                break


def _begun() -> Begun:
    return begin(FilesStore(FilesSink(Place(f"memory://{uuid.uuid4().hex}"), "p", "changelog", "parquet")), "changelog")
