"""The staging task: takes a raw piece of the log, stages its effects in the sink and returns a message about them.

It runs on executors, in the task that reads the piece or in a second one behind that (see :mod:`.inline_staging`). The
effects of a piece follow from the log alone, with two exceptions: only the source can tell in which chunk some keys
lie, and only the target whether some keys are equal to keys that were read again.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_cdc_provider.engine.changes.effects import TableFilter, between, effects
from airflow_cdc_provider.engine.changes.row_transform import RowTransform, transformed_effect
from airflow_cdc_provider.engine.changes.schema_change import FormatChange, first_format_change
from airflow_cdc_provider.engine.core.errors import CdcError, values_hidden
from airflow_cdc_provider.engine.core.lsn import LOG_END, LOG_START, Lsn
from airflow_cdc_provider.engine.core.piece_store import PieceStore
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.core.row_changes import Changes
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, connect
from airflow_cdc_provider.engine.postgres.driver_errors import (
    DRIVER_ERRORS,
    driver_failure,
    is_undefined_object,
    sqlstate,
)
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import chunk_of
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import Piece
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

PIECE = ("start", "end", "index", "piece", "deposit")
"""The columns of :class:`.spark_source.PostgresCdcSource` that hold what is to be staged."""


@dataclass(frozen=True)
class Unplaced:
    """A table whose source can no longer tell in which chunks keys lie; ``why`` is its error.

    Keys and bounds are texts from different times: in between, the type or one of its labels was renamed.
    """

    label: str
    why: str


class _CannotPlace(Exception):
    def __init__(self, unplaced: Unplaced) -> None:
        super().__init__(unplaced)
        self.unplaced = unplaced


@dataclass(frozen=True)
class StagingTask:
    """The work of a staging task; called by Spark as a function, it takes raw pieces and yields pickled messages.

    :param piece_store: where large pieces are deposited.
    :param targets: all that are recorded. A leaf that has moved from one table to another belongs to both until the
        first one is read again.
    :param high: the highest high watermark of all reads, including those that need no filter any more.
    :param since, before: bounds of the commit records of the transactions that are staged.
    """

    sink: Sink
    piece_store: PieceStore
    epoch: int
    targets: tuple[Target, ...]
    filters: dict[str, TableFilter]
    high: Lsn
    source_dsn: str = field(repr=False)
    transform: RowTransform
    since: Lsn = LOG_START
    before: Lsn = LOG_END

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        failed = False
        for batch in batches:
            for i in range(batch.num_rows):  # one by one, as each is copied
                (row,) = batch.select(PIECE).slice(i, 1).to_pylist()
                message = self.message(row)
                failed |= isinstance(message, CdcError)
                yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(message)]})
        if not failed:
            spare_modules()

    def message(self, piece: Mapping[str, Any]) -> StagedPiece | FormatChange | Unplaced | CdcError:
        """Stage a piece and return the message about it.

        :param piece: a row with the columns :data:`PIECE`.
        """
        try:
            return self._stage(**piece)
        except _CannotPlace as e:
            return e.unplaced
        except CdcError as e:  # returned, not raised: Spark would turn it into text and try again
            return e
        except DRIVER_ERRORS as e:
            return driver_failure(e, "staging")

    def _decode(self, packed: bytes, deposit: str | None) -> tuple[list[Changes], int]:
        """Return the changes of a piece, and the commit record of the transaction that is open at its start, or 0."""
        if not packed:
            return [], 0
        piece = Piece.from_bytes(packed)
        if deposit is not None:
            piece = replace(piece, data=self.piece_store.fetch(self.epoch, deposit, piece.size))
        decoded = [between(changes, self.since, self.before) for changes in decode(piece)]
        return decoded, piece.transaction.commit_lsn if piece.transaction else 0

    def _stage(self, start: str, end: str, index: int, piece: bytes, deposit: str | None) -> StagedPiece | FormatChange:
        decoded, opened = self._decode(piece, deposit)
        tables: dict[int, list[Table]] = {}
        for target in self.targets:
            for leaf in target.table.leaves:
                tables.setdefault(leaf.oid, []).append(target.table)
        snapshots = {label: filter_.snapshots for label, filter_ in self.filters.items()}
        change = first_format_change(decoded, tables, snapshots, opened)
        if change is not None:
            return change
        source: Connection | None = None

        def ask(table: Table, bounds: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
            nonlocal source
            source = source or connect(self.source_dsn)
            try:
                return chunk_of(source, table, bounds, keys)
            except DRIVER_ERRORS as e:
                if not is_undefined_object(e):
                    raise
                said = f"SQLSTATE {sqlstate(e)}" if values_hidden() else str(e).splitlines()[0]
                raise _CannotPlace(Unplaced(table.label, said)) from e

        labelled = {target.table.label: target for target in self.targets}

        def ask_members(
            table: Table, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
        ) -> Sequence[tuple[int, int]]:
            return self.sink.members(labelled[table.label], members, keys)

        try:
            net = effects(decoded, tables, self.filters, self.sink.mode, ask, ask_members)
        finally:
            if source is not None:
                source.close()
        made = [transformed_effect(self.transform, labelled[each.label].table, each) for each in net.effects]
        staged = self.sink.stage(self.epoch, f"{self.epoch}_{index}_{uuid.uuid4().hex[:12]}", made)
        xids = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(c.xid for c in decoded)]))
        return StagedPiece(
            start,
            end,
            index,
            sum(len(c.op) for c in decoded),
            xids.astype("<u4").tobytes(),
            staged,
            net.split_truncates,
            self.high,
            {c.relation.oid: int(c.xid[c.op == ord("t")][-1]) for c in decoded if (c.op == ord("t")).any()},
            net.changes,
            net.operations,
        )


def open_filters(record: Record, applied: Lsn) -> dict[str, TableFilter]:
    """Return the filters that still matter, by table: a read sees nothing that committed after its high watermark.

    Others must be left out, since transaction ids can only be compared within 2^31 of each other.
    """
    if record.high <= applied:
        return {}
    filters = {}
    for label, read in record.finished.items():
        still = [(c, watermark) for c, watermark in read if watermark.high > applied]
        # To find the chunk of a key, the bounds of all chunks are needed.
        open_ = any(c.keys is None for c, _ in still)
        ranges = [(c.chunk, watermark) for c, watermark in read if c.keys is None] if open_ else []
        reread = {key: watermark.snapshot for c, watermark in still for key in c.keys or ()}
        if ranges or reread:
            filters[label] = TableFilter(
                bounds=tuple(chunk.lower for chunk, _ in ranges if chunk.lower is not None),
                snapshots=tuple(watermark.snapshot for _, watermark in ranges),
                reread=reread,
            )
    return filters
