"""Reading a part of a table in one MVCC snapshot, without locks that hurt.

The order of the steps is the protocol (chunk, in ``docs/concepts.md``): lock
against rewrites first, then the snapshot, then the rows; after the read a marker
is committed on the same connection, so that everything the read saw is flushed
and cannot be taken back by a crash of the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.buffer import MESSAGE_PREFIX
from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.connection import (
    NO_TRANSACTION_TIMEOUT,
    Connection,
    connected,
    describe,
    session_dsn,
)
from airflow_cdc_provider.engine.drivers import DRIVER_ERRORS, driver_failure, knows_not
from airflow_cdc_provider.engine.errors import CdcError, SchemaChanged
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.liveness import Calls
from airflow_cdc_provider.engine.locks import table_locked
from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.engine.origin import QUERY, Origin
from airflow_cdc_provider.engine.sinks.base import Watermark
from airflow_cdc_provider.engine.visibility import Snapshot

_PATIENCE_SECONDS = 60.0
# What a read must find is asked under its locks, so that the definition is that of its snapshot.
_DEFINITION = """
SELECT (SELECT pg_catalog.json_agg(
            pg_catalog.json_build_array(
                a.attnum, a.attname, a.atttypid::int8, a.atttypmod,
                CASE WHEN a.attcollation <> t.typcollation
                     THEN pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.collname) END
            ) ORDER BY a.attnum)
        FROM pg_catalog.pg_attribute a
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
        LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.collnamespace
        WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND {captured})::text,
       (SELECT pg_catalog.json_agg(c.oid::int8 ORDER BY c.oid) FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE (n.nspname, c.relname) IN ({leaves}))::text
"""

_LOCKED = "55P03"

_SETTINGS = {"row_security": "off", "synchronous_commit": "local"}


@dataclass(frozen=True)
class Read:
    """A read to be done, as plain text, so that it can be sent to an executor.

    :param dsn: libpq URI of the source.
    :param locks: one LOCK statement a leaf.
    :param query: the SELECT, every column as text.
    :param origin: the server from which the rows must come.
    :param label: the table.
    :param definition: the SELECT of the table's definition, two JSON texts.
    :param defined: what it must return, parsed: number, name, type, modifier and collation of each captured
        column; the leaves' oids.
    """

    dsn: str = field(repr=False)
    locks: tuple[str, ...]
    query: str
    origin: Origin
    label: str
    definition: str
    defined: tuple[list[list[int | str | None]], list[int]]


def plan_read(connection: Connection, dsn: str, table: Table, query: sql.Composable, origin: Origin) -> Read:
    """Compose a read of ``table`` by ``query``."""
    lock = sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE")
    locks = (lock.format(sql.Identifier(leaf.schema, leaf.name)).as_string(connection) for leaf in table.leaves)
    names = sql.SQL(", ").join(sql.Literal((leaf.schema, leaf.name)) for leaf in table.leaves)
    numbers = sql.SQL(", ").join(sql.Literal(column.attnum) for column in table.columns)
    definition = sql.SQL(_DEFINITION).format(
        oid=sql.Literal(table.oid),
        captured=sql.SQL("a.attnum IN ({})").format(numbers) if table.column_list else sql.SQL("true"),
        leaves=names if table.leaves else sql.SQL("('', '')"),
    )
    return Read(
        dsn,
        tuple(locks),
        query.as_string(connection),
        origin,
        table.label,
        definition.as_string(connection),
        (
            [[c.attnum, c.name, c.type_oid, c.type_modifier, c.collation] for c in table.columns],
            sorted(leaf.oid for leaf in table.leaves),
        ),
    )


class SnapshotReader:
    """One read: iterate :meth:`batches` to the end, then call :meth:`finish`.

    :param patience: seconds to wait for each lock.
    :raises TableLocked: when one is not to be had.
    :raises StreamFailed: when the connection breaks, or leads to another server; the read is to be done again.
    :raises SchemaChanged: when the table is not defined as it was when the read was planned.
    """

    def __init__(self, read: Read, patience: float = _PATIENCE_SECONDS) -> None:
        self._read = read
        self._call = Calls(read.dsn)
        self._connection: Any = None
        self.snapshot: Snapshot | None = None
        try:
            with _as_failure(read.dsn):
                settings = _SETTINGS | {"lock_timeout": f"{int(patience * 1000)}ms"}
                dsn = session_dsn(read.dsn, "airflow-cdc read", settings)
                self._call(self._connect, dsn)
                with self._cursor() as cursor:
                    self._execute(cursor, NO_TRANSACTION_TIMEOUT)
                    self._execute(cursor, "SELECT pg_backend_pid()")
                    (self._call.pid,) = self._call(cursor.fetchone)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection and whatever is open; if it has been given up, when its call ends, if ever."""
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

    def _execute(self, cursor: Any, statement: str) -> None:
        self._call(cursor.execute, statement)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as record batches of text columns."""
        failpoint("before-chunk-read")
        with _as_failure(self._read.dsn, self._read.label), self._cursor() as cursor:
            self._execute(cursor, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for lock in self._read.locks:
                self._execute(cursor, lock)
            self._execute(cursor, f"SELECT pg_current_snapshot()::text, {QUERY}")
            (snapshot, *found) = self._call(cursor.fetchone)
            self._read.origin.require(found, self._read.dsn)
            self.snapshot = Snapshot.parse(snapshot)
            self._execute(cursor, self._read.definition)
            if tuple(json.loads(text or "[]") for text in self._call(cursor.fetchone)) != self._read.defined:
                raise _changed(self._read.label)
            self._execute(cursor, self._read.query)
            # What fetch_record_batch() returns is this reader without the errors of the server and their SQLSTATE.
            batches = iter(self._call(lambda: cursor._results.reader))
            while (batch := self._call(next, batches, None)) is not None:
                yield batch
            self._execute(cursor, "COMMIT")
        failpoint("after-chunk-read")

    def finish(self) -> Watermark:
        """Commit the marker that flushes what was read, and return the read's watermark."""
        assert self.snapshot is not None, "the rows have not been read"
        with _as_failure(self._read.dsn), self._cursor() as cursor:
            self._execute(cursor, f"SELECT pg_logical_emit_message(true, '{MESSAGE_PREFIX}', 'read')::text")
            (marker,) = self._call(cursor.fetchone)
        return Watermark(self.snapshot, parse_lsn(marker))


class _as_failure:
    """Turn errors of the drivers into errors of the engine, which cross to the driver process."""

    def __init__(self, dsn: str, label: str = "") -> None:
        self._dsn = dsn
        self._label = label

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, CdcError) and isinstance(error, DRIVER_ERRORS):
            if self._label and knows_not(error):
                raise _changed(self._label, f": {str(error).splitlines()[0]}") from error
            if getattr(error, "sqlstate", None) == _LOCKED:
                with connected(self._dsn) as asked:
                    raise table_locked(asked) from error
            raise driver_failure(error, describe(self._dsn)) from error


def _changed(label: str, said: str = "") -> SchemaChanged:
    return SchemaChanged(
        f"{label} is not defined any more as it was captured{said}",
        "Start again: the stream follows the change, or the table is read again as it is now.",
    )
