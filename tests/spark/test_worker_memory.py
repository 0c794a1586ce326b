"""What Spark's workers keep from one task to the next, and its driver from one batch to the next."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.changes.row_transform import Identity
from airflow_cdc_provider.engine.core.errors import Fenced, ProtocolError
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.stream import spark_source
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import PiecePartition, SlotStreamReader
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.spark import worker_memory
from benchmarks.sinks import NoopSink
from tests.conftest import Databases
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest


@pytest.fixture(autouse=True)
def new_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_memory, "_spared", False)
    gc.unfreeze()  # objects that an earlier test has frozen in this process
    yield
    gc.unfreeze()


def read() -> None:
    list(SlotStreamReader(cast(Any, None)).read(PiecePartition([{"index": 0, "piece": b""}])))


def stage() -> None:
    nothing = cast(Any, None)
    list(StagingTask(nothing, nothing, 1, (), {}, 0, "", Identity())(iter([])))


@pytest.mark.parametrize("task", [read, stage])
def test_what_a_worker_has_imported_is_no_garbage(task: Any) -> None:
    """Spark runs a full garbage collection after each task; only the first one makes a worker examine its modules."""
    modules = gc.get_objects()
    task()
    spared = gc.get_freeze_count()
    assert spared > len(modules) / 2
    task()
    assert gc.get_freeze_count() <= spared  # an object that is in no cycle may have been freed


def test_a_piece_that_fails_leaves_its_traceback_to_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if the task has continued with other pieces, and those have succeeded."""
    sink = cast(Any, NoopSink())
    monkeypatch.setattr(
        spark_source, "agreed_stage", lambda offered: StagingTask(sink, sink, 1, (), {}, 0, "", Identity())
    )
    row = {"start": "{}", "end": "{}", "deposit": None}
    rows = [row | {"index": i, "piece": piece} for i, piece in enumerate((b"", b"damaged", b""))]
    batches = list(SlotStreamReader(cast(Any, None)).read(PiecePartition(rows)))
    messages = [pickle.loads(batch.column("message")[0].as_py()) for batch in batches]
    assert [type(message) for message in messages] == [StagedPiece, ProtocolError, StagedPiece]
    assert gc.get_freeze_count() == 0


def test_a_chunk_that_fails_leaves_its_traceback_to_be_collected(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)", "INSERT INTO public.t VALUES (1)")
    epoch = int(commands.provision(pipeline.pipeline)["epoch"])
    (chunk,) = pipeline.record.unfinished
    assert isinstance(copy_chunk_of(pipeline.pipeline, chunk, epoch - 1), Fenced)
    assert gc.get_freeze_count() == 0
    assert copy_chunk_of(pipeline.pipeline, chunk, epoch) == 1
    assert gc.get_freeze_count() > 0


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_batches_that_are_done_leave_the_jvm(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver holds nothing by which the JVM would keep their messages, however long Python does not collect."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], stream={"max_batch_bytes": 1 << 16})
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    pipeline.provision()
    pipeline.copy()
    for n in range(8):
        pipeline.source(f"INSERT INTO public.t VALUES ({n}, repeat('-', 1 << 16))")
    batches: list[weakref.ref[Any]] = []
    alive: list[int] = []
    write_batch = StreamJob._write_batch

    def counted(self: StreamJob, pieces: DataFrame, batch: int) -> None:
        batches.append(weakref.ref(pieces._jdf))
        write_batch(self, pieces, batch)
        alive.append(sum(batch() is not None for batch in batches))

    monkeypatch.setattr(StreamJob, "_write_batch", counted)
    gc.disable()
    try:
        commands.stream(pipeline.pipeline, until="caught-up")
    finally:
        gc.enable()
    assert len(alive) > 5
    assert set(alive) == {1}
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(8,)]
