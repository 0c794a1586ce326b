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
==========  =======  ===========================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes
from pyspark.sql.types import StructType

from airflow_cdc_provider.engine.buffer import Position
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.wal import WalReader

SCHEMA = "start string, end string, index int, piece binary"

_ARROW = pa.schema([("start", pa.string()), ("end", pa.string()), ("index", pa.int32()), ("piece", pa.binary())])
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class SourceOptions:
    """What the reader needs to know.

    :param origin: the server whose slot it must be.
    :param applied: LSN that is durable in the sink; the stream is asked from there.
    :param max_batch_bytes: bytes of messages a batch should not exceed.
    :param heartbeat: seconds between two advances without content.
    """

    dsn: str = field(repr=False)
    slot: str
    publication: str
    origin: Origin
    applied: int
    max_batch_bytes: int
    heartbeat: float


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
    """One row of the stream, shipped with its task."""

    def __init__(self, start: str, end: str, index: int, piece: bytes) -> None:
        super().__init__(index)
        self.start, self.end, self.index, self.piece = start, end, index, piece


class SlotStreamReader(DataSourceStreamReader):
    """Spark's view of a slot. Connects on first use: a copy of it is pickled into the read tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._reader: WalReader | None = None
        self._advanced = 0.0

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
            failpoint("after-acknowledgement")
        end = reader.cut(after, getattr(limit, "max_bytes", options.max_batch_bytes))
        if end == after and time.monotonic() - self._advanced >= options.heartbeat:
            end = reader.idle_position(after)
        if end != after:
            self._advanced = time.monotonic()
        return end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Ship the raw messages of ``(start, end]``, which were chosen here: no two queries share a checkpoint."""
        first, last = Position.from_json(start), Position.from_json(end)
        failpoint("before-batch-planned")
        pieces = self._connected().take(first, last)
        failpoint("after-batch-planned")
        texts = json.dumps(start), json.dumps(end)
        if not pieces:
            return [PiecePartition(*texts, 0, b"")]
        return [PiecePartition(*texts, i, piece.to_bytes()) for i, piece in enumerate(pieces)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the one row of a partition; runs on an executor."""
        assert isinstance(partition, PiecePartition)
        row = {"start": partition.start, "end": partition.end, "index": partition.index, "piece": partition.piece}
        yield pa.RecordBatch.from_pylist([row], schema=_ARROW)

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
