"""The snapshot job: chunks are read in parallel, and committed by their tasks or together by the driver.

Every chunk is read in an MVCC snapshot of its own, so no transaction stays open
for long and an interrupted snapshot goes on where it was: the sink's commit
record knows which chunks are finished.
"""

from __future__ import annotations

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
from airflow_cdc_provider.engine.core.chunk_ranges import Place
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError, SchemaChanged, StreamFailed
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog_watch import look
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import (
    ChunkTask,
    Written,
    commit_chunks,
    write_chunk,
)
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import adopt, insist
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

_POLL_SECONDS = 1.0


def copy_chunks(
    spark: SparkSession, run: Run, record: Record, chunks: Sequence[Chunk], report: Callable[[SnapshotProgress], None]
) -> SnapshotProgress:
    """Copy chunks into all sinks that lack them, ``snapshot.parallelism`` at a time.

    :param record: of all sinks as one.
    :param report: called about once a second.
    :raises CdcError: the first error of a chunk; others may have been committed.
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
        # A Spark job a chunk: it begins when a place is free, and none begins once the run is asked to stop.
        if run.stopping:
            return []
        try:
            return spark.sparkContext.parallelize([task], 1).map(write_chunk).collect()
        except (Py4JError, PySparkException) as e:
            return [_task_failure(task, e)]

    def progress(running: frozenset[Place] = frozenset()) -> SnapshotProgress:
        finished = places - left.keys()
        return SnapshotProgress(len(places), finished, rows, time.monotonic() - started, running)

    with (
        ThreadPoolExecutor(len(run.branches), thread_name_prefix="commit") as committers,
        ThreadPoolExecutor(pipeline.snapshot.parallelism, thread_name_prefix="chunk") as pool,
    ):
        submitted = {pool.submit(copy, task): (branch, task) for branch, task in tasks}
        waiting = set(submitted)
        written: dict[Run, list[Written]] = defaultdict(list)
        committing: dict[Future[int | CdcError], tuple[Run, list[Written]]] = {}
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
                # One commit of a sink at a time: what is written meanwhile comes with the next.
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
            pool.shutdown(wait=True, cancel_futures=True)  # after an error, chunks that have not begun stay so
    for (branch, _), target in changed.items():
        rows += readopt(branch, target)
    return progress()


def readopt(run: Run, target: Target) -> int:
    """Read a table whole that was found to be defined otherwise than when its chunks were planned.

    :param target: as the chunks were planned for it.
    :returns: rows written; none when another part of the run has done it.
    :raises CannotFollow: when the table's new definition has to be looked at first.
    :raises OlderTransactions: when the run is asked to stop while it waits for them.
    """
    label = target.table.label
    recorded = target_of(existing_record(run.pipeline), label)
    if recorded.table.to_dict() != target.table.to_dict():
        return 0
    with connected(postgres_settings(run.pipeline).dsn) as source:
        verdict = decide(recorded.table, look(source, run.pipeline, [recorded])[label])
    if isinstance(verdict, Refuse):
        raise CannotFollow(verdict.message, verdict.solution)
    progress = run.progress

    def waiting(what: str) -> None:
        run.progress = {**progress, "waiting": what}

    written = insist(run, partial(adopt, run, label, Barriers()), waiting)
    run.progress = progress
    return written


def _task_failure(task: ChunkTask, error: Exception) -> StreamFailed:
    """What is left to say when a task is lost with its worker, and no error of ours comes back."""
    cause = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else None
    return StreamFailed(
        f"the Spark task of chunk {task.chunk.title} failed: {str(cause or error).splitlines()[0]}",
        "Start again: finished chunks stay, the others are read. The task's error is in Spark's log.",
        f"the Spark task of chunk {task.chunk.title} failed",
    )
