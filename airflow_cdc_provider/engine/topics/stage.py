"""The work of a staging task: rows that the query returns in, effects in the sink's staging and pickled messages out.

It runs on executors, as do the texts for a comparison. A task has the rows of a partition in their order, so that of
those with the same key the last one stays; the pieces of a unit are applied in the order of Spark's partitions, in
which those of Kafka are read.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.drivers import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.effects import ERASED, OP, Effect
from airflow_cdc_provider.engine.errors import CdcError, ValueRefused
from airflow_cdc_provider.engine.garbage import spare_modules
from airflow_cdc_provider.engine.sinks.base import Sink, Staged, StagedPiece
from airflow_cdc_provider.engine.sinks.lake.values import TEXT, to_texts

RESULT_OP = "_op"
"""The column of the result that says what has been done to a row, see :data:`.messages.OP`."""

_ROWS = 100_000  # staged at a time
_PARTITION_BITS = 40  # of a row's number in its unit, those below the number of its task


@dataclass(frozen=True)
class TopicStage:
    """The work of a staging task, as a function that Spark ships.

    :param batch: a name that no other attempt of the unit has.
    :param unit: its number.
    """

    sink: Sink
    epoch: int
    batch: str
    table: Table
    unit: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        message: StagedPiece | CdcError
        try:
            message = self._stage(batches)
        except CdcError as e:  # returned, not raised: Spark would wrap it in text and try again
            message = e
        except DRIVER_ERRORS as e:
            message = driver_failure(e, "staging")
        yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(message)]})
        if isinstance(message, StagedPiece):
            spare_modules()

    def _stage(self, batches: Iterator[pa.RecordBatch]) -> StagedPiece:
        context = TaskContext.get()
        index = context.partitionId() if context is not None else 0
        staged: list[Staged] = []
        count = 0
        for rows in _portions(batches):
            effect = self._effect(rows, (index << _PARTITION_BITS) + count + 1)
            attempt = f"{self.batch}_{index}_{uuid.uuid4().hex[:8]}"
            staged += self.sink.stage(self.epoch, attempt, [effect])
            count += rows.num_rows
        changes = {self.table.label: count} if count else {}
        return StagedPiece("", "", index, count, b"", tuple(staged), frozenset(), 0, {}, changes)

    def _effect(self, rows: pa.Table, first: int) -> Effect:
        """What rows do to the table.

        :param first: number of the first row in the unit.
        """
        columns = [to_texts(rows[column.name].combine_chunks()) for column in self.table.columns]
        self._require_keys(columns)
        letters = rows[RESULT_OP].combine_chunks().cast(pa.string()) if RESULT_OP in rows.column_names else None
        if self.sink.mode == "mirror":
            return Effect(self.table.label, False, self._mirror(columns, letters, rows.num_rows))
        return Effect(self.table.label, False, self._changelog(columns, letters, rows.num_rows, first))

    def _require_keys(self, columns: list[pa.Array]) -> None:
        for column, texts in zip(self.table.columns, columns, strict=True):
            if column.name in self.table.key and texts.null_count:
                raise ValueRefused(
                    f"the query of {self.table.label} returns a row without {column.name}, which is of its key",
                    "Nothing of the batch was applied. Declare the column NOT NULL in source.columns, so that such"
                    " messages are bad records, or leave its rows out in source.sql.",
                )

    def _mirror(self, columns: list[pa.Array], letters: pa.Array | None, count: int) -> pa.Table:
        erased = pc.fill_null(pc.equal(letters, "d"), False) if letters is not None else pa.array(np.zeros(count, bool))
        made = pa.table({ERASED: erased} | {f"c{i}": column for i, column in enumerate(columns)})
        return last_of_each(made, key_of(self.table))

    def _changelog(self, columns: list[pa.Array], letters: pa.Array | None, count: int, first: int) -> pa.Table:
        ops = pc.fill_null(letters, "i") if letters is not None else pa.array(["i"] * count)
        return pa.table(
            {
                OP: ops,
                "commit_lsn": pa.array(np.full(count, self.unit, dtype=np.int64)),
                "seq": pa.array(np.arange(first, first + count, dtype=np.int64)),
                "xid": pa.array(np.full(count, self.unit & 0xFFFFFFFF, dtype=np.int64)),
                "commit_ts": pa.array(np.full(count, time.time_ns() // 1000, dtype=np.int64)),
                **{f"c{i}": column for i, column in enumerate(columns)},
            }
        )


@dataclass(frozen=True)
class TopicTexts:
    """Makes texts of the query's rows for a comparison.

    :param keyed: of the rows of a task with the same key the last one stays.
    """

    table: Table
    keyed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in _portions(batches):
            columns = [to_texts(rows[column.name].combine_chunks()) for column in self.table.columns]
            told = rows[RESULT_OP] if RESULT_OP in rows.column_names else pa.nulls(rows.num_rows, pa.string())
            made = pa.table({f"c{i}": column for i, column in enumerate(columns)} | {RESULT_OP: told})
            kept = last_of_each(made, key_of(self.table)) if self.keyed else made
            yield from kept.cast(pa.schema([(name, pa.string()) for name in kept.column_names])).to_batches()


def key_of(table: Table) -> list[str]:
    """The key's columns, by their places."""
    return [f"c{i}" for i, column in enumerate(table.columns) if column.name in table.key]


def last_of_each(rows: pa.Table, key: list[str]) -> pa.Table:
    """Of rows with the same key the last one, in the order in which they stand."""
    numbered = rows.select(key).append_column("row", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(key).aggregate([("row", "max")])["row_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last)))


def _portions(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches put together to as many rows as are staged at a time; dictionaries and short offsets are left behind."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            rows += batch.num_rows
        if rows >= _ROWS:
            yield _plain(held)
            held, rows = [], 0
    if held:
        yield _plain(held)


def _plain(batches: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(batches)
    wanted = [field.with_type(TEXT) if pa.types.is_string(field.type) else field for field in table.schema]
    return table.cast(pa.schema(wanted))
