"""The stream: a backlog of changes into nothing, into Parquet and into a mirror, against ``pg_recvlogical``.

The limit of one slot is what its walsender decodes, and ``pg_recvlogical`` to
``/dev/null`` shows it. Every run reads the same backlog, from a slot of its own.
Time begins when the server starts the walsender, and ends when the unit with the
last change is done: what Spark needs to start a query is no part of it.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.buffer import Position
from airflow_cdc_provider.engine.capture import resolve
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import CdcError
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.run import run_part
from airflow_cdc_provider.engine.sinks.base import StagedPiece, Target
from airflow_cdc_provider.engine.slot import drop_slot, emit_marker, read_identity, read_slot, reader_name
from airflow_cdc_provider.engine.snapshot import choose_chunks, copy_chunks
from airflow_cdc_provider.engine.source import SourceOptions, postgres_cdc
from airflow_cdc_provider.engine.stage import Stage
from airflow_cdc_provider.engine.stream import StreamJob
from benchmarks.lab import ROW, SCHEMA, TABLE, TABLE_DDL, Lab, create_database, drop_database, execute, fill, query
from benchmarks.report import Series, WrongResult, check, tell
from benchmarks.sinks import NoopSink, ParquetSink

RECVLOGICAL = "pg_recvlogical"
NOOP, PARQUET, MIRROR = "stream-noop", "stream-parquet", "stream-mirror"
TRANSACTION = 1000
"""Changes of each transaction: half of them inserts, half of them updates of what the one before inserted."""

_HALF = TRANSACTION // 2
_WARM_CHANGES = 5 * TRANSACTION
_PUBLICATION = "bench"
_BASE_SLOT = "bench_base"
_MAX_BATCH_BYTES = 64 << 20
_SECONDS = 600.0


@dataclass(frozen=True)
class Backlog:
    """Changes that wait in the log.

    :param start: where reading begins.
    :param end: LSN of a marker behind the last change.
    :param id_sum: sum of the keys of all changes.
    """

    database: str
    changes: int
    start: int
    end: int
    id_sum: int


@dataclass
class Clock:
    """Takes the time from the start of a slot's walsender until the end of the backlog is done."""

    lab: Lab
    slot: str
    end: int
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0

    def passed(self, lsn: int) -> None:
        """Note that everything up to ``lsn`` is done; the walsender still runs."""
        if lsn >= self.end and not self.stopped.is_set():
            now = time.time()
            text = (
                "SELECT extract(epoch FROM backend_start)::float8 FROM pg_stat_replication WHERE application_name = %s"
            )
            (started,) = query(self.lab.source.dsn(), text, f"airflow-cdc {self.slot}")
            assert isinstance(started, float)
            self.seconds = now - started
            self.stopped.set()


def measure(lab: Lab, changes: int, repeat: int, cases: frozenset[str]) -> list[Series]:
    """Run ``pg_recvlogical`` and the cases, one after the other in every repeat."""
    whole = max(1, changes // TRANSACTION) * TRANSACTION
    _measure(lab, "stream_warm", min(whole, _WARM_CHANGES), 1, cases)
    return _measure(lab, "stream", whole, repeat, cases)


def _measure(lab: Lab, database: str, changes: int, repeat: int, cases: frozenset[str]) -> list[Series]:
    create_database(lab.source, database)
    dsn = lab.source.dsn(database)
    execute(dsn, TABLE_DDL)
    fill(dsn, 1, _HALF)
    execute(dsn, f"CREATE PUBLICATION {_PUBLICATION} FOR TABLE public.t")
    mirrors = [_provision(lab, f"{database}_{i}", database) for i in range(repeat)] if MIRROR in cases else []
    backlog = _make_backlog(dsn, database, changes)
    runs: dict[str, Callable[[int], float]] = {
        RECVLOGICAL: lambda i: _recvlogical(lab, backlog),
        NOOP: lambda i: _noop(lab, backlog),
        PARQUET: lambda i: _parquet(lab, backlog),
        MIRROR: lambda i: _mirror(lab, backlog, mirrors[i]),
    }
    chosen = [case for case in runs if case == RECVLOGICAL or case in cases]
    seconds: dict[str, list[float]] = {case: [] for case in chosen}
    for i in range(repeat):
        for case in chosen:
            lab.settle()
            seconds[case].append(runs[case](i))
            tell(case, changes, seconds[case][-1])
    for pipeline in mirrors:
        commands.drop(pipeline)
        drop_database(lab.target, pipeline.name)
    with connected(dsn) as source:
        drop_slot(source, _BASE_SLOT, reader_name(dsn, _BASE_SLOT))
    drop_database(lab.source, database)
    return [
        Series(case, changes, tuple(seconds[case]), None if case == RECVLOGICAL else RECVLOGICAL) for case in chosen
    ]


def _provision(lab: Lab, name: str, database: str) -> Pipeline:
    """A pipeline whose snapshot is done, so that the stream is all that is left."""
    create_database(lab.target, name)
    pipeline = lab.pipeline(name, database, publication=_PUBLICATION)
    commands.provision(pipeline)
    with run_part(pipeline, "snapshot", None) as (run, record):
        copy_chunks(lab.spark, run, record, choose_chunks(record), lambda progress: None)
    return pipeline


def _make_backlog(dsn: str, database: str, changes: int) -> Backlog:
    """Write transactions that nobody reads yet."""
    with connected(dsn) as source:
        execute(dsn, f"SELECT pg_create_logical_replication_slot('{_BASE_SLOT}', 'pgoutput')")
        state = read_slot(source, _BASE_SLOT)
        assert state is not None
        transactions = changes // TRANSACTION
        execute(
            dsn,
            f"""
            DO $$ BEGIN FOR k IN 1..{transactions} LOOP
                INSERT INTO public.t SELECT {ROW}
                    FROM generate_series(k * {_HALF}::bigint + 1, (k + 1) * {_HALF}::bigint) AS n;
                UPDATE public.t SET amount = amount + 1, status = 'changed'
                    WHERE id BETWEEN (k - 1) * {_HALF} + 1 AND k * {_HALF};
                COMMIT;
            END LOOP; END $$
            """,
        )
        end = emit_marker(source, "end")
        emit_marker(source, "after the end")  # readers that stop at an LSN need something behind it
    inserted = sum(range(_HALF + 1, (transactions + 1) * _HALF + 1))
    updated = sum(range(1, transactions * _HALF + 1))
    return Backlog(database, changes, state.confirmed_flush_lsn, end, inserted + updated)


# -- the cases -----------------------------------------------------------------------------------------


def _recvlogical(lab: Lab, backlog: Backlog) -> float:
    dsn, slot = lab.source.dsn(backlog.database), _copy_slot(lab, backlog)
    started = time.monotonic()
    done = subprocess.run(
        [
            str(lab.source.binaries / "pg_recvlogical"),
            f"--dbname={dsn}",
            f"--slot={slot}",
            "--start",
            "--no-loop",
            "--file=/dev/null",
            f"--endpos={format_lsn(backlog.end + 1)}",
            "--option=proto_version=1",
            f"--option=publication_names={_PUBLICATION}",
            "--option=messages=true",
        ],
        check=False,
    )
    seconds = time.monotonic() - started
    check(0, done.returncode, f"{RECVLOGICAL}: exit code")
    with connected(dsn) as source:
        state = read_slot(source, slot)
        drop_slot(source, slot, reader_name(dsn, slot))
    check(True, state is not None and state.confirmed_flush_lsn >= backlog.end, f"{RECVLOGICAL}: end reached")
    return seconds


def _noop(lab: Lab, backlog: Backlog) -> float:
    seconds, pieces = _follow(lab, backlog, NoopSink())
    check(backlog.changes, sum(piece.changes for piece in pieces), f"{NOOP}: changes")
    return seconds


def _parquet(lab: Lab, backlog: Backlog) -> float:
    directory = lab.directory / f"parquet{len(list(lab.directory.iterdir()))}"
    seconds, pieces = _follow(lab, backlog, ParquetSink(directory))
    check(backlog.changes, sum(piece.changes for piece in pieces), f"{PARQUET}: changes")
    written = pq.read_table(directory / f"{SCHEMA}.{TABLE}", columns=["op", "c0"])
    updates = pc.sum(pc.equal(written["op"], "u")).as_py()
    found = (len(written), updates, pc.sum(written["c0"].cast("int64")).as_py())
    check((backlog.changes, backlog.changes // 2, backlog.id_sum), found, f"{PARQUET}: rows, updates, sum of keys")
    return seconds


def _mirror(lab: Lab, backlog: Backlog, pipeline: Pipeline) -> float:
    clock = Clock(lab, pipeline.source.slot, backlog.end)
    with run_part(pipeline, "stream", None) as (run, record):
        progress = StreamJob(lab.spark, run, record, lambda progress: clock.passed(progress.applied)).follow(
            backlog.end
        )
    check(backlog.changes, progress.changes, f"{MIRROR}: changes")
    lab.check_equal(backlog.database, pipeline.name, f"{MIRROR}: rows and checksum")
    return clock.seconds


def _follow(lab: Lab, backlog: Backlog, sink: NoopSink | ParquetSink) -> tuple[float, list[StagedPiece]]:
    """Follow the log as the stream job does, but for the commit; return the time and what was staged."""
    dsn, slot = lab.source.dsn(backlog.database), _copy_slot(lab, backlog)
    pipeline = lab.pipeline("bench", backlog.database)
    with connected(dsn) as source:
        tables = resolve(source, pipeline.source.tables)
    targets = tuple(Target(table, table.schema, table.name) for table in tables)
    staged: list[StagedPiece] = []
    clock = Clock(lab, slot, backlog.end)

    def stage(pieces: DataFrame, batch: int) -> None:
        task = Stage(sink, sink, 0, str(batch), targets, {}, 0, dsn)  # type: ignore[arg-type]  # a part of a sink will do
        messages: list[Any] = [pickle.loads(row.message) for row in pieces.mapInArrow(task, "message binary").collect()]
        for message in messages:
            if isinstance(message, CdcError):
                raise message
        staged.extend(messages)
        if messages:  # the first batch of a query can be empty
            clock.passed(Position.from_json(json.loads(messages[0].end)).lsn)

    with connected(dsn) as source:
        origin = Origin.of(read_identity(source, slot, _PUBLICATION).to_dict())
    options = SourceOptions(dsn, slot, _PUBLICATION, origin, backlog.start, _MAX_BATCH_BYTES, 10.0, sink, 0)  # type: ignore[arg-type]
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
    with connected(dsn) as source:
        drop_slot(source, slot, reader_name(dsn, slot))
    return clock.seconds, staged


_copies = iter(range(1_000_000))


def _copy_slot(lab: Lab, backlog: Backlog) -> str:
    """A slot at the beginning of the backlog."""
    name = f"bench_{next(_copies)}"
    dsn = lab.source.dsn(backlog.database)
    copied = query(dsn, "SELECT lsn::text FROM pg_copy_logical_replication_slot(%s, %s)", _BASE_SLOT, name)
    check(backlog.start, parse_lsn(str(copied[0])), "position of a copied slot")
    return name
