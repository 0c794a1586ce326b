"""Defines the contents of the files, and converts Postgres texts to them and back.

A Parquet file has the source's columns with the types of :mod:`.typed_values`. A line of a JSON file is an object:
whole numbers and booleans are JSON values, everything else is a text as written by Postgres.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.core.effect import OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.array_text import array_elements, array_texts
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, arrow_type, to_texts, to_typed
from airflow_cdc_provider.engine.sinks.files.settings import FileFormat

META = pa.schema(
    {
        "_op": pa.string(),
        "_commit_lsn": pa.int64(),
        "_seq": pa.int64(),
        "_xid": pa.int64(),
        "_commit_ts": pa.timestamp("us", "UTC"),
        "_before": pa.string(),
        "_unchanged": pa.list_(pa.string()),
    }
)
"""The columns in addition to the source's. ``_commit_lsn`` is a number, so that every reader sorts it like Postgres."""

CODEC = "zstd"
_BATCH_ROWS = 65_536
_SAMPLE_ROWS = 4096


def column_type(column: Column, format_: FileFormat) -> pa.DataType:
    """Return the type of a column in the files."""
    kind = arrow_type(column)
    if format_ == "json" and not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return TEXT
    return kind


def schema_of(target: Target, format_: FileFormat) -> pa.Schema:
    """Return the current schema of a target's files."""
    columns = [pa.field(column.name, column_type(column, format_)) for column in target.table.columns]
    return pa.schema([*columns, *META])


def read_rows(target: Target, format_: FileFormat, batch: pa.RecordBatch, lsn: LogPosition, seq: int) -> pa.Table:
    """Return rows read from the source as events.

    :param batch: the captured columns as text.
    """
    count = batch.num_rows
    meta = {"_op": pa.repeat("r", count), "_commit_lsn": _longs(lsn, count), "_seq": _longs(seq, count)}
    return _table(target, format_, [batch.column(i) for i in range(batch.num_columns)], meta, count)


def truncate(target: Target, format_: FileFormat, lsn: LogPosition, seq: int, now: int) -> pa.Table:
    """Return the event for an emptied table.

    :param now: microseconds since 1970.
    """
    meta = {"_op": pa.array(["t"]), "_commit_lsn": _longs(lsn, 1), "_seq": _longs(seq, 1), "_commit_ts": _times([now])}
    return _table(target, format_, [pa.nulls(1, TEXT)] * len(target.table.columns), meta, 1)


def deletes(
    target: Target, format_: FileFormat, keys: Sequence[tuple[str, ...]], lsn: LogPosition, seq: int, now: int
) -> pa.Table:
    """Return the events that delete rows by key.

    :param now: microseconds since 1970.
    """
    count = len(keys)
    texts = dict(zip(target.table.key, (pa.array(part, TEXT) for part in zip(*keys, strict=True)), strict=True))
    meta = {
        "_op": pa.repeat("d", count),
        "_commit_lsn": _longs(lsn, count),
        "_seq": _longs(seq, count),
        "_commit_ts": _times([now] * count),
        "_before": _objects(target.table.key, [texts[name] for name in target.table.key]),
    }
    columns = [texts.get(column.name, pa.nulls(count, TEXT)) for column in target.table.columns]
    return _table(target, format_, columns, meta, count)


def changes(target: Target, format_: FileFormat, rows: pa.Table) -> pa.Table:
    """Return changes of the log as events; see :class:`.effects.Effect` for the rows."""
    columns = {name: _whole(rows.column(name)) for name in rows.column_names}
    names = [column.name for column in target.table.columns]
    meta = {
        "_op": columns[OP],
        "_commit_lsn": columns["commit_lsn"],
        "_seq": columns["seq"],
        "_xid": columns["xid"],
        "_commit_ts": columns["commit_ts"].cast(pa.timestamp("us", "UTC")),
    }
    if UNCHANGED in columns:
        texts = columns[UNCHANGED].to_pylist()
        meta["_unchanged"] = pa.array([None if text is None else array_elements(text) for text in texts], META[6].type)
    if OLD_KIND in columns:
        old = [columns[f"b{i}"] for i in range(len(names))]
        key = [names.index(name) for name in target.table.key]
        whole = _objects(names, old)
        keys = _objects(target.table.key, [old[i] for i in key]) if key else whole
        kind = columns[OLD_KIND]
        before = pc.if_else(pc.equal(kind, "K"), keys, whole)
        meta["_before"] = pc.if_else(pc.is_valid(kind), before, pa.scalar(None, before.type))
    return _table(target, format_, [columns[f"c{i}"] for i in range(len(names))], meta, rows.num_rows)


def _table(
    target: Target, format_: FileFormat, texts: Sequence[pa.Array], meta: dict[str, pa.Array], count: int
) -> pa.Table:
    schema = schema_of(target, format_)
    label = target.table.label
    columns = [to_typed(text, schema.field(i).type, f"{label}.{schema.field(i).name}") for i, text in enumerate(texts)]
    columns += [meta[f.name].cast(f.type) if f.name in meta else pa.nulls(count, f.type) for f in META]
    return pa.Table.from_arrays(columns, schema=schema)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _longs(value: int, count: int) -> pa.Array:
    return pa.array(np.full(count, value, dtype=np.int64))


def _times(values: Sequence[int]) -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp("us", "UTC"))


def _objects(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
    """Return JSON objects of texts, one per row."""
    if any(pc.any(pc.match_substring_regex(column, r"[\x00-\x1f]")).as_py() for column in columns):
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        return pa.array([json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows], TEXT)
    parts: list[pa.Array | pa.Scalar] = []
    for n, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts.append(pa.scalar(f"{', ' if n else '{'}{json.dumps(name, ensure_ascii=False)}: ", TEXT))
        escaped = pc.replace_substring_regex(column.cast(TEXT), r'(["\\])', r"\\\1")
        quoted = pc.binary_join_element_wise(pa.scalar('"', TEXT), escaped, pa.scalar('"', TEXT), pa.scalar("", TEXT))
        parts.append(pc.fill_null(quoted, "null"))
    return pc.binary_join_element_wise(*parts, pa.scalar("}", TEXT), pa.scalar("", TEXT))


class FileWriter(Protocol):
    """Writes rows to an open file."""

    def write(self, rows: pa.Table) -> None:
        """Append rows."""

    def close(self) -> None:
        """Write the end of the file."""


def writer(format_: FileFormat, file: IO[bytes], schema: pa.Schema) -> FileWriter:
    """Return a writer for a new file."""
    if format_ == "json":
        return _JsonWriter(file)
    return _ParquetWriter(file, schema)


class _ParquetWriter:
    """Begins the file with the first rows; if there are many, they show which columns have repeated values.

    By default, Parquet begins a dictionary for every column, and abandons it when it becomes too large. If most values
    differ, that takes longer than writing them, and the file is larger.
    """

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.Table) -> None:
        """Append rows."""
        self._begun(rows).write(rows)

    def close(self) -> None:
        """Write the footer."""
        self._begun(self._schema.empty_table()).close()

    def _begun(self, rows: pa.Table) -> pq.ParquetWriter:
        if self._writer is None:
            chosen = _repetitive(rows.slice(0, _SAMPLE_ROWS)) if rows.num_rows >= _SAMPLE_ROWS else True
            self._writer = pq.ParquetWriter(self._file, self._schema, compression=CODEC, use_dictionary=chosen)
        return self._writer


def _repetitive(rows: pa.Table) -> list[str]:
    """Return Parquet's names of columns in which a value occurs four times or more on average, and of all lists."""
    lists = [f"{field.name}.list.element" for field in rows.schema if pa.types.is_list(field.type)]
    flat = [field.name for field in rows.schema if not pa.types.is_nested(field.type)]
    return lists + [name for name in flat if 4 * len(rows.column(name).unique()) <= rows.num_rows]


class _JsonWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: pa.Table) -> None:
        """Append one line per row, without empty columns that are not the source's."""
        times = rows.schema.get_field_index("_commit_ts")
        texts = pc.strftime(rows.column(times), "%Y-%m-%dT%H:%M:%SZ") if rows.num_rows else rows.column(times)
        for row in rows.set_column(times, "_commit_ts", texts).to_pylist():
            lean = {name: value for name, value in row.items() if value is not None or name not in META.names}
            self._file.write(json.dumps(lean, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Do nothing, as the format has no footer."""


def batches(format_: FileFormat, file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file with its types; those of a JSON file as texts."""
    if format_ == "parquet":
        yield from pq.ParquetFile(file).iter_batches(_BATCH_ROWS)
        return
    lines: list[dict[str, Any]] = []
    for line in file:
        lines.append(json.loads(line))
        if len(lines) == _BATCH_ROWS:
            yield _json_batch(lines)
            lines = []
    if lines:
        yield _json_batch(lines)


def _json_batch(lines: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    names = list(dict.fromkeys(name for line in lines for name in line))
    columns = [pa.array([_json_text(name, line.get(name)) for line in lines], TEXT) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _json_text(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return _array_text(value)
    if isinstance(value, bool):
        return "t" if value else "f"
    return format_lsn(value) if name == "_commit_lsn" else str(value)


def texts(target: Target, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a file for :meth:`.contract.Sink.compared`: the columns of the target and of the changelog as
    texts.
    """
    names = [*(column.name for column in target.table.columns), "_op", "_commit_lsn", "_seq", "_before", "_unchanged"]
    found = set(batch.schema.names)
    columns = [_column_texts(name, batch.column(name)) if name in found else _nulls(batch) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _nulls(batch: pa.RecordBatch) -> pa.Array:
    return pa.nulls(batch.num_rows, TEXT)


def _column_texts(name: str, column: pa.Array) -> pa.Array:
    if pa.types.is_list(column.type):
        return pa.array([None if names is None else _array_text(names) for names in column.to_pylist()], TEXT)
    if name == "_commit_lsn" and pa.types.is_integer(column.type):
        return pa.array([format_lsn(lsn) for lsn in column.to_pylist()], TEXT)
    return to_texts(column)


def _array_text(elements: Sequence[str]) -> str:
    return str(array_texts([pa.array([each]) for each in elements])[0].as_py())
