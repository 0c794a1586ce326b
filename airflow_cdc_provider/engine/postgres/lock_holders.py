"""Finds the holders of locks that could not be acquired.

A control session waits for a lock only for a limited time. Its job must also watch a slot and may be asked to stop, and
the user of a command must learn what the command waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_INERROR
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from airflow_cdc_provider.engine.core.errors import TableLocked

CONTROL_LOCK_SECONDS = 10.0
"""Seconds that a control session waits for a lock."""

HOLDERS = """
SELECT DISTINCT CASE WHEN l.pid IS NULL
    THEN format('prepared transaction %%L: %%s on %%s', x.gid, l.mode, l.relation::regclass)
    ELSE format('session %%s of %%s (%%s, transaction open since %%s): %%s on %%s', l.pid, coalesce(a.usename, '?'),
                coalesce(nullif(a.application_name, ''), '?'), coalesce(date_trunc('second', a.xact_start)::text, '?'),
                l.mode, l.relation::regclass) END
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_locks own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid'
  AND own.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts x ON x.transaction = own.transactionid
WHERE l.locktype = 'relation' AND l.granted AND l.mode <> 'AccessShareLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""Query for the sessions and prepared transactions that hold locks on relations, as text; append further conditions."""

# The locks of writers do not block anything that the pipeline does.
_STRONG = """
  AND l.mode NOT IN ('RowShareLock', 'RowExclusiveLock') AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.relation IN (SELECT oid FROM pg_class WHERE relkind IN ('r', 'p') AND oid >= 16384)
LIMIT 10
"""


@contextmanager
def naming_holders() -> Iterator[None]:
    """Name the holders of a lock that a session of the pipeline did not get in time.

    :raises TableLocked: instead of the server's error.
    """
    try:
        yield
    except psycopg2.errors.LockNotAvailable as e:
        raise table_locked(cast(Cursor, e.cursor).connection) from e


def table_locked(connection: Connection) -> TableLocked:
    """Return the error for a lock that could not be acquired.

    :param connection: a connection to the same database; if its transaction has failed, it is rolled back.
    """
    with connection.cursor() as cursor:
        if connection.info.transaction_status == TRANSACTION_STATUS_INERROR:
            cursor.execute("ROLLBACK")
        cursor.execute(HOLDERS + _STRONG, [])
        names = "; ".join(name for (name,) in cursor.fetchall()) or "no session any more"
    info = connection.info
    return TableLocked(
        f"a table in {info.host}:{info.port}/{info.dbname} is locked; locks are held there by: {names}",
        "Wait until they have ended, or end them with `COMMIT`, `ROLLBACK` or `ROLLBACK PREPARED` if they are stale.",
    )
