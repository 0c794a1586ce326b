"""Sessions in which rows are read from a source: as Arrow by ADBC, or as COPY writes them by psycopg2.

COPY is the cheapest way between two Postgres servers: the source writes values without a cast, and the other server
reads them as they are. A sink that has to look at values takes Arrow.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import connect, connection_failure, describe, session_dsn
from airflow_cdc_provider.engine.postgres.dead_connections import Calls, cut
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.postgres.session_settings import require_settled, settings_statement

_APPLICATION = "airflow-cdc read"
_SLICE_BYTES = 256 << 10


class ReadingSession(Protocol):
    """A session that autocommits, in which statements are executed one after the other."""

    def execute(self, statement: str) -> tuple[Any, ...] | None:
        """Execute a statement without parameters, and return its first row if it has one."""

    def close(self) -> None:
        """Close the session, even if something in it is still open."""


class ArrowSession:
    """A session of ADBC, whose calls are abandoned when the server is dead.

    :param dsn: libpq URI of the source.
    :param settings: server settings in addition to those of every session.
    :raises StreamFailed: in all methods, when a call was abandoned.
    :raises ConnectionFailed: when the server cannot be reached or refuses the login.
    :raises UnsafeSession: when the session does not get its settings.
    """

    def __init__(self, dsn: str, settings: Mapping[str, str]) -> None:
        self._call = Calls(dsn)
        self._connection: Any = None
        try:
            try:
                self._call(self._connect, session_dsn(dsn, _APPLICATION, settings))
            except DRIVER_ERRORS as e:
                raise connection_failure(dsn, "connect", str(e)) from None
            self._call.pid = require_settled(describe(dsn), self.execute(settings_statement(writes=False)) or (), None)
        except BaseException:
            self.close()
            raise

    def execute(self, statement: str) -> tuple[Any, ...] | None:
        """See :meth:`ReadingSession.execute`."""
        with self._cursor() as cursor:
            self._call(cursor.execute, statement)
            row: tuple[Any, ...] | None = self._call(cursor.fetchone) if cursor.description else None
            return row

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query."""
        with self._cursor() as cursor:
            self._call(cursor.execute, query)
            # fetch_record_batch() would return this reader without the server's errors and their SQLSTATE.
            batches = iter(self._call(lambda: cursor._results.reader))
            while (batch := self._call(next, batches, None)) is not None:
                yield batch

    def close(self) -> None:
        """Close the session; if its call was abandoned, it is closed when that call ends, if ever."""
        if not self._call.over:
            self._call(self._disconnect)
        self._call.end(self._disconnect)

    def _connect(self, dsn: str) -> None:
        # It loads pandas, which takes a second; commands that read no rows do without it.
        import adbc_driver_postgresql.dbapi as adbc

        # Kept here rather than returned: it has to be closed even if no caller waits for it any more.
        self._connection = adbc.connect(dsn, autocommit=True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        cursor = self._connection.cursor()
        try:
            yield cursor
        finally:
            if not self._call.over:
                self._call(cursor.close)


class CopySession:
    """A session of psycopg2, whose socket is closed when the server is dead.

    :param dsn: libpq URI of the source.
    :param settings: server settings in addition to those of every session.
    """

    def __init__(self, dsn: str, settings: Mapping[str, str]) -> None:
        self._connection = connect(dsn, _APPLICATION, settings=settings)
        self._output: io.FileIO | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def execute(self, statement: str) -> tuple[Any, ...] | None:
        """See :meth:`ReadingSession.execute`."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def copy_data(self, query: str, constants: Sequence[tuple[str, str]], binary: bool) -> Iterator[bytes]:
        """Yield the rows of a query as COPY writes them, some bytes at a time; the source goes on writing meanwhile.

        :param constants: text and SQL type of each further column.
        :param binary: whether COPY writes its binary format; else it writes text.
        """
        if constants:
            casts = (sql.SQL("{}::" + kind).format(sql.Literal(text)) for text, kind in constants)
            literals = sql.SQL(", ").join(casts).as_string(self._connection)
            query = f"SELECT *, {literals} FROM ({query}) AS read"
        statement = f"COPY ({query}) TO STDOUT (FORMAT {'binary' if binary else 'text'})"
        readable, writable = os.pipe()
        self._output = io.FileIO(readable)
        self._thread = threading.Thread(target=self._copy, args=[statement, writable], name="copy out", daemon=True)
        self._thread.start()
        while data := self._output.read(_SLICE_BYTES):
            yield data
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _copy(self, statement: str, writable: int) -> None:
        try:
            # COPY calls write() once a row, so the file object is one that is implemented in C.
            with open(writable, "wb", buffering=_SLICE_BYTES) as output, self._connection.cursor() as cursor:
                cursor.copy_expert(statement, output)
        except BaseException as e:
            self._failure = e

    def close(self) -> None:
        """Close the session without waiting for rows that were not taken."""
        if self._thread is not None and self._thread.is_alive():
            cut(self._connection)
        if self._output is not None:
            self._output.close()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
