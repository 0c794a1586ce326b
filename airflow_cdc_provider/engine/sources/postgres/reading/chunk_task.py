"""The work of a task of the snapshot: a chunk is read, and written or staged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from airflow_cdc_provider.engine.changes.row_transform import RowTransform, transformed_rows
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.chunk_ranges import Place
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.connection import describe
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import Read, write_rows
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkTask:
    """A chunk to copy, with all that an executor needs."""

    sink: Sink
    epoch: int
    target: Target
    chunk: Chunk
    read: Read
    transform: RowTransform

    @property
    def place(self) -> Place:
        """By what the chunk is told from all others."""
        return self.chunk.table, self.chunk.index


Written: TypeAlias = tuple[ChunkTask, Any]
"""A task, and what came of :func:`write_chunk`, which is no error."""


def write_chunk(task: ChunkTask) -> Any:
    """Read one chunk and write it; runs on an executor. Errors are returned: Spark would only try again at once."""

    def write(batches: Iterator[pa.RecordBatch], finish: Callable[[], Watermark]) -> Any:
        made = transformed_rows(task.transform, task.target.table, batches)
        return task.sink.write_chunk(task.epoch, task.target, task.chunk, task.read.origin, made, finish)

    written = _with_errors_returned(task, lambda: write_rows(task.read, write))
    if not isinstance(written, CdcError):
        spare_modules()
    return written


def commit_chunks(written: Sequence[Written]) -> int | CdcError:
    """Commit chunks of one sink that tasks have written; their rows, or the error that came of it."""
    copied = [CopiedChunk(t.target, t.chunk, t.read.origin, result) for t, result in written if result is not None]
    if not copied:
        return 0
    task, _ = written[0]
    rows = _with_errors_returned(task, lambda: task.sink.commit_chunks(task.epoch, copied))
    return rows if isinstance(rows, CdcError) else sum(count or 0 for count in rows)


def copy_chunk(task: ChunkTask) -> int | CdcError:
    """Read, write and commit one chunk where it is called."""
    written = write_chunk(task)
    return written if isinstance(written, CdcError) else commit_chunks([(task, written)])


def _with_errors_returned(task: ChunkTask, work: Callable[[], T]) -> T | CdcError:
    try:
        return work()
    except CdcError as e:
        return e
    except tuple(DRIVER_ERRORS) as e:
        return driver_failure(e, f"chunk {task.chunk.title} from {describe(task.read.dsn)}")
