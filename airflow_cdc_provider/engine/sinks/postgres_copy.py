"""COPY from Arrow into Postgres: text columns as CSV, without a Python loop per row."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

import psycopg2
import pyarrow as pa
import pyarrow.csv as pa_csv
from psycopg2 import sql

from airflow_cdc_provider.engine.connection import Connection

# Every value is quoted and a NULL is not, so that '' and NULL stay apart.
_OPTIONS = pa_csv.WriteOptions(include_header=False, quoting_style="all_valid")
_READ_BYTES = 1 << 20


def copy_batches(
    connection: Connection, table: sql.Composable, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> int:
    """Copy record batches into a table, within the connection's transaction.

    :param table: the table's quoted name.
    :param columns: names of the table's columns, in the order of the batches' columns.
    :param batches: text is parsed by the server as each column's type; other types are written as text.
    :returns: rows copied.
    """
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, names)
    with connection.cursor() as cursor:
        reader = _CsvReader(iter(batches))
        try:
            cursor.copy_expert(statement, reader, size=_READ_BYTES)
        except psycopg2.Error:
            if reader.failure is not None:  # COPY wraps it into an error of its own
                raise reader.failure from None
            raise
        return cursor.rowcount


class _CsvReader(io.RawIOBase):
    """A readable file of the CSV of some batches, one batch in memory at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        super().__init__()
        self._batches = batches
        self._current: pa.BufferReader | None = None
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return self._read(size)
        except Exception as e:
            self.failure = e
            raise

    def _read(self, size: int) -> bytes:
        while True:
            if self._current is not None and (data := self._current.read(size)):
                return bytes(data)
            batch = next(self._batches, None)
            if batch is None:
                return b""
            output = pa.BufferOutputStream()
            pa_csv.write_csv(batch, output, _OPTIONS)
            self._current = pa.BufferReader(output.getvalue())
