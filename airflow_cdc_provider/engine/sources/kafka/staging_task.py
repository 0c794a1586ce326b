"""The work of a staging task: stages rows of the query as effects in the sink, and returns pickled messages.

It runs on executors, like the creation of texts for a comparison. A task has the rows of a partition in order, so that
the last row of each key remains. The pieces of a unit are applied in the order of Spark's partitions, which is the
order of Kafka's partitions.
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
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.changes.effects import array_literal, quoted_name
from airflow_cdc_provider.engine.changes.row_transform import RowTransform, transformed_effect
from airflow_cdc_provider.engine.comparison.hash_sums import hashes_of
from airflow_cdc_provider.engine.core.effect import ERASED, MISSING, OP, UNCHANGED, Effect
from airflow_cdc_provider.engine.core.errors import CdcError, ValueRefused
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.array_text import array_elements, array_texts
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure, sqlstate
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, to_texts
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import Staged, StagedPiece
from airflow_cdc_provider.engine.sources.kafka.position import UnitNumber
from airflow_cdc_provider.engine.sources.kafka.unchanged_values import Away, masks, net_of
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

LEFT_OUT = "_unchanged"
"""The column of the result that names columns with an omitted value, see :data:`.unchanged_values.UNCHANGED`."""

RESULT_OP = "_op"
"""The column of the result that contains the operation on a row, see :data:`.message_view.OP`."""

UNSENT = "\ue000a value that was not sent\ue000"
"""Represents in texts a value that a message omits, if no other message contains it."""

HASHES = "key string, hash bigint, first bigint, second bigint"
"""The columns that :class:`TopicHashes` makes."""

_DATA = "22"  # SQLSTATE's error class for data, such as a zero byte in a text
SEGMENT_BITS, SEGMENTS = 50, 8000  # bits of a row's number below its unit's segment; and the maximum number of segments
_ROWS = 100_000  # rows staged at a time
_PARTITION_BITS = 34  # bits of a row's number in its unit below the number of its task


@dataclass(frozen=True)
class TopicStagingTask:
    """The work of a staging task, as a function that Spark ships.

    :param batch: a name that no other attempt of the unit has.
    :param unit: number of the unit.
    :param segment: number of the unit's segment, between two truncates.
    """

    sink: Sink
    epoch: int
    batch: str
    table: Table
    unit: UnitNumber
    segment: int
    transform: RowTransform

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        message: StagedPiece | CdcError
        try:
            message = self._stage(batches)
        except CdcError as e:  # returned, not raised: Spark would wrap it in text and try again
            message = e
        except DRIVER_ERRORS as e:
            message = driver_failure(e, "staging")
            if (sqlstate(e) or "").startswith(_DATA):
                message = ValueRefused(message.message, message.solution)
        yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(message)]})
        if isinstance(message, StagedPiece):
            spare_modules()

    def _stage(self, batches: Iterator[pa.RecordBatch]) -> StagedPiece:
        context = TaskContext.get()
        index = context.partitionId() if context is not None else 0
        staged: list[Staged] = []
        count = 0
        for rows in _portions(batches):
            first = (self.segment << SEGMENT_BITS) + (index << _PARTITION_BITS) + count + 1
            effect = transformed_effect(self.transform, self.table, self._effect(rows, first))
            attempt = f"{self.batch}_{index}_{uuid.uuid4().hex[:8]}"
            staged += self.sink.stage(self.epoch, attempt, [effect])
            count += rows.num_rows
        changes = {self.table.label: count} if count else {}
        return StagedPiece("", "", index, count, b"", tuple(staged), frozenset(), LOG_START, {}, changes)

    def _effect(self, rows: pa.Table, first: int) -> Effect:
        """Return the effect of rows on the table.

        :param first: number of the first row in the unit.
        """
        columns = [to_texts(rows[place].combine_chunks()) for place in places_of(self.table)]
        self._require_keys(columns)
        letters = rows[RESULT_OP].combine_chunks().cast(pa.string()) if RESULT_OP in rows.column_names else None
        away = left_out(rows, self.table)
        if self.sink.mode == "mirror":
            return Effect(self.table.label, False, self._mirror(columns, letters, away, rows.num_rows))
        return Effect(self.table.label, False, self._changelog(columns, letters, away, rows.num_rows, first))

    def _require_keys(self, columns: list[pa.Array]) -> None:
        for column, texts in zip(self.table.columns, columns, strict=True):
            if column.name in self.table.key and texts.null_count:
                raise ValueRefused(
                    f"the query of {self.table.label} returns a row without {column.name}, which is part of the key",
                    "Nothing of the batch was applied. Declare the column NOT NULL in source.columns, so that such"
                    " messages are bad records, or filter out such rows in source.sql.",
                )

    def _mirror(self, columns: list[pa.Array], letters: pa.Array | None, away: Away, count: int) -> pa.Table:
        if away:
            return net_of(self.table, columns, letters, away)
        erased = pc.fill_null(pc.equal(letters, "d"), False) if letters is not None else pa.array(np.zeros(count, bool))
        made = pa.table({ERASED: erased} | {f"c{i}": column for i, column in enumerate(columns)})
        return last_of_each(made, key_of(self.table))

    def _changelog(
        self, columns: list[pa.Array], letters: pa.Array | None, away: Away, count: int, first: int
    ) -> pa.Table:
        ops = pc.fill_null(letters, "i") if letters is not None else pa.array(["i"] * count)
        named = {quoted_name(self.table.columns[i].name): mask for i, mask in away.items()}
        unchanged = {UNCHANGED: array_literal(named)} if named else {}
        return pa.table(
            {
                OP: ops,
                "commit_lsn": pa.array(np.full(count, self.unit, dtype=np.int64)),
                "seq": pa.array(np.arange(first, first + count, dtype=np.int64)),
                "xid": pa.array(np.full(count, self.unit & 0xFFFFFFFF, dtype=np.int64)),
                "commit_ts": pa.array(np.full(count, time.time_ns() // 1000, dtype=np.int64)),
                **{f"c{i}": column for i, column in enumerate(columns)},
                **unchanged,
            }
        )


@dataclass(frozen=True)
class TopicTexts:
    """Makes texts of the query's rows for a comparison.

    :param keyed: keep only the last row of each key in a task. Otherwise omitted values are NULL, as in a changelog.
    """

    table: Table
    keyed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in _portions(batches):
            columns = [to_texts(rows[place].combine_chunks()) for place in places_of(self.table)]
            ops = rows[RESULT_OP] if RESULT_OP in rows.column_names else pa.nulls(rows.num_rows, pa.string())
            away = left_out(rows, self.table) if self.keyed else {}
            columns = [unsent(column, away.get(i)) for i, column in enumerate(columns)]
            made = pa.table({f"c{i}": column for i, column in enumerate(columns)} | {RESULT_OP: ops})
            kept = last_texts(made, self.table) if self.keyed else made
            yield from kept.cast(pa.schema([(name, pa.string()) for name in kept.column_names])).to_batches()


@dataclass(frozen=True)
class TopicHashes:
    """Makes hashes of the query's rows for a comparison; they are much smaller than texts, but require complete rows.

    Rows have the columns of :data:`HASHES`. If the table has a key, these are the key's text, its first hash, and the
    two hashes of the row; only the last row of each key in a portion is kept. Otherwise the first hash is that of the
    whole row. See :mod:`.hash_sums`.
    """

    table: Table

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        key = key_of(self.table)
        for rows in _portions(batches):
            made = pa.table({place: to_texts(rows[place].combine_chunks()) for place in places_of(self.table)})
            kept = (last_of_each(made, key) if key else made).combine_chunks()
            contents = hashes_of(array_texts([column.chunk(0) for column in kept.columns]).to_pylist())
            keys = array_texts([kept[place].chunk(0) for place in key]).cast(pa.string()) if key else None
            columns = {
                "key": pa.nulls(kept.num_rows, pa.string()) if keys is None else keys,
                "hash": contents[:, 0] if keys is None else hashes_of(keys.to_pylist())[:, 0],
                "first": contents[:, 0],
                "second": contents[:, 1],
            }
            yield pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in columns.items()})


def last_texts(rows: pa.Table, table: Table) -> pa.Table:
    """Return the last texts of each key, with omitted values filled from earlier texts of the key.

    :param rows: with :data:`UNSENT` for such values, as in the result, and :data:`RESULT_OP`.
    """
    columns = [rows[place].combine_chunks() for place in places_of(table)]
    away = {i: mask for i, column in enumerate(columns) if (mask := _are_unsent(column)).any()}
    if not away:
        return last_of_each(rows, key_of(table))
    net = net_of(table, columns, rows[RESULT_OP].combine_chunks(), away)
    missing = _missing(net)
    kept = {place: unsent(net[place].combine_chunks(), missing.get(i)) for i, place in enumerate(places_of(table))}
    return pa.table(kept | {RESULT_OP: pc.if_else(net[ERASED], "d", "u")})


def unsent(column: pa.Array, mask: NDArray[np.bool_] | None) -> pa.Array:
    """Return a column of texts with :data:`UNSENT` where the mask is set."""
    return column if mask is None else pc.if_else(pa.array(mask), pa.scalar(UNSENT, column.type), column)


def left_out(rows: pa.Table, table: Table) -> Away:
    """Return where values are omitted, see :func:`.unchanged_values.masks`."""
    if LEFT_OUT not in rows.column_names:
        return {}
    return masks(rows[LEFT_OUT].combine_chunks(), [column.name for column in table.columns])


def _are_unsent(column: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.fill_null(pc.equal(column, UNSENT), False).to_numpy(zero_copy_only=False)
    return found


def _missing(net: pa.Table) -> Away:
    """Return by column number the rows with a missing value, of rows as in :class:`.effects.Effect`."""
    if MISSING not in net.column_names:
        return {}
    listed = [array_elements(text) if text else [] for text in net[MISSING].to_pylist()]
    return {int(i): np.array([i in each for each in listed]) for i in {i for each in listed for i in each}}


def by_place(rows: DataFrame, table: Table) -> DataFrame:
    """Name the columns of a result by their numbers in the table, because Spark would read a dot in a name as field
    access.
    """
    places = {column.name: place for column, place in zip(table.columns, places_of(table), strict=True)}
    return rows.toDF(*(places.get(name, name) for name in rows.columns))


def places_of(table: Table) -> list[str]:
    """Return the names that :func:`by_place` gives, in the order of the table's columns."""
    return [f"c{i}" for i in range(len(table.columns))]


def key_of(table: Table) -> list[str]:
    """Return the key's columns in key order, under the names of :func:`by_place`."""
    names = [column.name for column in table.columns]
    return [f"c{names.index(name)}" for name in table.key]


def last_of_each(rows: pa.Table, key: list[str]) -> pa.Table:
    """Return the last of the rows with the same key, in the given order."""
    numbered = rows.select(key).append_column("row", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(key).aggregate([("row", "max")])["row_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last)))


def _portions(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield batches combined into as many rows as are staged at a time, without dictionaries and 32-bit offsets."""
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
