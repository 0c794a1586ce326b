"""Reads and writes staged Parquet files, with typed columns ``c0`` … in the order of the captured columns.

========  ==========================================================================================
rows      of a chunk or a re-read: only ``c0`` …
effects   of a piece on a mirror: ``erased``, ``c0`` …; with values that were not sent also ``missing``
          (the columns' numbers) and ``o0`` …, the key under which the sink has the values
events    of a changelog: ``c0`` …, ``op``, ``commit_lsn``, ``seq``, ``xid``, ``commit_ts``, ``before``,
          ``unchanged``
========  ==========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.core.effect import ERASED, MISSING, OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.postgres.array_text import array_elements
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, arrow_type, to_typed
from airflow_cdc_provider.engine.sinks.lake.storage import Storage

EVENT_COLUMNS: dict[str, pa.DataType] = {
    OP: TEXT,
    "commit_lsn": pa.int64(),
    "seq": pa.int64(),
    "xid": pa.int64(),
    "commit_ts": pa.timestamp("us", "UTC"),
    "before": TEXT,
    UNCHANGED: pa.list_(TEXT),
}
"""The columns of a changelog in addition to the source's, and their types. In the table, an underscore precedes the
name.
"""


def row_schema(table: Table) -> pa.Schema:
    """Return the columns of staged rows."""
    return pa.schema([(f"c{i}", arrow_type(column)) for i, column in enumerate(table.columns)])


def effect_schema(table: Table) -> pa.Schema:
    """Return the columns of staged effects."""
    schema = pa.schema([(ERASED, pa.bool_()), *row_schema(table)]).append(pa.field(MISSING, pa.list_(pa.int32())))
    for n, column in enumerate(table.key_columns):
        schema = schema.append(pa.field(f"o{n}", arrow_type(column)))
    return schema


def event_schema(table: Table) -> pa.Schema:
    """Return the columns of staged events."""
    return pa.schema([*row_schema(table), *map(pa.field, EVENT_COLUMNS, EVENT_COLUMNS.values())])


def typed_rows(table: Table, batch: pa.RecordBatch) -> pa.Table:
    """Return a batch of the captured columns, given as texts, with typed columns."""
    columns = [_typed(table, column, texts) for column, texts in zip(table.columns, batch.columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=row_schema(table))


def typed_effect(table: Table, rows: pa.Table) -> pa.Table:
    """Return the rows of an :class:`.effects.Effect` on a mirror with typed columns."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {ERASED: rows[ERASED]}
    for i, column in enumerate(table.columns):
        columns[f"c{i}"] = _typed(table, column, rows[f"c{i}"])
    schema = effect_schema(table)
    if MISSING in rows.column_names:
        columns[MISSING] = _numbers(rows[MISSING])
        for n, column in enumerate(table.key_columns):
            columns[f"o{n}"] = _typed(table, column, rows[f"o{n}"])
    return pa.table({f.name: columns.get(f.name, pa.nulls(rows.num_rows, f.type)) for f in schema}, schema=schema)


def erasures(table: Table, keys: Sequence[tuple[str, ...]]) -> pa.Table:
    """Return the effect that deletes a mirror's rows by key."""
    texts = dict(zip(table.key, zip(*keys, strict=True), strict=True)) if keys else {}
    columns = {
        f"c{i}": pa.array(texts.get(column.name, [None] * len(keys)), TEXT) for i, column in enumerate(table.columns)
    }
    return typed_effect(table, pa.table({ERASED: pa.array([True] * len(keys), pa.bool_()), **columns}))


def written(table: Table, rows: pa.Table) -> pa.Table:
    """Return the effect that writes typed rows."""
    schema = effect_schema(table)
    columns = {name: rows[name] for name in rows.column_names}
    columns[ERASED] = pa.array([False] * rows.num_rows, pa.bool_())
    return pa.table({f.name: columns.get(f.name, pa.nulls(rows.num_rows, f.type)) for f in schema}, schema=schema)


def typed_events(table: Table, rows: pa.Table) -> pa.Table:
    """Return the rows of an :class:`.effects.Effect` on a changelog with typed columns."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        name: rows[name] for name in EVENT_COLUMNS if name in rows.column_names
    }
    for i, column in enumerate(table.columns):
        columns[f"c{i}"] = _typed(table, column, rows[f"c{i}"])
    if UNCHANGED in rows.column_names:
        texts = rows[UNCHANGED].to_pylist()
        columns[UNCHANGED] = pa.array(
            [None if text is None else array_elements(text) for text in texts], pa.list_(TEXT)
        )
    if OLD_KIND in rows.column_names:
        columns["before"] = pa.array(_before(table, rows), TEXT)
    return _events(table, columns, rows.num_rows)


def removals(table: Table, keys: Sequence[tuple[str, ...]] | None) -> pa.Table:
    """Return the events that precede a re-read: a truncate, or a delete of each key."""
    if keys is None:
        return _events(table, {OP: pa.array(["t"], TEXT)}, 1)
    gone = erasures(table, keys)
    columns = {f"c{i}": gone[f"c{i}"] for i in range(len(table.columns))}
    columns[OP] = pa.array(["d"] * len(keys), TEXT)
    columns["before"] = pa.array([_json(table.key, key) for key in keys], TEXT)
    return _events(table, columns, len(keys))


def write(storage: Storage, name: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write a Parquet file.

    :returns: the number of its rows.
    """
    rows = 0
    with storage.writing(name) as file, pq.ParquetWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)
            rows += table.num_rows
    return rows


def staged_rows(storage: Storage, name: str) -> int | None:
    """Return the number of rows of a file; ``None`` if it does not exist."""
    if storage.modified(name) is None:
        return None
    with storage.reading(name) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)


def _typed(table: Table, column: Column, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return to_typed(texts, arrow_type(column), f"{table.label}.{column.name}")


def _numbers(literals: pa.ChunkedArray) -> pa.Array:
    """Return texts of ``int[]`` as lists."""
    texts = pc.utf8_trim(literals.combine_chunks().cast(pa.string()), "{}")
    return pc.split_pattern(texts, ",").cast(pa.list_(pa.int32()))


def _events(table: Table, columns: dict[str, pa.Array | pa.ChunkedArray], count: int) -> pa.Table:
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in event_schema(table)
    ]
    return pa.Table.from_arrays(arrays, schema=event_schema(table))


def _before(table: Table, rows: pa.Table) -> Iterator[str | None]:
    """Yield the old key, or the old row, of each change as JSON, with values as texts."""
    names = [column.name for column in table.columns]
    key = [names.index(name) for name in table.key]
    columns = [rows[f"b{i}"].to_pylist() for i in range(len(names))]
    for n, kind in enumerate(rows[OLD_KIND].to_pylist()):
        places = {"K": key, "O": range(len(names))}.get(kind)
        yield None if places is None else _json([names[i] for i in places], [columns[i][n] for i in places])


def _json(names: Sequence[str], values: Sequence[str | None]) -> str:
    return json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False)
