"""Sessions in MySQL or MariaDB: how they are set, named, ended and waited for, and what their errors mean.

Every session sets what its meaning depends on, whatever the server's defaults: strict SQL, UTC, READ COMMITTED (a
statement sees what is committed, and locks no gaps) and ``utf8mb4`` with a binary collation without padding, by which
keys compare as they do in Postgres.

A server of this kind has no names for sessions. Ours enter their number into the table ``airflow_cdc.sessions`` of the
MEMORY engine, which is as lasting as the numbers are: it is empty after a restart, when they begin again.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    ConnectionFailed,
    LoginRefused,
    ServerNotReady,
)

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.sinks.mysql.safe_connection import WaryConnection
from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    LimitExceeded,
    MissingPrivilege,
    StreamFailed,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.sinks.mysql.address import Address, driver
from airflow_cdc_provider.engine.sinks.mysql.session_errors import (
    CONFLICTS,
    DENIED,
    LOCKED,
    LOGIN_REFUSED,
    LOST,
    READ_ONLY,
    VALUES,
    code_of,
    said,
)

LOCK_SECONDS = 60.0
"""How long a transaction in the sink waits for a lock."""


COMMIT_SECONDS = 30.0
"""How long a commit in flight is waited for: when the epoch is taken, until its session is ended; then, for its end."""


_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO"
_POSTGRES_MODE = f"{_MODE},ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES"
# Without notes nobody would hear of all that LOAD DATA LOCAL changes. A session may idle while the source is read.
_SETTINGS: Mapping[str, str | int] = {
    "sql_mode": f"'{_MODE}'",
    "time_zone": "'+00:00'",
    "foreign_key_checks": 1,
    "unique_checks": 1,
    "sql_notes": 1,
    "sql_safe_updates": 0,
    "wait_timeout": 28_800,
    "net_read_timeout": 3_600,
    "net_write_timeout": 3_600,
}
_MARIADB_SETTINGS = {"max_statement_time": 0, "idle_transaction_timeout": 0, "idle_write_transaction_timeout": 0}
_MYSQL_SETTINGS = {"max_execution_time": 0}
_OLDEST = {True: (10, 6, 0), False: (8, 0, 17)}


def quoted(*names: str) -> str:
    """A name as SQL, of several parts with dots between."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


def literally(sql: str) -> str:
    """SQL for a statement with parameters, in which a ``%`` stands for one."""
    return sql.replace("%", "%%")


class Session:
    """A connection that is set as described above; statements outside of transactions commit by themselves."""

    def __init__(self, connection: WaryConnection, place: str) -> None:
        self._connection = connection
        self.place = place
        version = str(self.one("SELECT VERSION()")[0])
        self.mariadb = "mariadb" in version.lower()
        self.version = version
        require_version(version, self.mariadb)
        self.collation = "utf8mb4_nopad_bin" if self.mariadb else "utf8mb4_0900_bin"
        self.run(f"SET NAMES utf8mb4 COLLATE {self.collation}")
        settings = {**_SETTINGS, **(_MARIADB_SETTINGS if self.mariadb else _MYSQL_SETTINGS)}
        self.run(f"SET SESSION {', '.join(f'{name} = {value}' for name, value in settings.items())}")
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.limit_waiting(LOCK_SECONDS)

    def run(self, statement: str, parameters: Sequence[Any] | None = None) -> int:
        """Execute a statement; the rows that it has changed."""
        with self._connection.cursor() as cursor:
            return int(cursor.execute(statement, parameters))

    def load(self, into: str, data: memoryview, packet: int) -> int:
        """Load lines into a table, which are offered to the server for that moment; the rows that were loaded.

        :param into: the table, and how the lines are to be read, as LOAD DATA has it.
        :param packet: bytes that the server takes at a time.
        """
        name = f"airflow-cdc-{secrets.token_hex(8)}"
        self._connection.offered = (name, data, packet)
        try:
            return self.run(f"LOAD DATA LOCAL INFILE '{name}' INTO TABLE {into}")
        finally:
            self._connection.offered = None

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Execute a query and return its rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return list(cursor.fetchall())

    def one(self, query: str, parameters: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The first row of a query's result."""
        return self.rows(query, parameters)[0]

    def stream(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query, ``size`` at a time, as the texts that the server sends; nothing else may be done."""
        from pymysql.cursors import SSCursor

        decoders, self._connection.decoders = self._connection.decoders, {}
        try:
            with self._connection.cursor(SSCursor) as cursor:
                cursor.execute(query)
                while found := cursor.fetchmany(size):
                    yield list(found)
        finally:
            self._connection.decoders = decoders

    def begin(self) -> None:
        """Begin a transaction."""
        self.run("START TRANSACTION")

    def begin_snapshot(self) -> None:
        """Begin a transaction that only reads, all of it as of now."""
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self.run("START TRANSACTION WITH CONSISTENT SNAPSHOT")

    def commit(self) -> None:
        """Commit the transaction, if there is one."""
        self._connection.commit()

    def rollback(self) -> None:
        """Take the transaction back, if there is one."""
        self._connection.rollback()

    def limit_waiting(self, seconds: float) -> None:
        """Wait for locks no longer than that."""
        self.run(f"SET SESSION innodb_lock_wait_timeout = {_whole(seconds)}, lock_wait_timeout = {_whole(seconds)}")

    def speak_postgres(self) -> None:
        """Take names, strings and ``||`` as Postgres does, for a user's condition."""
        self.run(f"SET SESSION sql_mode = '{_POSTGRES_MODE}'")

    def exists(self, schema: str, name: str) -> bool:
        """Whether there is a table of that name."""
        query = "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
        return bool(self.rows(query, [schema, name]))

    def require_database(self, name: str) -> None:
        """Create a database, unless it is there; only to create one takes the privilege."""
        if not self.rows("SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", [name]):
            self.run(f"CREATE DATABASE IF NOT EXISTS {quoted(name)}")

    def acquire(self, name: str, seconds: float) -> None:
        """Take a lock by name, which lasts until it is released, or the session has ended.

        :raises Blocked: when another session keeps it.
        """
        (taken,) = self.one("SELECT GET_LOCK(%s, %s)", [name, seconds])
        if not taken:
            (holder,) = self.one("SELECT IS_USED_LOCK(%s)", [name])
            raise Blocked(
                f"session {holder} on {self.place} keeps the lock {name}: it changes the definition of a table",
                "Wait until it has ended, or end it (KILL), then start again.",
            )

    def release(self, name: str) -> None:
        """Release a lock by name."""
        self.run("DO RELEASE_LOCK(%s)", [name])

    def register(self, pipeline: str, part: str) -> None:
        """Enter the session as one of a part of a pipeline, where there is a place for it by now."""
        pymysql = driver()
        with suppress(pymysql.err.ProgrammingError, pymysql.err.OperationalError):
            self.run(
                "REPLACE INTO airflow_cdc.sessions (id, server, pipeline, part)"
                " VALUES (CONNECTION_ID(), CONCAT(@@hostname, ':', @@port), %s, %s)",
                [pipeline, part],
            )

    def unregister(self) -> None:
        """Take that back."""
        self.run("DELETE FROM airflow_cdc.sessions WHERE id = CONNECTION_ID()")

    def end_others(self, pipeline: str, part: str) -> None:
        """End the sessions of a part, or with an empty name of all parts of a pipeline, and wait for their end.

        :raises Blocked: when they do not end.
        """
        pymysql = driver()
        if not self.exists("airflow_cdc", "sessions"):
            return
        theirs = (
            "SELECT s.id FROM airflow_cdc.sessions s JOIN information_schema.processlist p ON p.id = s.id"
            " WHERE s.server = CONCAT(@@hostname, ':', @@port) AND s.pipeline = %s AND s.id <> CONNECTION_ID()"
            " AND (%s = '' OR s.part = %s)"
        )
        deadline = time.monotonic() + COMMIT_SECONDS
        told: set[int] = set()
        while left := {int(number) for (number,) in self.rows(theirs, [pipeline, part, part])}:
            for number in left - told:
                with suppress(pymysql.err.OperationalError, pymysql.err.InternalError):  # it has ended by itself
                    self.run(f"KILL CONNECTION {number}")
            told |= left
            if time.monotonic() > deadline:
                raise Blocked(
                    f"sessions {', '.join(map(str, sorted(left)))} of this pipeline on {self.place} have not ended"
                    f" within {COMMIT_SECONDS:g} seconds of being told to, and may still commit",
                    "Look what they do (SHOW PROCESSLIST), then start again.",
                )
            time.sleep(0.02)
        self.run(
            # Those of others' pipelines may be alive, and unseen for want of a privilege.
            "DELETE FROM airflow_cdc.sessions WHERE id <> CONNECTION_ID() AND pipeline = %s"
            " AND id NOT IN (SELECT id FROM information_schema.processlist)",
            [pipeline],
        )

    def close(self) -> None:
        """Close the connection; an open transaction is taken back."""
        pymysql = driver()
        with suppress(pymysql.MySQLError, OSError):
            self._connection.rollback()
            self.unregister()
        with suppress(pymysql.MySQLError, OSError):
            self._connection.close()


def require_version(version: str, mariadb: bool) -> None:
    """Refuse a server in which DDL is not atomic, or that lacks the collation of our sessions.

    :param version: as the server tells it.
    :raises ServerNotReady: when it is too old.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if not found or tuple(int(part or 0) for part in found.groups()) < _OLDEST[mariadb]:
        raise ServerNotReady(
            f"the sink runs {version}, in which DDL is not atomic, or a collation that does not pad is missing",
            "Take MariaDB 10.6 or MySQL 8.0.17 or newer.",
        )


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))


@contextmanager
def session(address: Address) -> Iterator[Session]:
    """A session, whose errors are the engine's.

    :raises ConnectionFailed: when the server cannot be reached or, as :class:`.LoginRefused`, refuses the login.
    """
    pymysql = driver()
    try:
        connection = address.connect()
    except (pymysql.MySQLError, OSError, RuntimeError) as e:
        if code_of(e) in LOGIN_REFUSED:
            raise LoginRefused(
                f"{address.place} refuses the login: {said(e)}",
                "Correct user and password in `sink.dsn`, or have the server admit that user from this host (ALTER"
                " USER).",
            ) from e
        raise ConnectionFailed(
            f"{address.place} cannot be reached: {said(e)}",
            "Check host and port of `sink.dsn`, and that the server runs.",
        ) from e
    opened: Session | None = None
    try:
        opened = Session(connection, address.place)
        yield opened
    except pymysql.MySQLError as e:
        raise failure(e, address.place, opened) from e
    finally:
        if opened is not None:
            opened.close()
        else:
            connection.close()


def failure(error: BaseException, place: str, held: Session | None = None) -> CdcError:
    """An engine error for an error of the driver.

    :param held: the session in which it happened, if it lives.
    """
    code, words = code_of(error), said(error)
    if code in LOCKED:
        return Blocked(
            f"a lock on {place} was not to be had: {words}{_holders(held)}",
            "End these transactions, or wait for them; then start again.",
        )
    if code in READ_ONLY:
        return ConnectionFailed(
            f"the sink {place} takes no writes: {words}", "Point `sink.dsn` at the primary, or let it take writes."
        )
    if code in DENIED:
        return MissingPrivilege(
            f"the sink {place} refuses: {words}", "Grant the user what `docs/sinks/mysql.md` lists."
        )
    if code in CONFLICTS:
        return TargetConflict(
            f"a target table on {place} refuses a change of the source: {words}",
            CONFLICTS[code],
            f"a target table on {place} refuses a change of the source (error {code})",
        )
    if code in VALUES:
        return ValueRefused(
            f"a target table on {place} cannot hold a value: {words}",
            VALUES[code],
            f"a target table on {place} cannot hold a value (error {code})",
        )
    if code == 1153:
        return LimitExceeded(f"a row is larger than {place} takes: {words}", LimitExceeded.remedy)
    if code in LOST:
        return StreamFailed(f"the session on {place} has ended: {words}", "Start again: what has been committed stays.")
    return StreamFailed(
        f"{place}: {words} ({code})",
        "If it persists, look at the server's log. Start again: what has been committed stays.",
        f"{place}: error {code}",
    )


def _holders(held: Session | None) -> str:
    """Who has transactions that may hold the lock; seeing others' needs a privilege."""
    if held is None:
        return ""
    pymysql = driver()
    try:
        found = held.rows(
            "SELECT p.id, p.user, p.host FROM information_schema.innodb_trx t"
            " JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id"
            " WHERE p.id <> CONNECTION_ID() ORDER BY t.trx_started LIMIT 10"
        )
    except pymysql.MySQLError:
        return ""
    names = ", ".join(f"session {number} ({user}@{host})" for number, user, host in found)
    return f"; transactions are open in: {names}" if names else ""
