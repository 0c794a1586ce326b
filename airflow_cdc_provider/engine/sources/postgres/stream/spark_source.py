"""The Spark data source ``postgres_cdc``: a replication slot as a stream of raw pieces of the log.

Spark keeps one reader in a long-lived Python process next to the driver. The reader holds the replication connection,
so decoding on the server starts once and not per batch. ``latestOffset`` decides where a batch ends, ``partitions``
ships the raw messages, and executors decode them.

Spark calls ``commit`` only when it builds the next batch, and never when idle. The ``start`` argument of
``latestOffset`` is the reliable sign that a batch is in Spark's commit log. Since the sink commits before Spark does,
the batch is in the sink too. The slot is acknowledged at this point, and nowhere else.

Schema of the stream, one row a piece:

==========  =======  ===========================================================
``start``   string   JSON of the position after which the batch begins
``end``     string   JSON of the position at which the batch ends
``index``   int      order of the piece in the batch
``piece``   binary   :meth:`Piece.to_bytes`; empty in a batch that only advances
``deposit`` string   name of the deposit that has the messages of the piece; null
                     if the piece has them itself
``message`` binary   the message of :class:`.staging_task.StagingTask`, pickled, if
                     the piece was staged inline (:mod:`.inline_staging`); then the
                     others but ``index`` are null. Else this is null
==========  =======  ===========================================================

A piece is as large as a block, unless a single row is larger. Such a row must not pass through the JVM, which would
hold several copies of it and cannot ship more than ``spark.rpc.message.maxSize``. So its piece is deposited in a
:class:`.PieceStore`, which all executors reach, and fetched by the task that stages it.
"""

from __future__ import annotations

import json
import pickle
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes
from pyspark.sql.types import StructType

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.piece_store import PieceStore
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import (
    agreed_stage,
    offered_stages,
    report_idle,
    report_staged,
)
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from airflow_cdc_provider.engine.spark.local_sockets import Answering, ask
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

SCHEMA = "start string, end string, index int, piece binary, deposit string, message binary"

_ARROW = pa.schema(
    [
        ("start", pa.string()),
        ("end", pa.string()),
        ("index", pa.int32()),
        ("piece", pa.binary()),
        ("deposit", pa.string()),
        ("message", pa.binary()),
    ]
)
_SOCKET = "pieces"
_BLOCK_BYTES = 8 << 20
# Waiting here saves Spark the work of asking every 10 ms; but Spark cannot end a process that waits.
_PATIENCE_SECONDS = 1.0
_MAX_SHIPPED_BYTES = 2 * _BLOCK_BYTES  # only the piece of a large row is larger


@dataclass(frozen=True)
class LocalProcesses:
    """The connection between the reader and the other processes of this machine.

    :param directory: of the sockets at which the driver offers how pieces are staged, see :mod:`.inline_staging`.
    :param task_slots: number of tasks that run at once (``spark.default.parallelism`` if it is set), if they run on
        this machine and can ask the reader for their pieces; else 0.
    """

    directory: str
    task_slots: int

    @classmethod
    def of(cls, spark: SparkSession, directory: str) -> Self:
        """Return those of a session."""
        # Imported here because of all processes that import this module only the driver needs pipeline files.
        from airflow_cdc_provider.engine.spark.settings import runs_locally

        context = spark.sparkContext
        return cls(directory, context.defaultParallelism if runs_locally(str(context.master)) else 0)


@dataclass(frozen=True)
class SourceOptions:
    """The options of the reader.

    :param origin: the server to which the slot must belong.
    :param applied: LSN that is durable in the sink; the stream is requested from there.
    :param max_batch_bytes: bytes of messages that a batch should not exceed.
    :param heartbeat: seconds between two advances without content.
    :param piece_store: where pieces are deposited that are too large to be shipped.
    :param epoch: of the run.
    :param trigger: least seconds from the start of a batch to that of the next. A batch begins earlier if there is as
        much as a batch may hold, or if the oldest waiting transaction was committed longer ago. Spark's own triggers
        would also make a backlog wait, and would delay a single change until the next multiple of the interval.
        ``None`` for a reader that does not wait, not even for a change.
    :param local: ``None`` when pieces are not staged inline.
    :param patience: seconds to wait for changes at most, before Spark, or the thread that asks, can end the query.
    """

    dsn: str = field(repr=False)
    slot: str
    publication: str
    origin: ServerIdentity
    applied: Lsn
    max_batch_bytes: int
    heartbeat: float
    piece_store: PieceStore
    epoch: int
    trigger: float | None = None
    local: LocalProcesses | None = None
    patience: float = _PATIENCE_SECONDS


def postgres_cdc(options: SourceOptions) -> type[DataSource]:
    """Return the data source ``postgres_cdc`` of one slot, to be registered with Spark.

    Options of a Spark source show up in plans and in the Spark UI, and a file would outlive a driver that is killed.
    Spark ships a class that was defined in a function by its code, together with the objects that it refers to: over a
    pipe to the reader's process, inside the task to executors, and never to a disk.
    """

    class PostgresCdcSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "postgres_cdc"

        def schema(self) -> str:
            return SCHEMA

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            return SlotStreamReader(options)

    return PostgresCdcSource


class PiecePartition(InputPartition):
    """Rows of the stream, shipped with their task.

    :param rows: each by column, without ``message``; at least one.
    :param offered: how they may be staged, from :func:`.inline_staging.offered_stages`.
    :param socket_directory: directory in which the task asks the reader for each ``piece``; those in the rows are
        empty then.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        offered: Mapping[str, bytes] | None = None,
        socket_directory: str | None = None,
    ) -> None:
        super().__init__(rows[0]["index"])
        self.rows = rows
        self.offered = offered or {}
        self.socket_directory = socket_directory


class SlotStreamReader(DataSourceStreamReader):
    """Spark's view of a slot. Connects on first use, since a copy of it is pickled into each read task."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._reader: WalReader | None = None
        self._advanced = 0.0
        self._deposits: list[str] = []
        self._pieces: list[Piece] = []
        self._answering: Answering | None = None

    def _connected(self) -> WalReader:
        if self._reader is None:
            options = self._options
            self._reader = WalReader(
                options.dsn,
                options.slot,
                options.publication,
                options.applied,
                origin=options.origin,
                block_bytes=min(_BLOCK_BYTES, options.max_batch_bytes),
                buffer_bytes=2 * options.max_batch_bytes,
            )
        return self._reader

    def initialOffset(self) -> dict[str, Any]:
        return Position(self._options.applied).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._options.max_batch_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Acknowledge the batch that ended at ``start``, and choose the end of the next one."""
        options, after = self._options, Position.from_json(start)
        reader = self._connected()
        if after > Position(options.applied):
            failpoint("before-acknowledgement")
            reader.committed(after)
            self._pieces = []
            failpoint("after-acknowledgement")
            self._discard()
        max_bytes = getattr(limit, "max_bytes", options.max_batch_bytes)
        cut = options.trigger is None or reader.await_batch(
            after, max_bytes, begun=self._advanced, trigger=options.trigger, patience=options.patience
        )
        end = reader.cut(after, max_bytes) if cut else after
        if end == after and time.monotonic() - self._advanced >= options.heartbeat:
            end = reader.idle_position(after)
        if end != after:
            self._advanced = time.monotonic()
        elif options.local is not None and (passed := reader.passed(after)) is not None:
            report_idle(options.local.directory, passed)
        return end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Ship the raw messages of ``(start, end]``, which this reader chose: no two queries share a checkpoint."""
        first, last = Position.from_json(start), Position.from_json(end)
        failpoint("before-batch-planned")
        pieces = self._connected().take(first, last)
        local = self._options.local
        offered = offered_stages(local.directory) if local is not None else {}
        slots = local.task_slots if local is not None else 0
        shipped = [self._shippable(piece) for piece in pieces]
        socket_directory = self._keep_for_tasks([piece for piece, _ in shipped]) if slots and shipped else None
        texts = {"start": json.dumps(start), "end": json.dumps(end)}
        rows: list[dict[str, Any]] = [
            texts | {"index": i, "piece": piece.to_bytes() if socket_directory is None else b"", "deposit": deposit}
            for i, (piece, deposit) in enumerate(shipped)
        ] or [texts | {"index": 0, "piece": b"", "deposit": None}]
        failpoint("after-batch-planned")
        # Each task costs the JVM and a worker about ten milliseconds, so there are no more than run at once. Pieces are
        # dealt out in turn, so that the first are staged first: a sink may apply them while the others are staged.
        tasks = min(len(rows), slots) if slots else len(rows)
        return [PiecePartition(rows[task::tasks], offered, socket_directory) for task in range(tasks)]

    def _shippable(self, piece: Piece) -> tuple[Piece, str | None]:
        """Return a piece as it is shipped, and the name of the deposit of its messages if it is too large."""
        if piece.size <= _MAX_SHIPPED_BYTES:
            return piece, None
        name = uuid.uuid4().hex
        self._deposits.append(name)
        with _sink_failures(f"depositing {human_bytes(piece.size)} of the log in the sink"):
            self._options.piece_store.deposit(self._options.epoch, name, bytes(piece.data))
        return replace(piece, data=b""), name

    def _keep_for_tasks(self, pieces: list[Piece]) -> str:
        """Keep the pieces of a batch for tasks that ask for them by index; return the directory of the socket."""
        assert self._options.local is not None
        directory = self._options.local.directory
        self._pieces = pieces
        if self._answering is None:
            self._answering = Answering(directory, _SOCKET, lambda index: self._pieces[int(index)].parts())
        return directory

    def _discard(self) -> None:
        """Remove the deposits of batches that are committed. Those of a lost run are removed when a stream starts."""
        if self._deposits:
            with _sink_failures("removing deposits from the sink"):
                self._options.piece_store.discard(self._options.epoch, self._deposits)
            self._deposits = []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, staged if the driver has chosen one of the offers; runs on an executor."""
        assert isinstance(partition, PiecePartition)
        task, failed = agreed_stage(partition.offered), False
        for row in partition.rows:
            if partition.socket_directory is not None:
                row = row | {"piece": ask(partition.socket_directory, _SOCKET, str(row["index"]).encode())}
            if task is not None:
                message = task.message(row)
                failed |= isinstance(message, CdcError)
                row = {"index": row["index"], "message": pickle.dumps(message)}
                if partition.socket_directory is not None:
                    report_staged(partition.socket_directory, row["message"])
            yield pa.RecordBatch.from_pylist([row], schema=_ARROW)
        if not failed:
            spare_modules()

    def stop(self) -> None:
        if self._answering is not None:
            self._answering.close()
        if self._reader is not None:
            self._reader.close()


@contextmanager
def _sink_failures(what: str) -> Iterator[None]:
    """Raise errors of the sink's driver as the engine's, which the job recognizes by their names."""
    try:
        yield
    except DRIVER_ERRORS as e:
        raise driver_failure(e, what) from e
