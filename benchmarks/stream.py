"""Measures the stream: a backlog of changes is read into sinks, and by other programs.

Every run reads the same backlog from its own slot. Time starts when the server starts the walsender and ends when the
unit with the last change is done. The start-up of Spark's query is not part of it.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.changes.row_transform import Identity
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import read_identity
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import copy_chunks
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import InlineStaging
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import LocalProcesses, SourceOptions, postgres_cdc
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from airflow_cdc_provider.engine.spark.local_sockets import socket_directory
from benchmarks.backlog import PUBLICATION, Backlog, make_backlog, sums, walsender_start
from benchmarks.lab import Lab, create_database, drop_database, execute
from benchmarks.outlets import OUTLETS, Outlet
from benchmarks.peers import debezium, flink, subscription
from benchmarks.peers.recvlogical import RECVLOGICAL
from benchmarks.peers.recvlogical import drain as recvlogical
from benchmarks.peers.subscription import SUBSCRIPTION
from benchmarks.report import Series, WrongResult, check, tell
from benchmarks.shapes import Shape
from benchmarks.sinks import NoopSink, ParquetSink

NOOP, PARQUET, MIRROR = "stream-noop", "stream-parquet", "stream-mirror"
PIPELINES = {f"stream-{name}": outlet for name, outlet in OUTLETS.items()}
"""Cases that run whole pipelines."""
PEERS = (SUBSCRIPTION, debezium.COUNT, debezium.WARM, debezium.JSON, flink.FLINK)
CASES = (NOOP, PARQUET, *PIPELINES, *PEERS)
TRANSACTION = 1000
"""Changes per transaction in the default shape."""

# Before anything is measured, every case drains the same number of changes as a warm-up, but at most this many: a JVM
# gets faster for minutes.
_WARM_CHANGES = 2_000 * TRANSACTION
_FEW_CHANGES = 10 * TRANSACTION  # too few for a warm-up
_SECONDS = 3600.0


@dataclass
class Clock:
    """Measures the time from the start of a slot's walsender until the end of the backlog is done."""

    backlog: Backlog
    slot: str
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0

    def passed(self, lsn: int) -> None:
        """Record that everything up to ``lsn`` is done; the walsender still runs."""
        if lsn >= self.backlog.end and not self.stopped.is_set():
            now = time.time()
            self.seconds = now - walsender_start(self.backlog.dsn, self.slot)
            self.stopped.set()


def measure(lab: Lab, changes: int, repeat: int, cases: Collection[str], shapes: Sequence[Shape]) -> list[Series]:
    """Run ``pg_recvlogical`` and the cases, one after the other in every repeat, on backlogs of some shapes."""
    series = []
    for n, shape in enumerate(shapes):
        if changes > _FEW_CHANGES:
            _measure(lab, f"warm{n}", min(changes, _WARM_CHANGES), 1, cases, shape)
        series += _measure(lab, f"stream{n}", changes, repeat, cases, shape)
    return series


def _measure(lab: Lab, database: str, changes: int, repeat: int, cases: Collection[str], shape: Shape) -> list[Series]:
    create_database(lab.source, database)
    execute(lab.source.dsn(database), *shape.ddl, *shape.fill(shape.half(changes), shape.steps(changes)))
    execute(lab.source.dsn(database), f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {', '.join(shape.names)}")
    pipelines = {
        case: [
            _provision(lab, f"{database}_{case.removeprefix('stream-').replace('-', '_')}{i}", database, outlet)
            for i in range(repeat)
        ]
        for case, outlet in PIPELINES.items()
        if case in cases
    }
    backlog = make_backlog(lab, database, shape, changes)
    runs: dict[str, Callable[[int], float]] = {
        RECVLOGICAL: lambda i: recvlogical(backlog),
        SUBSCRIPTION: lambda i: subscription.drain(backlog, f"{database}_subscribed{i}"),
        debezium.COUNT: lambda i: debezium.drain(backlog, debezium.COUNT),
        debezium.WARM: lambda i: debezium.drain(backlog, debezium.WARM),
        debezium.JSON: lambda i: debezium.drain(backlog, debezium.JSON),
        flink.FLINK: lambda i: flink.drain(backlog),
        NOOP: lambda i: _noop(backlog),
        PARQUET: lambda i: _parquet(backlog),
        **{case: partial(_pipeline, backlog, case, ours) for case, ours in pipelines.items()},
    }
    chosen = [case for case in runs if case == RECVLOGICAL or case in cases]
    seconds: dict[str, list[float]] = {case: [] for case in chosen}
    for i in range(repeat):
        for case in chosen:
            lab.settle()
            seconds[case].append(runs[case](i))
            tell(f"{case}{shape.title}", backlog.changes, seconds[case][-1])
    backlog.discard()
    drop_database(lab.source, database)
    return [
        Series(f"{case}{shape.title}", backlog.changes, tuple(seconds[case]))
        if case == RECVLOGICAL
        else Series(
            f"{case}{shape.title}",
            backlog.changes,
            tuple(seconds[case]),
            f"{RECVLOGICAL}{shape.title}",
            tuple(f"{other}{shape.title}" for other in _others(case) if other in chosen),
        )
        for case in chosen
    ]


def _others(case: str) -> tuple[str, ...]:
    """Return further peers, in addition to ``pg_recvlogical``, to compare a case with."""
    into_postgres = (SUBSCRIPTION,) if case == MIRROR else ()
    return () if case in PEERS else (*into_postgres, *PEERS[1:])


def _provision(lab: Lab, name: str, database: str, outlet: Outlet) -> Pipeline:
    """Provision a pipeline whose snapshot is complete, so that only the stream remains."""
    pipeline = lab.pipeline(name, database, outlet.section(lab, name), publication=PUBLICATION)
    commands.provision(pipeline)
    with run_part(pipeline, "snapshot", None) as (run, record):
        copy_chunks(lab.spark, run, record, choose_chunks(record), lambda progress: None)
    return pipeline


# -- the cases -----------------------------------------------------------------------------------------


def _noop(backlog: Backlog) -> float:
    seconds, pieces = _follow(backlog, NoopSink())
    check(backlog.changes, sum(piece.changes for piece in pieces), f"{NOOP}: changes")
    return seconds


def _parquet(backlog: Backlog) -> float:
    directory = Path(tempfile.mkdtemp(prefix="parquet-", dir=backlog.lab.directory))
    seconds, pieces = _follow(backlog, ParquetSink(directory))
    check(backlog.changes, sum(piece.changes for piece in pieces), f"{PARQUET}: changes")
    found = [0, 0, 0]
    for path in directory.rglob("*.parquet"):
        written = pq.read_table(path, columns=["op", "c0"])
        updates = pc.sum(pc.equal(written["op"], "u")).as_py()
        for n, each in enumerate((len(written), updates, pc.sum(written["c0"].cast("int64")).as_py())):
            found[n] += each or 0
    right = [backlog.changes, backlog.changes // 2, backlog.keys]
    check(right, found, f"{PARQUET}: rows, updates, sum of keys")
    return seconds


def _pipeline(backlog: Backlog, case: str, pipelines: Sequence[Pipeline], i: int) -> float:
    """Run the stream job of a pipeline, and drop the pipeline afterwards with everything that it wrote."""
    lab, shape, pipeline, outlet = backlog.lab, backlog.shape, pipelines[i], PIPELINES[case]
    clock = Clock(backlog, pipeline.source.slot)
    with run_part(pipeline, "stream", None) as (run, record):
        job = StreamJob(lab.spark, run, record, lambda progress: clock.passed(progress.applied))
        progress = job.follow(backlog.end)
    check(backlog.changes, progress.changes, f"{case}: changes")
    right = sums(backlog.dsn, shape, mirror=True) if outlet.mode == "mirror" else backlog.logged
    check(right, outlet.sums(lab, pipeline.name, shape), f"{case}: sums")
    if case == MIRROR:
        lab.check_equal(backlog.database, pipeline.name, f"{case}: rows and checksum", shape.names)
    commands.drop(pipeline)
    outlet.discard(lab, pipeline.name, shape)
    return clock.seconds


def _follow(backlog: Backlog, sink: NoopSink | ParquetSink) -> tuple[float, list[StagedPiece]]:
    """Follow the log like the stream job, except for the commit; return the time and what was staged."""
    lab, dsn = backlog.lab, backlog.dsn
    pipeline = lab.pipeline("bench", backlog.database)
    with connected(dsn) as source:
        tables = resolve(source, pipeline.source.tables)
    targets = tuple(Target(table, table.schema, table.name) for table in tables)
    task = StagingTask(sink, sink, 0, targets, {}, 0, dsn, Identity())  # type: ignore[arg-type]  # a part of a sink will do
    staged: list[StagedPiece] = []
    staging = InlineStaging()
    staging.offers.append(lambda: task)

    def stage(pieces: DataFrame, batch: int) -> None:
        messages = staging.stage(pieces, task)
        for message in messages:
            if isinstance(message, CdcError):
                raise message
        staged.extend(messages)
        if messages:  # the first batch of a query may be empty
            clock.passed(Position.from_json(json.loads(messages[0].end)).lsn)

    with backlog.slot() as slot, socket_directory() as directory, staging.serving(directory, lambda passed: None):
        local = LocalProcesses.of(lab.spark, directory)
        clock = Clock(backlog, slot)
        with connected(dsn) as source:
            origin = RecordedSlot(read_identity(source, slot, PUBLICATION), False).origin
        options = SourceOptions(
            dsn,
            slot,
            PUBLICATION,
            origin,
            backlog.start,
            pipeline.stream.max_batch_bytes,
            pipeline.stream.heartbeat,
            sink,  # type: ignore[arg-type]
            0,
            pipeline.stream.trigger,
            local,
        )
        lab.spark.dataSource.register(postgres_cdc(options))
        pieces = lab.spark.readStream.format("postgres_cdc").load()
        checkpoint = lab.directory / "checkpoints" / slot
        stream = pieces.writeStream.foreachBatch(stage).option("checkpointLocation", str(checkpoint)).start()
        try:
            deadline = time.monotonic() + _SECONDS
            while stream.isActive and not clock.stopped.wait(0.1) and time.monotonic() < deadline:
                pass
            if not clock.stopped.is_set():
                raise WrongResult(f"the stream did not reach the end of the backlog: {stream.exception()}")
        finally:
            stream.stop()
    return clock.seconds, staged
