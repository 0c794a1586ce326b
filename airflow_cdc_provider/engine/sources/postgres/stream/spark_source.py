"""The Spark data source ``postgres_cdc``: a replication slot as a stream of raw WAL pieces.

Spark keeps one reader in a long-lived Python process beside the driver; it holds
the replication connection, so decoding on the server starts once and not per
batch. ``latestOffset`` decides where a batch ends, ``partitions`` ships the raw
messages, and executors decode them.

Spark calls ``commit`` only when it builds the next batch, and never when idle.
The ``start`` argument of ``latestOffset`` is the reliable sign that a batch is in
Spark's commit log, and since the sink commits before Spark does, in the sink too.
The slot is acknowledged from there, and from nowhere else.

Schema of the stream, one row a piece:

==========  =======  ===========================================================
``start``   string   JSON of the position after which the batch begins
``end``     string   JSON of the position at which the batch ends
``index``   int      order of the piece in the batch
``piece``   binary   :meth:`Piece.to_bytes`; empty in a batch that only advances
``deposit`` string   where the sink has the messages of the piece; null if they
                     stand in it
``message`` binary   what :class:`.staging_task.Stage` says of the piece, pickled, where
                     it is staged in the read itself (:mod:`.inline_staging`): then the
                     others are null but for ``index``; else this is null
==========  =======  ===========================================================

A piece is as large as a block, unless a single row is larger. Such a row must not pass through the JVM, which would
hold several copies of it and cannot ship more than ``spark.rpc.message.maxSize``: its piece is deposited in the sink,
which each executor reaches, and fetched by the task that stages it.
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
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import chosen, handed_out, tell, tell_idle
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
# Spark asks again every 10 ms, which is work, too; but it cannot end a process that waits here.
_PATIENCE_SECONDS = 1.0
_SHIPPED_BYTES = 2 * _BLOCK_BYTES  # a larger piece is one of a large row


@dataclass(frozen=True)
class Meeting:
    """Where the reader meets other processes of this machine.

    :param directory: there the driver says how pieces are staged, see :mod:`.inline_staging`.
    :param slots: how many tasks run at once (``spark.default.parallelism`` where it is set), if they run on this
        machine and can ask the reader for their pieces; else 0.
    """

    directory: str
    slots: int

    @classmethod
    def of(cls, spark: SparkSession, directory: str) -> Self:
        """The one of the jobs of a session."""
        # Of what imports this module only the driver needs pipeline files.
        from airflow_cdc_provider.engine.spark.settings import runs_locally

        context = spark.sparkContext
        return cls(directory, context.defaultParallelism if runs_locally(str(context.master)) else 0)


@dataclass(frozen=True)
class SourceOptions:
    """What the reader needs to know.

    :param origin: the server whose slot it must be.
    :param applied: LSN that is durable in the sink; the stream is asked from there.
    :param max_batch_bytes: bytes of messages a batch should not exceed.
    :param heartbeat: seconds between two advances without content.
    :param sink: where pieces are deposited that are too large to be shipped.
    :param epoch: of the run.
    :param trigger: least seconds from the start of a batch to that of the next, unless there is as much as a batch may
        hold, or the oldest that waits was committed longer ago. Spark's own triggers would have a backlog wait, too,
        and a single change for the next round number.
        ``None`` for a reader that does not wait, not even for a change.
    :param meeting: ``None`` when pieces are staged behind the read.
    """

    dsn: str = field(repr=False)
    slot: str
    publication: str
    origin: Origin
    applied: Lsn
    max_batch_bytes: int
    heartbeat: float
    sink: Sink
    epoch: int
    trigger: float | None = None
    meeting: Meeting | None = None


def postgres_cdc(options: SourceOptions) -> type[DataSource]:
    """The data source ``postgres_cdc`` of one slot, to be registered with Spark.

    Options of a Spark source show up in plans and in the Spark UI, and a file would outlive a driver that is killed.
    A class that was made in a function is shipped by its code, and what it refers to goes with it: over a pipe to the
    reader's process, inside the task to executors, and to no disk.
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
    :param handed: how they may be staged, from :func:`.inline_staging.handed_out`.
    :param shelf: where the task asks for each ``piece``, which is empty in the rows then.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], handed: Mapping[str, bytes] | None = None, shelf: str | None = None
    ) -> None:
        super().__init__(rows[0]["index"])
        self.rows = rows
        self.handed = handed or {}
        self.shelf = shelf


class SlotStreamReader(DataSourceStreamReader):
    """Spark's view of a slot. Connects on first use: a copy of it is pickled into the read tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._reader: WalReader | None = None
        self._advanced = 0.0
        self._deposits: list[str] = []
        self._shelf: list[Piece] = []
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
        """Choose the end of the next batch, having acknowledged the one that ended at ``start``."""
        options, after = self._options, Position.from_json(start)
        reader = self._connected()
        if after > Position(options.applied):
            failpoint("before-acknowledgement")
            reader.committed(after)
            self._shelf = []
            failpoint("after-acknowledgement")
            self._discard()
        max_bytes = getattr(limit, "max_bytes", options.max_batch_bytes)
        cut = options.trigger is None or reader.await_batch(
            after, max_bytes, begun=self._advanced, trigger=options.trigger, patience=_PATIENCE_SECONDS
        )
        end = reader.cut(after, max_bytes) if cut else after
        if end == after and time.monotonic() - self._advanced >= options.heartbeat:
            end = reader.idle_position(after)
        if end != after:
            self._advanced = time.monotonic()
        elif options.meeting is not None and (passed := reader.passed(after)) is not None:
            tell_idle(options.meeting.directory, passed)
        return end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Ship the raw messages of ``(start, end]``, which were chosen here: no two queries share a checkpoint."""
        first, last = Position.from_json(start), Position.from_json(end)
        failpoint("before-batch-planned")
        pieces = self._connected().take(first, last)
        meeting = self._options.meeting
        handed = handed_out(meeting.directory) if meeting is not None else {}
        slots = meeting.slots if meeting is not None else 0
        shipped = [self._shippable(piece) for piece in pieces]
        shelf = self._shelve([piece for piece, _ in shipped]) if slots and shipped else None
        texts = {"start": json.dumps(start), "end": json.dumps(end)}
        rows: list[dict[str, Any]] = [
            texts | {"index": i, "piece": piece.to_bytes() if shelf is None else b"", "deposit": deposit}
            for i, (piece, deposit) in enumerate(shipped)
        ] or [texts | {"index": 0, "piece": b"", "deposit": None}]
        failpoint("after-batch-planned")
        # Each task costs the JVM and a worker some ten milliseconds: so there are no more than run at once. Pieces are
        # dealt out in turn, so that the first are staged first: a sink may apply them while the others are staged.
        tasks = min(len(rows), slots) if slots else len(rows)
        return [PiecePartition(rows[task::tasks], handed, shelf) for task in range(tasks)]

    def _shippable(self, piece: Piece) -> tuple[Piece, str | None]:
        """A piece as it is shipped; one that is too large without its messages, which are deposited in the sink."""
        if piece.size <= _SHIPPED_BYTES:
            return piece, None
        name = uuid.uuid4().hex
        self._deposits.append(name)
        with _sink_failures(f"depositing {human_bytes(piece.size)} of the log in the sink"):
            self._options.sink.deposit(self._options.epoch, name, bytes(piece.data))
        return replace(piece, data=b""), name

    def _shelve(self, pieces: list[Piece]) -> str:
        """Answer the tasks of a batch, which ask for its pieces by index; return where."""
        assert self._options.meeting is not None
        directory = self._options.meeting.directory
        self._shelf = pieces
        if self._answering is None:
            self._answering = Answering(directory, _SOCKET, lambda index: self._shelf[int(index)].parts())
        return directory

    def _discard(self) -> None:
        """Remove what was deposited for batches that are committed. What a lost run has left is swept at the start."""
        if self._deposits:
            with _sink_failures("removing deposits from the sink"):
                self._options.sink.discard(self._options.epoch, self._deposits)
            self._deposits = []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, staged if the driver goes by what was handed out; runs on an executor."""
        assert isinstance(partition, PiecePartition)
        stage, failed = chosen(partition.handed), False
        for row in partition.rows:
            if partition.shelf is not None:
                row = row | {"piece": ask(partition.shelf, _SOCKET, str(row["index"]).encode())}
            if stage is not None:
                message = stage.message(row)
                failed |= isinstance(message, CdcError)
                row = {"index": row["index"], "message": pickle.dumps(message)}
                if partition.shelf is not None:
                    tell(partition.shelf, row["message"])
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
    """Raise errors of the sink's driver as the engine's, by whose names the job tells them."""
    try:
        yield
    except DRIVER_ERRORS as e:
        raise driver_failure(e, what) from e
