"""Runs the engine's parts in this process, without Spark's scheduler."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import read_slot
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.runs.view_work import ViewWork, keeping_views
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import ChunkTask, copy_chunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import SlotStreamReader
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from tests.support.patience import SECONDS


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


def _stage_here(
    pieces: Sequence[pa.RecordBatch], task: StagingTask, listener: Callable[[object], None] | None = None
) -> list[Any]:
    """Stage one piece after the other, and report each, as tasks do."""
    messages = []
    for piece in pieces:
        for staged in task(iter([piece])):
            messages += map(pickle.loads, staged.column("message").to_pylist())
            if listener is not None:
                listener(messages[-1])
    return messages


def apply_stream(pipeline: Pipeline, until: int, takeover: bool = False) -> None:
    """Follow the log until ``until`` is applied and acknowledged, like the stream job, but without Spark's scheduler.

    Gate and epoch, slot reader, cuts, staging, commit and re-reads are the engine's own. Two parts are missing: tasks
    in other processes, and the checkpoint, which a cursor replaces.

    :param until: end LSN of a marker.
    :param takeover: continue although another run is alive.
    """
    with run_part(pipeline, "stream", None, takeover) as (run, record):
        follow_log(run, record, until)


def follow_log(
    run: Run, record: Record, until: int | None, report: Callable[[StreamProgress], None] = lambda progress: None
) -> None:
    """Make one attempt of the stream job; if ``until`` is ``None``, it continues until the run is asked to stop."""
    job = StreamJob(None, run, record, report)  # type: ignore[arg-type]
    job._staging.stage = _stage_here  # type: ignore[assignment,method-assign]
    job._sweep()
    reader = SlotStreamReader(job._source_options())
    try:
        with connected(run.pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
            job._gate(source)
            job._check_catalog(source)
        with keeping_views(run) as views:
            _follow(run, job, reader, until, views)
    finally:
        reader.stop()
    if job._sinks.refusal is not None:
        raise job._sinks.refusal


def _follow(run: Run, job: StreamJob, reader: SlotStreamReader, until: int | None, views: ViewWork) -> None:
    pipeline = run.pipeline
    limit = reader.getDefaultReadLimit()
    start, number = reader.initialOffset(), 0

    def passed() -> bool:
        nonlocal start, number
        end = reader.latestOffset(start, limit)
        views.check()
        run.progress = job._progress().as_dict()
        if until is None and run.stopping:
            return True
        if job._done(until, views) and Position.from_json(start).lsn >= existing_record(pipeline).applied:
            return True
        if end == start:
            return False
        partitions = reader.partitions(start, end)
        job._write_batch([batch for partition in partitions for batch in reader.read(partition)], number)  # type: ignore[arg-type]
        start, number = end, number + 1
        return False

    if until is None:
        while not passed():
            run.wait(0.02)
        return
    assert await_condition(passed, SECONDS), f"the stream did not reach {until:X}"
    applied = existing_record(pipeline).applied

    def acknowledged() -> bool:
        with connected(pipeline.source.dsn) as source:
            state = read_slot(source, pipeline.source.slot)
        return state is not None and state.confirmed_flush_lsn >= applied

    assert await_condition(acknowledged, SECONDS), f"{applied:X} was not acknowledged"
