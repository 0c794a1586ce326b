"""Ensures that only one run at a time writes to a Postgres sink: transactions check the epoch, and old sessions are
ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import psycopg2

from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    CdcError,
    ConnectionFailed,
)
from airflow_cdc_provider.engine.core.lsn import LogPosition, parse_lsn
from airflow_cdc_provider.engine.postgres.connection import (
    Connection,
    connect,
    connected,
    describe,
    named,
    rows,
    scalar,
)
from airflow_cdc_provider.engine.postgres.lock_holders import HOLDERS
from airflow_cdc_provider.engine.sinks.postgres.refused_values import is_of_another, of_sink, refusal_of
from airflow_cdc_provider.engine.sinks.transactional.record import Lock
from airflow_cdc_provider.engine.sinks.transactional.views import TransactionalViews
from airflow_cdc_provider.engine.views.settings import ViewSettings

LOCK_SECONDS = 60.0
"""Seconds that a transaction in the sink waits for a lock."""
COMMIT_SECONDS = 30.0
"""Seconds to wait for a commit in flight when the epoch is taken, until its session is ended; and again for its end."""
_CLAUSES: dict[Lock, str] = {
    "stage": "FOR KEY SHARE",
    "share": "FOR SHARE",
    "unit": "FOR NO KEY UPDATE",
    "alone": "FOR UPDATE",
}
_NAME_BYTES = 63
"""Bytes of an application name that the server keeps."""
# Holders of locks that can block the sink, on rows or the whole table; read locks cannot.
_LOCK_HOLDERS = f"""{HOLDERS}
  AND l.relation IN (SELECT to_regclass(format('%%I.%%I', target_schema, target_table))
                     FROM airflow_cdc.tables WHERE pipeline = %s
                     UNION ALL SELECT 'airflow_cdc.pipelines'::regclass)
  AND coalesce(a.application_name, '') <> %s
LIMIT 10
"""


@dataclass(frozen=True)
class PostgresFence(TransactionalViews[Connection]):
    """The part of a Postgres sink that manages the epoch, see :class:`.CommitRecord`."""

    dsn: str = field(repr=False)
    pipeline: str
    mode: Literal["mirror", "changelog"]
    part: str = ""
    convert: bool = False
    views: tuple[ViewSettings, ...] = ()

    @property
    def _place(self) -> str:
        return describe(self.dsn)

    def _next_epoch(self, owner: str, at_least: int) -> int:
        with self._transaction() as connection:
            self._limit_waiting(connection)
            # UPDATE of columns outside the key would not wait for pieces that are being staged.
            rows(connection, "SELECT FROM airflow_cdc.pipelines WHERE pipeline = %s FOR UPDATE", [self.pipeline])
            # Taken from the clock, so that no epoch repeats. A restored or recreated record would count from an earlier
            # number, and an old run could commit under the epoch of a current one.
            query = (
                "UPDATE airflow_cdc.pipelines SET owner = %s,"
                " epoch = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, %s)"
                " WHERE pipeline = %s RETURNING epoch"
            )
            return int(scalar(connection, query, [owner, at_least, self.pipeline]))

    @staticmethod
    def _limit_waiting(connection: Connection) -> None:
        rows(connection, "SELECT set_config('lock_timeout', %s, true)", [f"{int(COMMIT_SECONDS * 1000)}ms"])

    def end_sessions(self) -> None:
        """End open sessions of the part, or of the whole pipeline."""
        # The names of the parts begin with the pipeline's name, which has no space.
        theirs = (
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND (application_name = %(name)s OR starts_with(application_name, %(name)s || ' '))"
        )
        values = {"name": self._application, "wait": int(COMMIT_SECONDS * 1000)}
        with self._asked() as connection:
            # All are signaled before the first is awaited; a session in the middle of its commit still commits.
            rows(connection, f"SELECT pg_terminate_backend(pid) {theirs}", values)
            rows(connection, f"SELECT pg_terminate_backend(pid, %(wait)s) {theirs}", values)
            left = rows(connection, f"SELECT pid {theirs}", values)
        if left:
            pids = ", ".join(str(pid) for (pid,) in left)
            raise Blocked(
                f"sessions {pids} of this pipeline in {describe(self.dsn)} did not end within {COMMIT_SECONDS:g}"
                " seconds of the request, and may still commit",
                "Check what they wait for (wait_event in pg_stat_activity), then start again.",
            )

    @property
    def _application(self) -> str:
        """Return the sessions' name, which is unique for the part even if the server would truncate it."""
        name = f"airflow-cdc sink {self.pipeline}"
        if not self.part:
            return name
        whole = f"{name} {self.part}"
        return whole if len(whole) <= _NAME_BYTES else f"{name} {zlib.crc32(self.part.encode()) & 0xFFFFF:05x}"

    @contextmanager
    def _transaction(self, rehearsal: bool = False, writes: bool = True) -> Iterator[Connection]:
        """Open a transaction, which is committed at the end of the block, or rolled back for a rehearsal."""
        settings = {"lock_timeout": f"{int(LOCK_SECONDS * 1000)}ms"}
        name = self._application
        connection = connect(named(self.dsn, name), name, autocommit=False, settings=settings, writes=writes)
        try:
            with _rolled_back_on_failure(connection):
                # Deferrable constraints of users are checked at the end.
                rows(connection, "SET LOCAL synchronous_commit = on; SET CONSTRAINTS ALL DEFERRED")
                yield connection
                if rehearsal:
                    connection.rollback()
                else:
                    connection.commit()
        except psycopg2.Error as e:
            if is_of_another(e, connection):
                raise
            raise self._refusal(e) from e
        finally:
            connection.close()

    def _refusal(self, error: psycopg2.Error) -> CdcError:
        """Return the engine's error for an error of a transaction."""
        if isinstance(error, psycopg2.errors.LockNotAvailable):
            return self._blocked(error)
        if isinstance(error, psycopg2.errors.ReadOnlySqlTransaction):
            with connected(self.dsn) as asked:
                standby = scalar(asked, "SELECT pg_is_in_recovery()")
            if standby:
                return ConnectionFailed(
                    f"the sink {describe(self.dsn)} is a standby: {str(error).splitlines()[0]}",
                    "Promote it, or point `sink.dsn` at the primary.",
                )
        return refusal_of(error, describe(self.dsn))

    def _asking(self) -> AbstractContextManager[Connection]:
        return self._asked()

    @contextmanager
    def _asked(self, settings: Mapping[str, str] | None = None) -> Iterator[Connection]:
        """Open an autocommit connection for queries."""
        with connected(self.dsn, settings=settings) as connection, of_sink(connection, describe(self.dsn)):
            yield connection

    def _blocked(self, error: psycopg2.Error) -> Blocked:
        with connected(self.dsn) as connection:
            recorded = scalar(connection, "SELECT to_regclass('airflow_cdc.tables') IS NOT NULL")
            holders = rows(connection, _LOCK_HOLDERS, [self.pipeline, self._application]) if recorded else []
        names = "; ".join(name for (name,) in holders) or "no session anymore"
        where = f" ({error.diag.context.splitlines()[0]})" if error.diag.context else ""
        return Blocked(
            f"could not get a lock in {describe(self.dsn)} within the lock timeout{where}; locks on the pipeline's"
            f" tables are held by: {names}",
            "End these transactions, or wait for them; then start again. Build indexes with CREATE INDEX CONCURRENTLY.",
        )

    def _lock_epoch(self, tx: Connection, lock: Lock | None) -> tuple[int, LogPosition] | None:
        clause = _CLAUSES[lock] if lock else ""
        query = f"SELECT epoch, applied_lsn::text FROM airflow_cdc.pipelines WHERE pipeline = %s {clause}"
        for epoch, applied in rows(tx, query, [self.pipeline]):
            return epoch, parse_lsn(applied)
        return None


@contextmanager
def _rolled_back_on_failure(connection: Connection) -> Iterator[None]:
    """Roll back if the block fails, and raise its error, even if the error has ended the session.

    Closing the connection would also roll back, but would not wait until the server has released the locks.
    """
    try:
        yield
    except BaseException:
        with suppress(psycopg2.Error):
            connection.rollback()
        raise
