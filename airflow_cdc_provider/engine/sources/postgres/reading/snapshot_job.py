"""The snapshot job: reads chunks in parallel, and commits them in their tasks or together on the driver.

Every chunk is read in its own MVCC snapshot, so no transaction stays open for long. An interrupted snapshot goes on
where it was: the sink's commit record knows which chunks are finished.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.changes.schema_change import Refuse, decide
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.chunk_ranges import ChunkIndex
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError, SchemaChanged, StreamFailed, values_hidden
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog_watch import read_definitions
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import (
    ChunkTask,
    TaskResult,
    commit_chunks,
    write_chunk,
)
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import reread_as_defined, retry_while_blocked
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


def copy_chunks(
    spark: SparkSession | None,
    run: Run,
    record: Record,
    chunks: Sequence[Chunk],
    report: Callable[[SnapshotProgress], None],
) -> SnapshotProgress:
    """Copy chunks into all sinks that lack them, ``snapshot.parallelism`` at a time.

    :param spark: runs their tasks; without a session, this process copies one chunk after the other.
    :param record: the commit record of all sinks as one.
    :param report: called about once a second.
    :raises CdcError: the first error of a chunk; other chunks may have been committed.
    """
    pipeline = run.pipeline
    tasks: list[tuple[Run, ChunkTask]] = []
    with connected(postgres_settings(pipeline).dsn) as source:
        for branch in run.branches:
            own = record if branch is run else existing_record(branch.pipeline)
            targets = {target.table.label: target for target in own.targets}
            unfinished, origin = frozenset(own.unfinished), RecordedSlot.of(own.identity).origin
            for chunk in filter(unfinished.__contains__, chunks):
                target = targets[chunk.table]
                read = plan_chunk_read(source, postgres_settings(pipeline).dsn, target.table, chunk, origin)
                tasks.append((branch, ChunkTask(branch.sink, run.epoch, target, chunk, read, pipeline.transform)))
    started = looked = time.monotonic()
    left = Counter(task.place for _, task in tasks)
    places = frozenset(left)
    rows = 0
    changed: dict[tuple[Run, str], Target] = {}

    def copy(task: ChunkTask) -> list[Any]:
        # One Spark job a chunk: it begins when a thread is free, and none begins once the run is asked to stop.
        if run.stopping:
            return []
        if spark is None:
            return [_copied_here(task)]
        try:
            return spark.sparkContext.parallelize([task], 1).map(write_chunk).collect()
        except (Py4JError, PySparkException) as e:
            return [_task_failure(task, e)]

    def progress(running: frozenset[ChunkIndex] = frozenset()) -> SnapshotProgress:
        finished = places - left.keys()
        return SnapshotProgress(len(places), finished, rows, time.monotonic() - started, running)

    with (
        ThreadPoolExecutor(len(run.branches), thread_name_prefix="commit") as committers,
        ThreadPoolExecutor(1 if spark is None else pipeline.snapshot.parallelism, thread_name_prefix="chunk") as pool,
    ):
        submitted = {pool.submit(copy, task): (branch, task) for branch, task in tasks}
        waiting = set(submitted)
        written: dict[Run, list[TaskResult]] = defaultdict(list)
        committing: dict[Future[int | CdcError], tuple[Run, list[TaskResult]]] = {}
        try:
            while waiting or committing:
                pending: list[Future[Any]] = [*waiting, *committing]
                ready, _ = wait(pending, _POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in waiting & ready:
                    branch, task = submitted[future]
                    for result in future.result():
                        if isinstance(result, SchemaChanged):
                            changed[branch, task.chunk.table] = task.target
                        elif isinstance(result, CdcError):
                            raise result
                        else:
                            written[branch].append((task, result))
                waiting -= ready
                for commit in committing.keys() & ready:
                    _, committed = committing.pop(commit)
                    count = commit.result()
                    if isinstance(count, CdcError):
                        raise count
                    left -= Counter(task.place for task, _ in committed)
                    rows += count
                # A sink has one commit at a time: chunks that are written meanwhile belong to the next one.
                busy = [branch for branch, _ in committing.values()]
                for branch in [branch for branch in written if branch not in busy]:
                    chunks_of = written.pop(branch)
                    committing[committers.submit(commit_chunks, chunks_of)] = branch, chunks_of
                run.check()
                if time.monotonic() - looked >= pipeline.stream.heartbeat:
                    looked = time.monotonic()
                    run.look_at_slot()
                reading = {submitted[future][1].place for future in waiting if future.running()}
                uncommitted = [*written.values(), *(chunks_of for _, chunks_of in committing.values())]
                report(progress(frozenset(reading.union(task.place for each in uncommitted for task, _ in each))))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # after an error, no further chunk begins
    for (branch, _), target in changed.items():
        rows += reread_changed(branch, target)
    return progress()


def reread_changed(run: Run, target: Target) -> int:
    """Read a table as a whole, since its definition has changed after its chunks were planned.

    :param target: as the chunks were planned for it.
    :returns: rows written; none when another part of the run has read the table.
    :raises CannotFollow: when a person has to decide about the new definition first.
    :raises OlderTransactions: when the run is asked to stop while it waits for such transactions.
    """
    label = target.table.label
    recorded = target_of(existing_record(run.pipeline), label)
    if recorded.table.to_dict() != target.table.to_dict():
        return 0
    with connected(postgres_settings(run.pipeline).dsn) as source:
        verdict = decide(recorded.table, read_definitions(source, run.pipeline, [recorded])[label])
    if isinstance(verdict, Refuse):
        raise CannotFollow(verdict.message, verdict.solution)
    progress = run.progress

    def waiting(what: str) -> None:
        run.progress = {**progress, "waiting": what}

    written = retry_while_blocked(run, partial(reread_as_defined, run, label, Barriers()), waiting)
    run.progress = progress
    return written


def _copied_here(task: ChunkTask) -> Any:
    """Read and write a chunk in this process; an unexpected error is returned as one that allows a retry."""
    try:
        return write_chunk(task)
    except Exception as e:
        what = f"copying chunk {task.chunk.title} failed"
        log.error("%s", what, exc_info=not values_hidden())
        return StreamFailed(f"{what}: {e}", "Start again: finished chunks stay, the others are read.", what)


def _task_failure(task: ChunkTask, error: Exception) -> StreamFailed:
    """Return the error of a task that was lost with its worker, so that it returned no error of ours."""
    cause = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else None
    return StreamFailed(
        f"the Spark task of chunk {task.chunk.title} failed: {str(cause or error).splitlines()[0]}",
        "Start again: finished chunks stay, the others are read. The task's error is in Spark's log.",
        f"the Spark task of chunk {task.chunk.title} failed",
    )
