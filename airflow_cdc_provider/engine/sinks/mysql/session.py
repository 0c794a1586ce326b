"""Sessions in MySQL or MariaDB: sets, registers, ends and awaits them, and translates their errors.

Every session sets everything that its results depend on, whatever the server's defaults: strict SQL, UTC, READ
COMMITTED (a statement sees committed data, and locks no gaps) and ``utf8mb4`` with a binary collation without padding,
so that keys compare as in Postgres.

These servers have no names for sessions. So each session writes its number to the table ``airflow_cdc.sessions`` of the
MEMORY engine. That table lives as long as the numbers: after a restart it is empty, and numbers begin again.
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
    server_message,
)

LOCK_SECONDS = 60.0
"""Seconds that a transaction in the sink waits for a lock."""


COMMIT_SECONDS = 30.0
"""Seconds to wait for a commit in flight when the epoch is taken, until its session is ended; and again for its end."""


_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO"
_POSTGRES_MODE = f"{_MODE},ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES"
# Without notes, changes of values by LOAD DATA LOCAL would go unnoticed. A session may idle while the source is read.
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
    # Results of expressions of views depend on these.
    "group_concat_max_len": 4_294_967_295,
    "div_precision_increment": 4,
    "default_week_format": 0,
    "lc_time_names": "'en_US'",
}
_MARIADB_SETTINGS = {"max_statement_time": 0, "idle_transaction_timeout": 0, "idle_write_transaction_timeout": 0}
_MYSQL_SETTINGS = {"max_execution_time": 0}
_OLDEST = {True: (10, 6, 0), False: (8, 0, 17)}


def quoted(*names: str) -> str:
    """Return a quoted name for SQL, with dots between its parts."""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


def literally(sql: str) -> str:
    """Return SQL for a statement with parameters, with each ``%`` doubled."""
    return sql.replace("%", "%%")


class Session:
    """A connection with the settings described above; statements outside of transactions commit immediately."""

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
        """Execute a statement, and return the number of changed rows."""
        with self._connection.cursor() as cursor:
            return int(cursor.execute(statement, parameters))

    def load(self, into: str, data: memoryview, packet: int) -> int:
        """Load lines, which are offered to the server only for this statement, into a table; return the number of rows.

        :param into: the table and the format of the lines, in the syntax of LOAD DATA.
        :param packet: maximum number of bytes that the server accepts at a time.
        """
        name = f"airflow-cdc-{secrets.token_hex(8)}"
        self._connection.offered = (name, data, packet)
        try:
            return self.run(f"LOAD DATA LOCAL INFILE '{name}' INTO TABLE {into}")
        finally:
            self._connection.offered = None

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Execute a query, and return its rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return list(cursor.fetchall())

    def one(self, query: str, parameters: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Return the first row of a query's result."""
        return self.rows(query, parameters)[0]

    def stream(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of a query, ``size`` at a time, as texts sent by the server; nothing else can
        run meanwhile.
        """
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
        """Begin a read-only transaction on a consistent snapshot."""
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self.run("START TRANSACTION WITH CONSISTENT SNAPSHOT")

    def commit(self) -> None:
        """Commit the transaction, if there is one."""
        self._connection.commit()

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""
        self._connection.rollback()

    def limit_waiting(self, seconds: float) -> None:
        """Limit the time to wait for locks."""
        self.run(f"SET SESSION innodb_lock_wait_timeout = {_whole(seconds)}, lock_wait_timeout = {_whole(seconds)}")

    def use_postgres_syntax(self) -> None:
        """Interpret names, strings and ``||`` like Postgres, for a user's condition."""
        self.run(f"SET SESSION sql_mode = '{_POSTGRES_MODE}'")

    def exists(self, schema: str, name: str) -> bool:
        """Return whether a table of that name exists."""
        query = "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
        return bool(self.rows(query, [schema, name]))

    def require_database(self, name: str) -> None:
        """Create a database unless it exists; only creation needs the privilege."""
        if not self.rows("SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", [name]):
            self.run(f"CREATE DATABASE IF NOT EXISTS {quoted(name)}")

    def acquire(self, name: str, seconds: float) -> None:
        """Take a named lock, which lasts until it is released or the session ends.

        :raises Blocked: when another session keeps it.
        """
        (taken,) = self.one("SELECT GET_LOCK(%s, %s)", [name, seconds])
        if not taken:
            (holder,) = self.one("SELECT IS_USED_LOCK(%s)", [name])
            raise Blocked(
                f"could not get the lock {name} on {self.place} because session {holder} keeps it to change a table",
                "Wait until the session has ended, or end it with `KILL`; then start again.",
            )

    def release(self, name: str) -> None:
        """Release a named lock."""
        self.run("DO RELEASE_LOCK(%s)", [name])

    def register(self, pipeline: str, part: str) -> None:
        """Register the session as one of a part of a pipeline, if the table for it exists."""
        pymysql = driver()
        with suppress(pymysql.err.ProgrammingError, pymysql.err.OperationalError):
            self.run(
                "REPLACE INTO airflow_cdc.sessions (id, server, pipeline, part)"
                " VALUES (CONNECTION_ID(), CONCAT(@@hostname, ':', @@port), %s, %s)",
                [pipeline, part],
            )

    def unregister(self) -> None:
        """Remove the registration."""
        self.run("DELETE FROM airflow_cdc.sessions WHERE id = CONNECTION_ID()")

    def end_others(self, pipeline: str, part: str) -> None:
        """End the sessions of a part, or of all parts of a pipeline if the name is empty, and wait for their end.

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
        reported: set[int] = set()
        while left := {int(number) for (number,) in self.rows(theirs, [pipeline, part, part])}:
            for number in left - reported:
                with suppress(pymysql.err.OperationalError, pymysql.err.InternalError):  # it has ended already
                    self.run(f"KILL CONNECTION {number}")
            reported |= left
            if time.monotonic() > deadline:
                raise Blocked(
                    f"sessions {', '.join(map(str, sorted(left)))} of this pipeline on {self.place} did not end within"
                    f" {COMMIT_SECONDS:g} seconds of the request, and may still commit",
                    "Check what they do with `SHOW PROCESSLIST`, then start again.",
                )
            time.sleep(0.02)
        self.run(
            # Sessions of other pipelines may be alive but invisible for lack of a privilege.
            "DELETE FROM airflow_cdc.sessions WHERE id <> CONNECTION_ID() AND pipeline = %s"
            " AND id NOT IN (SELECT id FROM information_schema.processlist)",
            [pipeline],
        )

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        pymysql = driver()
        with suppress(pymysql.MySQLError, OSError):
            self._connection.rollback()
            self.unregister()
        with suppress(pymysql.MySQLError, OSError):
            self._connection.close()


def require_version(version: str, mariadb: bool) -> None:
    """Refuse a server whose DDL is not atomic, or that lacks the required collation.

    :param version: as reported by the server.
    :raises ServerNotReady: when it is too old.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if not found or tuple(int(part or 0) for part in found.groups()) < _OLDEST[mariadb]:
        raise ServerNotReady(
            f"cannot use {version} as a sink because it lacks atomic DDL or a collation without padding",
            "Use MariaDB 10.6 or MySQL 8.0.17 or newer.",
        )


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))


@contextmanager
def session(address: Address) -> Iterator[Session]:
    """Open a session that raises errors of the engine.

    :raises ConnectionFailed: when the server cannot be reached, or, as :class:`.LoginRefused`, refuses the login.
    """
    pymysql = driver()
    try:
        connection = address.connect()
    except (pymysql.MySQLError, OSError, RuntimeError) as e:
        if code_of(e) in LOGIN_REFUSED:
            raise LoginRefused(
                f"{address.place} refuses the login: {server_message(e)}",
                "Correct user and password in `sink.dsn`, or allow that user to log in from this host (`ALTER USER`).",
            ) from e
        raise ConnectionFailed(
            f"{address.place} cannot be reached: {server_message(e)}",
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
    """Return an error of the engine for an error of the driver.

    :param held: the session in which it happened, if it is alive.
    """
    code, words = code_of(error), server_message(error)
    if code in LOCKED:
        return Blocked(
            f"could not get a lock on {place}: {words}{_holders(held)}",
            "End these transactions, or wait for them; then start again.",
        )
    if code in READ_ONLY:
        return ConnectionFailed(
            f"the sink {place} accepts no writes: {words}", "Point `sink.dsn` at the primary, or allow writes."
        )
    if code in DENIED:
        return MissingPrivilege(
            f"the sink {place} refuses access: {words}", "Grant the privileges listed in `docs/sinks/mysql.md`."
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
        return LimitExceeded(f"a row is larger than {place} allows: {words}", LimitExceeded.remedy)
    if code in LOST:
        return StreamFailed(f"the session on {place} has ended: {words}", "Start again; commits are kept.")
    return StreamFailed(
        f"{place}: {words} ({code})",
        "Start again; commits are kept. If the error persists, check the server's log.",
        f"{place}: error {code}",
    )


def _holders(held: Session | None) -> str:
    """Return the transactions that may hold the lock; seeing other users' requires a privilege."""
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
