"""What Spark's Python workers keep from one task to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from airflow_cdc_provider.engine import commands, workers
from airflow_cdc_provider.engine.errors import Fenced
from airflow_cdc_provider.engine.source import PiecePartition, SlotStreamReader
from airflow_cdc_provider.engine.stage import Stage
from tests.conftest import Databases
from tests.pipelines import PipelineUnderTest, copy_chunk_of


@pytest.fixture(autouse=True)
def new_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_spared", False)
    gc.unfreeze()  # what a test before has spared in this process
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


def test_a_chunk_that_fails_leaves_its_traceback_to_be_collected(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)", "INSERT INTO public.t VALUES (1)")
    epoch = int(commands.provision(pipeline.pipeline)["epoch"])
    (chunk,) = pipeline.record.unfinished
    assert isinstance(copy_chunk_of(pipeline.pipeline, chunk, epoch - 1), Fenced)
    assert gc.get_freeze_count() == 0
    assert copy_chunk_of(pipeline.pipeline, chunk, epoch) == 1
    assert gc.get_freeze_count() > 0
