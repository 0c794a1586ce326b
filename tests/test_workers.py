"""What Spark's Python workers keep from one task to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest

from airflow_cdc_provider.engine import workers
from airflow_cdc_provider.engine.source import PiecePartition, SlotStreamReader
from airflow_cdc_provider.engine.stage import Stage


@pytest.fixture(autouse=True)
def new_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_settled", False)
    yield
    gc.unfreeze()


def read() -> None:
    list(SlotStreamReader(cast(Any, None)).read(PiecePartition("", "", 0, b"")))


def stage() -> None:
    nothing = cast(Any, None)
    list(Stage(nothing, nothing, 1, "", (), {}, 0, "")(iter([])))


@pytest.mark.parametrize("task", [read, stage])
def test_what_a_worker_has_imported_is_no_garbage(task: Any) -> None:
    """Spark collects garbage in full after each task; only the first has a worker look at its modules for that."""
    modules = gc.get_objects()
    task()
    spared = gc.get_freeze_count()
    assert spared > len(modules) / 2
    task()
    assert gc.get_freeze_count() == spared
