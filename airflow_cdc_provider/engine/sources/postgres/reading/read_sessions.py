"""Sessions in which rows are read from a source: as Arrow by ADBC, or as COPY writes them by psycopg2.

What COPY writes costs neither side anything but its way: the source writes values as it would send them, without a
cast, and a Postgres reads what the other has written. Who has to look at values takes Arrow.
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
from airflow_cdc_provider.engine.postgres.session_settings import require_settled, settle

_APPLICATION = "airflow-cdc read"
_SLICE_BYTES = 256 << 10


class ReadingSession(Protocol):
    """A session that autocommits, in which statements are executed one after the other."""

    def execute(self, statement: str) -> tuple[Any, ...] | None:
        """Execute a statement without parameters, and return its first row if it has one."""

    def close(self) -> None:
        """Close it, whatever is open."""


class ArrowSession:
    """A session of ADBC, whose calls are given up when the server is dead.

    :param dsn: libpq URI of the source.
    :param settings: server settings beside those of every session.
    :raises StreamFailed: in all methods, when a call was given up.
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
            self._call.pid = require_settled(describe(dsn), self.execute(settle(writes=False)) or (), None)
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
        """The rows of a query."""
        with self._cursor() as cursor:
            self._call(cursor.execute, query)
            # What fetch_record_batch() returns is this reader without the errors of the server and their SQLSTATE.
            batches = iter(self._call(lambda: cursor._results.reader))
            while (batch := self._call(next, batches, None)) is not None:
                yield batch

    def close(self) -> None:
        """See :meth:`ReadingSession.close`; if it has been given up, it is closed when its call ends, if ever."""
        if not self._call.over:
            self._call(self._disconnect)
        self._call.end(self._disconnect)

    def _connect(self, dsn: str) -> None:
        # It loads pandas, a second's work that commands which read no rows do without.
        import adbc_driver_postgresql.dbapi as adbc

        # Kept here rather than returned: somebody has to close it also when nobody waits for it any more.
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
    """A session of psycopg2, whose socket is cut when the server is dead.

    :param dsn: libpq URI of the source.
    :param settings: server settings beside those of every session.
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

    def copied(self, query: str, constants: Sequence[tuple[str, str]] = (), binary: bool = False) -> Iterator[bytes]:
        """The rows of a query as COPY writes them, some bytes at a time; the source goes on writing meanwhile.

        :param constants: text and SQL type of each further column.
        :param binary: in COPY's binary format, not as text.
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
            # A writer of C's takes what is called once a row.
            with open(writable, "wb", buffering=_SLICE_BYTES) as output, self._connection.cursor() as cursor:
                cursor.copy_expert(statement, output)
        except BaseException as e:
            self._failure = e

    def close(self) -> None:
        """See :meth:`ReadingSession.close`; rows that nobody has taken are not waited for."""
        if self._thread is not None and self._thread.is_alive():
            cut(self._connection)
        if self._output is not None:
            self._output.close()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
