"""Copies rows into Postgres with COPY: output of another server's COPY, or Arrow batches without a loop per row.

The server reads its text format faster than CSV, so batches whose values need no quotes or escapes are sent as text.
Large rows are the exception: each is copied by a separate statement, in slices. The server limits a row's length as
CSV, and a second copy of the row in memory would be too much.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np
import numpy.typing as npt
import psycopg2
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from psycopg.postgres import types
from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import Connection, rows

# Every value is quoted and NULL is not, so that '' and NULL differ.
_CSV = pa_csv.WriteOptions(include_header=False, quoting_style="all_valid")
# This format refuses values with tabs, line ends or double quotes, but not backslashes or empty values.
_TEXT = pa_csv.WriteOptions(include_header=False, quoting_style="none", delimiter="\t")
_TEXT_FORMAT = sql.SQL("FORMAT text, NULL ''")
# Rare types are omitted, and three others: money depends on a locale; older versions read infinities of interval as
# numbers; xml names an encoding.
_SAME_EVERYWHERE = frozenset(
    oid
    for name in (
        *("bool", "int2", "int4", "int8", "oid", "float4", "float8", "numeric", "uuid", "inet", "cidr"),
        *("text", "varchar", "bpchar", "bytea", "json", "jsonb"),
        *("date", "time", "timetz", "timestamp", "timestamptz", '"char"', "pg_lsn"),
    )
    for oid in (types[name].oid, types[name].array_oid)
)
_READ_BYTES = 1 << 20
_LARGE_BYTES = 4 << 20
_BACKSLASH = 0x5C
# Used instead of double quotes, each of which would be doubled. Text rarely contains any of these.
_QUOTES = "\x01\x02\x1e\x1f"


def copy_batches(
    connection: Connection, table: sql.Composable, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> int:
    """Copy record batches into a table, within the connection's transaction.

    :param table: the table's quoted name.
    :param columns: names of the table's columns, in the order of the batches' columns.
    :param batches: texts are parsed by the server as each column's type; other types are written as text.
    :returns: number of copied rows.
    """
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN ({})")
    count = 0
    parts = (part for batch in batches for part in _single_out(batch))
    for large, group in groupby(parts, key=lambda part: part[0]):
        if large:
            for _, row in group:
                quote = _choose_quote(row)
                command = statement.format(table, names, _csv_format(quote))
                count += copy_stream(connection, command, _row_csv(row, quote.encode()))
        else:
            for plain, encoded in groupby((_encoded(rows) for _, rows in group), key=lambda each: each[0]):
                command = statement.format(table, names, _TEXT_FORMAT if plain else _csv_format('"'))
                count += copy_stream(connection, command, (each for _, data in encoded for each in _slices(data)))
    return count


def copy_written(
    connection: Connection,
    table: sql.Composable,
    columns: Sequence[str],
    written: Iterator[bytes],
    binary: bool = False,
) -> int:
    """Copy output of another server's COPY, within the connection's transaction.

    :param table: the table's quoted name.
    :param columns: names of the table's columns, in the order of the written ones.
    :param written: output of COPY, some bytes at a time.
    :param binary: in COPY's binary format, which requires that :func:`takes_binary` is true; otherwise as text.
    :returns: number of copied rows.
    """
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})")
    return copy_stream(connection, statement.format(table, names, sql.SQL("binary" if binary else "text")), written)


def takes_binary(connection: Connection, table: sql.Composable, oids: Mapping[str, int]) -> bool:
    """Return whether a table can receive another server's values in COPY's binary format.

    That format contains no types: a number would be read as a date with the same number of bytes. So the table's
    columns must have exactly the types of the values, and all versions must write and read these types alike. The
    columns keep their types until the transaction ends.

    :param table: the table's quoted name.
    :param oids: types of the values, by name of the column.
    """
    if not _SAME_EVERYWHERE.issuperset(oids.values()):
        return False
    rows(connection, sql.SQL("SELECT FROM {} LIMIT 0").format(table))  # locks the table like a reader
    query = "SELECT attname::text, atttypid::int8 FROM pg_attribute WHERE attrelid = to_regclass(%s)"
    found = dict(rows(connection, query, [table.as_string(connection)]))
    return all(found.get(name) == oid for name, oid in oids.items())


def copy_stream(connection: Connection, statement: sql.Composable, chunks: Iterator[bytes]) -> int:
    """Run a COPY FROM STDIN, within the connection's transaction.

    :param chunks: non-empty chunks.
    :returns: number of copied rows.
    """
    with connection.cursor() as cursor:
        stream = _Stream(chunks)
        try:
            cursor.copy_expert(statement, stream, size=_READ_BYTES)
        except psycopg2.Error:
            if stream.failure is not None:  # COPY wraps it into another error
                raise stream.failure from None
            raise
        return cursor.rowcount


class _Stream(io.RawIOBase):
    """A readable file of chunks; each read returns the next one."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return next(self._chunks, b"")
        except Exception as e:
            self.failure = e
            raise


def _texts(batch: pa.RecordBatch) -> list[pa.Array]:
    return [c for c in batch.columns if pa.types.is_string(c.type) or pa.types.is_large_string(c.type)]


def _data(text: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of all values of a text column."""
    _, offsets, data = text.buffers()
    if data is None:
        return np.empty(0, np.uint8)
    kind = np.int64 if pa.types.is_large_string(text.type) else np.int32
    bounds = np.frombuffer(offsets, kind)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]


def _single_out(batch: pa.RecordBatch) -> Iterator[tuple[bool, pa.RecordBatch]]:
    """Yield a batch as single large rows (true), and as runs of the other rows (false)."""
    start = 0
    if batch.nbytes >= _LARGE_BYTES:
        lengths = (pc.fill_null(pc.binary_length(text), 0).to_numpy().astype(np.int64) for text in _texts(batch))
        sizes = sum(lengths, np.zeros(batch.num_rows, np.int64))
        for row in np.flatnonzero(sizes >= _LARGE_BYTES).tolist():
            if row > start:
                yield False, batch.slice(start, row - start)
            yield True, batch.slice(row, 1)
            start = row + 1
    if start < batch.num_rows:
        yield False, batch.slice(start)


def _csv_format(quote: str) -> sql.Composable:
    return sql.SQL("FORMAT csv, QUOTE {}").format(sql.Literal(quote))


def _encoded(batch: pa.RecordBatch) -> tuple[bool, pa.Buffer]:
    """Return the rows of a batch for COPY; true for the text format, false for CSV."""
    texts = _texts(batch)
    # An empty value would be read as NULL, and a backslash as the start of an escape.
    if not any(pc.min(pc.binary_length(text)).as_py() == 0 or (_data(text) == _BACKSLASH).any() for text in texts):
        with suppress(pa.ArrowInvalid):
            return True, _csv(batch, _TEXT)
    return False, _csv(batch, _CSV)


def _csv(batch: pa.RecordBatch, options: pa_csv.WriteOptions) -> pa.Buffer:
    output = pa.BufferOutputStream()
    pa_csv.write_csv(batch, output, options)
    return output.getvalue()


def _choose_quote(row: pa.RecordBatch) -> str:
    """Return a quote character that is absent from the row, so that its CSV is hardly longer; otherwise
    the rarest one.
    """
    texts = [column.cast(pa.large_string()) for column in row.columns]
    counts = {}
    for quote in _QUOTES:
        counts[quote] = sum(pc.count_substring(text, quote)[0].as_py() or 0 for text in texts)
        if not counts[quote]:
            break
    return min(counts, key=counts.__getitem__)


def _row_csv(row: pa.RecordBatch, quote: bytes) -> Iterator[bytes]:
    """Yield the CSV of one row."""
    for number, column in enumerate(row.columns):
        if number:
            yield b","
        if column.null_count:
            continue
        yield quote
        for chunk in _slices(pa.py_buffer(_data(column.cast(pa.large_string())))):
            yield chunk.replace(quote, quote + quote)
        yield quote
    yield b"\n"


def _slices(buffer: pa.Buffer) -> Iterator[bytes]:
    """Yield copies of a buffer's bytes, some at a time."""
    view = memoryview(buffer)
    for at in range(0, len(view), _READ_BYTES):
        yield bytes(view[at : at + _READ_BYTES])
