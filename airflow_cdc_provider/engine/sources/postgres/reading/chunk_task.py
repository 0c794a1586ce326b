"""The work of a snapshot task: reads a chunk and writes or stages it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from airflow_cdc_provider.engine.changes.row_transform import RowTransform, transformed_rows
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.chunk_ranges import ChunkIndex
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_rows import SourceRows
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
    def place(self) -> ChunkIndex:
        """Return the table and the index of the chunk, which identify it."""
        return self.chunk.table, self.chunk.index


TaskResult: TypeAlias = tuple[ChunkTask, Any]
"""A task, and the result of its :func:`write_chunk`, which is not an error."""


def write_chunk(task: ChunkTask) -> Any:
    """Read one chunk and write it; runs on an executor. Errors are returned, since Spark would retry at once."""

    def write(rows: SourceRows) -> Any:
        made = transformed_rows(task.transform, task.target.table, rows)
        return task.sink.write_chunk(task.epoch, task.target, task.chunk, task.read.origin, made)

    written = _with_errors_returned(task, lambda: write_rows(task.read, write))
    if not isinstance(written, CdcError):
        spare_modules()
    return written


def commit_chunks(written: Sequence[TaskResult]) -> int | CdcError:
    """Commit chunks of one sink that tasks have written; return the number of rows, or an error."""
    copied = [CopiedChunk(t.target, t.chunk, t.read.origin, result) for t, result in written if result is not None]
    if not copied:
        return 0
    task, _ = written[0]
    rows = _with_errors_returned(task, lambda: task.sink.commit_chunks(task.epoch, copied))
    return rows if isinstance(rows, CdcError) else sum(count or 0 for count in rows)


def copy_chunk(task: ChunkTask) -> int | CdcError:
    """Read, write and commit one chunk in this process; return the number of rows, or an error."""
    written = write_chunk(task)
    return written if isinstance(written, CdcError) else commit_chunks([(task, written)])


def _with_errors_returned(task: ChunkTask, work: Callable[[], T]) -> T | CdcError:
    try:
        return work()
    except CdcError as e:
        return e
    except tuple(DRIVER_ERRORS) as e:
        return driver_failure(e, f"chunk {task.chunk.title} from {describe(task.read.dsn)}")
