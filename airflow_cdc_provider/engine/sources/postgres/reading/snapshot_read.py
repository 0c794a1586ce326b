"""Reads a part of a table in one MVCC snapshot, with a lock that blocks only DDL.

The order of the steps is the protocol of a chunk (``docs/concepts.md``): first the lock against rewrites, then the
snapshot, then the rows. After the read a marker is committed on the same connection, so that everything the read saw is
flushed and a crash of the source cannot take it back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError, SchemaChanged
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, describe
from airflow_cdc_provider.engine.postgres.driver_errors import (
    DRIVER_ERRORS,
    driver_failure,
    is_limit,
    is_undefined_object,
    sqlstate,
)
from airflow_cdc_provider.engine.postgres.lock_holders import table_locked
from airflow_cdc_provider.engine.postgres.server_identity import QUERY, ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import MESSAGE_PREFIX
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import copy_query, read_query
from airflow_cdc_provider.engine.sources.postgres.reading.read_sessions import ArrowSession, CopySession, ReadingSession

_PATIENCE_SECONDS = 60.0
# The definition is read under the locks of the read, so that it is that of its snapshot.
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

T = TypeVar("T")

_SETTINGS = {"synchronous_commit": "local"}


@dataclass(frozen=True)
class Read:
    """The plan of a read, as plain text, so that it can be sent to an executor.

    :param dsn: libpq URI of the source.
    :param locks: one LOCK statement a leaf.
    :param query: the SELECT, every column as text.
    :param copy_query: the same for COPY, which writes values itself; ``None`` for a read without COPY.
    :param origin: the server from which the rows must come.
    :param label: the table.
    :param definition: the SELECT of the table's definition, two JSON texts.
    :param defined: the required result of ``definition``, parsed: number, name, type, modifier and collation of each
        captured column; the leaves' oids.
    """

    dsn: str = field(repr=False)
    locks: tuple[str, ...]
    query: str
    copy_query: str | None
    origin: ServerIdentity
    label: str
    definition: str
    defined: tuple[list[list[int | str | None]], list[int]]


def plan_chunk_read(
    connection: Connection, dsn: str, table: Table, chunk: Chunk | None, origin: ServerIdentity
) -> Read:
    """Compose a read of a chunk of ``table``; ``None`` for all of it."""
    return plan_read(connection, dsn, table, origin, read_query(table, chunk), copy_query(table, chunk))


def plan_read(
    connection: Connection,
    dsn: str,
    table: Table,
    origin: ServerIdentity,
    query: sql.Composable,
    copy_query: sql.Composable | None = None,
) -> Read:
    """Compose a read of ``table`` by ``query``, and perhaps by ``copy_query``."""
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
        None if copy_query is None else copy_query.as_string(connection),
        origin,
        table.label,
        definition.as_string(connection),
        (
            [[c.attnum, c.name, c.type_oid, c.type_modifier, c.collation] for c in table.columns],
            sorted(leaf.oid for leaf in table.leaves),
        ),
    )


class SnapshotReader(SourceRows):
    """One read of a source, whose session begins when the first rows are taken.

    All methods raise:

    * ``TableLocked`` when a lock is not granted in time,
    * ``CdcError`` when the source cannot be reached,
    * ``StreamFailed`` when the connection breaks, or leads to another server; the read is to be done again,
    * ``SchemaChanged`` when the table is not defined as it was when the read was planned.

    :param patience: seconds to wait for each lock.
    :param can_copy: false to have no rows from COPY, even if the read has a query for it.
    :ivar copied: whether rows were taken from COPY.
    """

    def __init__(self, read: Read, patience: float = _PATIENCE_SECONDS, can_copy: bool = True) -> None:
        self._read = read
        self._settings = _SETTINGS | {"lock_timeout": f"{int(patience * 1000)}ms"}
        self._session: ReadingSession | None = None
        self.can_copy = can_copy and read.copy_query is not None
        self.copied = False
        self.snapshot: Snapshot | None = None

    def close(self) -> None:
        """Close the connection, even if something on it is still open."""
        if self._session is not None:
            self._session.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as :meth:`SourceRows.batches` says, read by ADBC."""
        with _as_failure(self._read.dsn):
            self._session = session = ArrowSession(self._read.dsn, self._settings)
        with _as_failure(self._read.dsn, self._read.label), self._reading(session):
            yield from session.batches(self._read.query)

    def copy_data(self, constants: Sequence[tuple[str, str]], binary: bool) -> Iterator[bytes]:
        """Yield the rows as :meth:`SourceRows.copy_data` says, read by psycopg2."""
        assert self._read.copy_query is not None
        self.copied = True
        with _as_failure(self._read.dsn):
            self._session = session = CopySession(self._read.dsn, self._settings)
        with _as_failure(self._read.dsn, self._read.label), self._reading(session):
            yield from session.copy_data(self._read.copy_query, constants, binary)

    @contextmanager
    def _reading(self, session: ReadingSession) -> Iterator[None]:
        """Open the transaction in which rows are read, and commit it after the block."""
        failpoint("before-chunk-read")
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for lock in self._read.locks:
            session.execute(lock)
        snapshot, *found = _row(session, f"SELECT pg_current_snapshot()::text, {QUERY}")
        self._read.origin.require(found, self._read.dsn)
        self.snapshot = Snapshot.parse(snapshot)
        if tuple(json.loads(text or "[]") for text in _row(session, self._read.definition)) != self._read.defined:
            raise _changed(self._read.label)
        yield
        session.execute("COMMIT")
        failpoint("after-chunk-read")

    def finish(self) -> Watermark:
        """Commit the marker that flushes what was read, and return the read's watermark."""
        assert self.snapshot is not None, "the rows have not been read"
        assert self._session is not None
        with _as_failure(self._read.dsn):
            (marker,) = _row(self._session, f"SELECT pg_logical_emit_message(true, '{MESSAGE_PREFIX}', 'read')::text")
        return Watermark(self.snapshot, parse_lsn(marker))


def write_rows(read: Read, write: Callable[[SourceRows], T], patience: float = _PATIENCE_SECONDS) -> T:
    """Read rows and have them written.

    A server limits the length of a row. COPY's text format reaches that limit sooner, since some characters count
    twice in it. If a row is too long for COPY, all rows are read and written again as batches.

    :param write: writes the rows; it has no effect when it fails.
    :param patience: seconds to wait for each lock.
    :raises CdcError: as :class:`SnapshotReader`, and what ``write`` raises.
    """
    with closing(SnapshotReader(read, patience)) as reader:
        try:
            return write(reader)
        except Exception as e:
            if not reader.copied or not is_limit(e):
                raise
    with closing(SnapshotReader(read, patience, can_copy=False)) as reader:
        return write(reader)


def _row(session: ReadingSession, query: str) -> tuple[Any, ...]:
    found = session.execute(query)
    assert found is not None, query
    return found


class _as_failure:
    """Turns errors of the drivers into errors of the engine, which can be sent to the driver process."""

    def __init__(self, dsn: str, label: str = "") -> None:
        self._dsn = dsn
        self._label = label

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, CdcError) and isinstance(error, DRIVER_ERRORS):
            if self._label and is_undefined_object(error):
                raise _changed(self._label, f": {str(error).splitlines()[0]}") from error
            if sqlstate(error) == _LOCKED:
                with connected(self._dsn) as asked:
                    raise table_locked(asked) from error
            raise driver_failure(error, describe(self._dsn)) from error


def _changed(label: str, details: str = "") -> SchemaChanged:
    return SchemaChanged(
        f"{label} is no longer defined as it was captured{details}",
        "Start again: the stream follows the change, or the table is read again as it is now.",
    )
