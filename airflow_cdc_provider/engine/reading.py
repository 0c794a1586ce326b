"""Reading a part of a table in one MVCC snapshot, without locks that hurt.

The order of the steps is the protocol (chunk, in ``docs/concepts.md``): lock
against rewrites first, then the snapshot, then the rows; after the read a marker
is committed on the same connection, so that everything the read saw is flushed
and cannot be taken back by a crash of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import psycopg2
import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.buffer import MESSAGE_PREFIX
from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.connection import Connection, describe, session_dsn
from airflow_cdc_provider.engine.errors import CdcError, GateClosed, StreamFailed
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.engine.sinks.base import Watermark
from airflow_cdc_provider.engine.visibility import Snapshot

_LOCK_TIMEOUT = "60s"
_SETTINGS = {"row_security": "off", "synchronous_commit": "local", "lock_timeout": _LOCK_TIMEOUT}


@dataclass(frozen=True)
class Read:
    """A read to be done, as plain text, so that it can be sent to an executor.

    :param dsn: libpq URI of the source.
    :param locks: one LOCK statement a leaf.
    :param query: the SELECT, every column as text.
    :param timeline: the timeline on which the pipeline's slot lives.
    """

    dsn: str = field(repr=False)
    locks: tuple[str, ...]
    query: str
    timeline: int


def plan_read(connection: Connection, dsn: str, table: Table, query: sql.Composable, timeline: int) -> Read:
    """Compose a read of ``table`` by ``query``."""
    lock = sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE")
    locks = (lock.format(sql.Identifier(leaf.schema, leaf.name)).as_string(connection) for leaf in table.leaves)
    return Read(dsn, tuple(locks), query.as_string(connection), timeline)


class SnapshotReader:
    """One read: iterate :meth:`batches` to the end, then call :meth:`finish`.

    :raises StreamFailed: when the connection breaks; the read is to be done again.
    :raises GateClosed: when the server is not the primary of the recorded timeline.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        with _as_failure(read.dsn):
            self._connection = adbc.connect(session_dsn(read.dsn, "airflow-cdc read", _SETTINGS), autocommit=True)
        self.snapshot: Snapshot | None = None

    def close(self) -> None:
        """Close the connection, and with it whatever is open."""
        self._connection.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as record batches of text columns."""
        failpoint("before-chunk-read")
        with _as_failure(self._read.dsn), self._connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for lock in self._read.locks:
                cursor.execute(lock)
            cursor.execute(
                "SELECT pg_current_snapshot()::text, pg_is_in_recovery(), CASE WHEN NOT pg_is_in_recovery() THEN"
                " ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END"
            )
            (snapshot, in_recovery, timeline) = cursor.fetchone()
            if in_recovery or timeline != self._read.timeline:
                raise GateClosed(
                    f"{describe(self._read.dsn)} is {'a standby' if in_recovery else f'on timeline {timeline}'}, but"
                    f" the slot was made on timeline {self._read.timeline} of the primary",
                    "Point the pipeline at the primary. After a failover run `airflow-cdc resnapshot --all`.",
                )
            self.snapshot = Snapshot.parse(snapshot)
            cursor.execute(self._read.query)
            yield from cursor.fetch_record_batch()
            cursor.execute("COMMIT")
        failpoint("after-chunk-read")

    def finish(self) -> Watermark:
        """Commit the marker that flushes what was read, and return the read's watermark."""
        assert self.snapshot is not None, "the rows have not been read"
        with _as_failure(self._read.dsn), self._connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_logical_emit_message(true, '{MESSAGE_PREFIX}', 'read')::text")
            (marker,) = cursor.fetchone()
        return Watermark(self.snapshot, parse_lsn(marker))


class _as_failure:
    """Turn errors of the drivers into errors of the engine, which cross to the driver process."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, CdcError) and isinstance(error, DRIVER_ERRORS):
            raise driver_failure(error, describe(self._dsn)) from error


DRIVER_ERRORS: tuple[type[Exception], ...] = (psycopg2.Error, adbc_driver_manager.Error)


def driver_failure(error: BaseException, where: str) -> StreamFailed:
    """An engine error for an error of a database driver."""
    text = str(error).strip()
    return StreamFailed(
        f"{where}: {text.splitlines()[0] if text else type(error).__name__}",
        "Start again: what has been committed stays, the rest is done anew. If it persists, look at the server's log.",
    )
