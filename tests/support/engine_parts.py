"""Runs the engine's parts in this process, without Spark's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.restart_strategy import Restart
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import ChunkTask, copy_chunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob


def chunk_task(pipeline: Pipeline, chunk: Chunk, epoch: int | None = None) -> ChunkTask:
    """Return the task that the snapshot job would send to an executor.

    :param epoch: epoch of the run; the record's own by default.
    """
    record = existing_record(pipeline)
    (target,) = (t for t in record.targets if t.table.label == chunk.table)
    with connected(pipeline.source.dsn) as source:
        read = plan_chunk_read(source, pipeline.source.dsn, target.table, chunk, ServerIdentity.of(record.identity))
    sink = sink_of(pipeline, "snapshot-0")
    return ChunkTask(sink, record.epoch if epoch is None else epoch, target, chunk, read, pipeline.transform)


def copy_chunk_of(pipeline: Pipeline, chunk: Chunk, epoch: int | None = None) -> int | CdcError:
    """Copy a chunk like a task of the snapshot; return its rows, or raise the error that the driver would raise."""
    return copy_chunk(chunk_task(pipeline, chunk, epoch))


def apply_stream(pipeline: Pipeline, until: int, takeover: bool = False) -> None:
    """Follow the log until ``until`` is applied and acknowledged, as a stream without Spark does.

    :param until: end LSN of a marker.
    :param takeover: continue although another run is alive.
    """
    once = replace(pipeline, stream=replace(pipeline.stream, restart=Restart(strategy="none")))
    with run_part(once, "stream", None, takeover) as (run, record):
        keep_trying(run, record, lambda record: follow_log(run, record, until))


def follow_log(
    run: Run, record: Record, until: int | None, report: Callable[[StreamProgress], None] = lambda progress: None
) -> None:
    """Make one attempt of the stream job; if ``until`` is ``None``, it continues until the run is asked to stop."""

    def told(progress: StreamProgress) -> None:
        run.progress = progress.as_dict()
        report(progress)

    StreamJob(None, run, record, told).follow(None if until is None else Lsn(until))
