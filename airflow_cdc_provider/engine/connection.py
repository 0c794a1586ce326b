"""Connections to Postgres servers, for control queries and COPY.

Every session fixes the settings that decide how values look as text: what a role
or a database sets by default would otherwise leak into snapshot and stream. The
same settings are given to the replication connection and to ADBC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import psycopg2
import psycopg2.extensions
from psycopg2 import sql

from airflow_cdc_provider.engine.condition import find_trouble
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.liveness import watch
from airflow_cdc_provider.engine.locks import CONTROL_LOCK_SECONDS, naming_holders

Connection: TypeAlias = psycopg2.extensions.connection

SESSION = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "xmloption": "content",
    "array_nulls": "on",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "search_path": "pg_catalog",
    # A stricter one would let commits beside each other fail, and statements of a session see an old snapshot.
    "default_transaction_isolation": r"read\ committed",
    # What a role or a database sets against its own forgetful clients would end long reads and commits. Who must not
    # wait for a lock for ever says so, as connect() does.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # For the server's side, which would hold the locks of a client that is gone for hours.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    # It would also end who waits for us: data that a full buffer does not take is unacknowledged for as long as that.
    "tcp_user_timeout": "0",
}

NO_TRANSACTION_TIMEOUT = (
    "SELECT set_config('transaction_timeout', '0', false) WHERE current_setting('transaction_timeout', true) <> '0'"
)
"""For the start of a session: the setting exists from Postgres 17 on, so it cannot stand among the others."""

CONNECT_TIMEOUT = 10

# Dead within 30 seconds when all is quiet: a peer that does not acknowledge the kernel's probes. Unanswered data is for
# the watch: a timeout of TCP's own (tcp_user_timeout) takes a peer that only does not read for one that is gone.
_TRANSPORT = {
    "connect_timeout": str(CONNECT_TIMEOUT),
    "keepalives": "1",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}


def session_dsn(dsn: str, application: str, settings: Mapping[str, str] | None = None) -> str:
    """Return ``dsn`` with the session settings, the timeouts of a connection, and an application name.

    :param dsn: a libpq URI; options it already carries win over ours where they are not settings.
    :param application: shown in ``pg_stat_activity``.
    :param settings: further server settings of the session.
    """
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query.replace("+", "%2B")))  # a plus is itself to libpq
    options = " ".join(f"-c {name}={value}" for name, value in (SESSION | dict(settings or {})).items())
    query["options"] = f"{query['options']} {options}" if "options" in query else options
    query = _TRANSPORT | {"application_name": application} | query
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))


def named(dsn: str, application: str) -> str:
    """``dsn`` with an application name in place of its own, if it has one: for sessions that must be found again."""
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query.replace("+", "%2B"))) | {"application_name": application}
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))


def describe(dsn: str) -> str:
    """The servers and database of a DSN, without user or password, for messages."""
    parts = urlsplit(dsn)
    database, hosts = unquote(parts.path.lstrip("/")), parts.netloc.rpartition("@")[2]
    if "," in hosts:  # not a URL any more to urllib
        return f"{hosts}/{database}"
    return f"{parts.hostname or 'localhost'}:{parts.port or 5432}/{database}"


def without_database(dsn: str) -> str:
    """Who connects to which server, and how: what the DSNs of a server's databases have in common, secrets too."""
    return urlunsplit(urlsplit(dsn)._replace(path=""))


def connect(
    dsn: str,
    application: str = "airflow-cdc",
    *,
    autocommit: bool = True,
    settings: Mapping[str, str] | None = None,
) -> Connection:
    """Open a connection with the session settings of this engine, which waits for a lock no longer than a while.

    :raises ConnectionFailed: when the server cannot be reached or refuses the login.
    """
    try:
        limits = {"lock_timeout": f"{int(CONTROL_LOCK_SECONDS * 1000)}ms"}
        connection = psycopg2.connect(session_dsn(dsn, application, limits | dict(settings or {})))
        watch(connection, dsn)
        connection.autocommit = True
        if connection.server_version >= 170000:
            rows(connection, NO_TRANSACTION_TIMEOUT)
    except psycopg2.Error as e:
        raise connection_failure(
            dsn,
            "connect",
            str(e),
            "Check that the server runs and is reachable from here, and that user, password and database are right.",
        ) from None
    connection.autocommit = autocommit
    return connection


# What refuses a login for a reason that its message tells, and what to do about it.
_REMEDIES = {
    "certificate verify failed": "Let sslrootcert of the DSN name the certificate of the authority that has signed the"
    " server's, or correct the server's certificate.",
    "does not match host name": "Put a host name into the DSN that the server's certificate is made out to, or use"
    " sslmode=verify-ca if any server of this authority is as good.",
    "root certificate file": "Put the authority's certificate where sslrootcert names it: on the driver, on every"
    " executor, and on Airflow's workers.",
    "does not support SSL": "Turn on ssl at the server, or take sslmode out of the DSN.",
    "no encryption": "Add sslmode=verify-full and sslrootcert to the DSN, if pg_hba.conf admits encrypted connections"
    " only; otherwise let it admit this role.",
    "requires a valid client certificate": "Add sslcert and sslkey to the DSN.",
}


def connection_failure(dsn: str, what: str, text: str, otherwise: str) -> CdcError:
    """The error for a connection that was not made.

    :param what: what was tried, as in "cannot connect".
    :param text: libpq's message.
    :param otherwise: the solution where the message does not tell a better one.
    """
    lines = without_password(text.strip(), dsn).splitlines() or ["no reason was given"]
    message = f"cannot {what} to {describe(dsn)}: {lines[0]}"
    if "permission denied for database" in text:
        parts = urlsplit(dsn)
        database, user = (quoted(unquote(name)) for name in (parts.path.lstrip("/"), parts.username or "…"))
        return MissingPrivilege(message, f"Run: GRANT CONNECT ON DATABASE {database} TO {user};")
    return ConnectionFailed(message, next((r for mark, r in _REMEDIES.items() if mark in text), otherwise))


def without_password(text: str, dsn: str) -> str:
    """A message of a driver, in which asterisks stand for the DSN's password should it be repeated there."""
    for form in passwords(dsn):
        text = text.replace(form, "***")
    return text


def passwords(dsn: str) -> list[str]:
    """A DSN's password in all forms in which it may turn up, longer ones first."""
    parts = urlsplit(dsn)
    pairs = (pair.partition("=") for pair in parts.query.split("&"))
    given = [parts.password, *(value for name, _, value in pairs if name == "password")]
    plain = [unquote(secret) for secret in given if secret]
    # As it is, as it stands in the DSN, and as session_dsn writes it.
    forms = {*filter(None, given), *plain, *(quote(secret, safe="") for secret in plain), *map(quote, plain)}
    return sorted(forms, key=len, reverse=True)


def quoted(name: str) -> str:
    """An identifier quoted without a connection at hand."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def connected(
    dsn: str, application: str = "airflow-cdc", *, settings: Mapping[str, str] | None = None
) -> Iterator[Connection]:
    """An autocommitting connection that is closed at the end of the block.

    :raises TableLocked: when it has waited for a lock for too long.
    """
    connection = connect(dsn, application, settings=settings)
    try:
        with naming_holders():
            yield connection
    finally:
        connection.close()


def rows(connection: Connection, query: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Execute a query and return all its rows (none when it has no result).

    :param query: SQL text or a ``psycopg2.sql`` composition.
    :raises MissingPrivilege: when the role may not execute it.
    """
    with connection.cursor() as cursor:
        try:
            cursor.execute(query, parameters)
        except psycopg2.errors.InsufficientPrivilege as e:
            user = connection.info.user
            raise MissingPrivilege(
                f"role {user!r} may not do this on {connection.info.host}:{connection.info.port}/"
                f"{connection.info.dbname}: {_first_line(e)}",
                f"Grant the role {user!r} the privilege that the message names.",
            ) from e
        return cursor.fetchall() if cursor.description else []


def row(connection: Connection, query: Any, parameters: Any = None) -> tuple[Any, ...]:
    """Execute a query that returns exactly one row, and return it."""
    (only,) = rows(connection, query, parameters)
    return only


def scalar(connection: Connection, query: Any, parameters: Any = None) -> Any:
    """Execute a query that returns exactly one value, and return it."""
    (value,) = row(connection, query, parameters)
    return value


def condition(text: str) -> sql.Composable:
    """A user's SQL condition in parentheses; the line break ends a comment that it may end in.

    :raises ConfigError: when it would leave the parentheses.
    """
    trouble = find_trouble(text)
    if trouble is not None:
        raise ConfigError(
            f"{text!r} is not one SQL condition: {trouble}", "Write one condition on the table's columns."
        )
    return sql.SQL("(") + sql.SQL(text) + sql.SQL("\n)")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def dataset(dsn: str, schema: str, table: str) -> tuple[str, str]:
    """Namespace and name of a table in OpenLineage's terms; of several hosts the first."""
    from psycopg.conninfo import conninfo_to_dict

    parts = {name: str(value).partition(",")[0] for name, value in conninfo_to_dict(dsn).items() if value}
    host = parts.get("host", "localhost")
    server = "localhost" if host.startswith("/") else host  # the directory of a Unix socket
    return f"postgres://{server}:{parts.get('port', '5432')}", f"{parts['dbname']}.{schema}.{table}"
