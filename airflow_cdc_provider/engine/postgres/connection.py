"""Connections to Postgres servers, for control queries and COPY.

A session that does not get the settings of :mod:`.session_settings` is refused. The same is true of the replication
connection and of ADBC's connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import psycopg2
import psycopg2.extensions
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    LoginRefused,
    MissingPrivilege,
    UnsafeSession,
)
from airflow_cdc_provider.engine.postgres.dead_connections import watch
from airflow_cdc_provider.engine.postgres.lock_holders import CONTROL_LOCK_SECONDS, naming_holders
from airflow_cdc_provider.engine.postgres.session_settings import SESSION, options, require_settled, settings_statement
from airflow_cdc_provider.engine.postgres.sql_condition import find_syntax_problem

Connection: TypeAlias = psycopg2.extensions.connection

CONNECT_TIMEOUT = 10

# An idle connection whose peer does not acknowledge the kernel's probes is declared dead within 30 seconds. Unanswered
# data is handled by the watch of dead_connections, not by tcp_user_timeout, which would also end a connection whose
# peer is alive and only does not read.
_TRANSPORT = {
    "connect_timeout": str(CONNECT_TIMEOUT),
    "keepalives": "1",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}


def session_dsn(dsn: str, application: str, settings: Mapping[str, str] | None = None) -> str:
    """Return ``dsn`` with the session settings, the timeouts of a connection, and an application name.

    :param dsn: a libpq URI; parameters in it take precedence over those that this function adds, except for settings.
    :param application: the name that ``pg_stat_activity`` shows.
    :param settings: further server settings of the session.
    """
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query.replace("+", "%2B")))  # libpq takes a plus literally
    ours = options(SESSION | dict(settings or {}))
    query["options"] = f"{query['options']} {ours}" if "options" in query else ours
    # Put into the startup packet, where PGCLIENTENCODING would otherwise be and override the options.
    encoding = {"client_encoding": SESSION["client_encoding"]}
    query = _TRANSPORT | {"application_name": application} | query | encoding
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))


def named(dsn: str, application: str) -> str:
    """Return ``dsn`` with its application name replaced, for sessions that must be found again by that name."""
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query.replace("+", "%2B"))) | {"application_name": application}
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))


def describe(dsn: str) -> str:
    """Return the servers and the database of a DSN, without user or password, for messages."""
    parts = urlsplit(dsn)
    database, hosts = unquote(parts.path.lstrip("/")), parts.netloc.rpartition("@")[2]
    if "," in hosts:  # urllib does not support several hosts
        return f"{hosts}/{database}"
    return f"{parts.hostname or 'localhost'}:{parts.port or 5432}/{database}"


def without_database(dsn: str) -> str:
    """Return a DSN without its database: the part that the DSNs of one server share, secrets included."""
    return urlunsplit(urlsplit(dsn)._replace(path=""))


def connect(
    dsn: str,
    application: str = "airflow-cdc",
    *,
    autocommit: bool = True,
    settings: Mapping[str, str] | None = None,
    writes: bool = False,
) -> Connection:
    """Open a connection with the engine's session settings and a limited wait for locks.

    :param writes: whether the session changes tables or definitions; slots and messages of the log do not count.
    :raises ConnectionFailed: if the server cannot be reached or, as :class:`.LoginRefused`, if it refuses the login.
    :raises UnsafeSession: if the session does not get its settings.
    """
    limits = {"lock_timeout": f"{int(CONTROL_LOCK_SECONDS * 1000)}ms"}
    try:
        connection = psycopg2.connect(session_dsn(dsn, application, limits | dict(settings or {})))
        watch(connection, dsn)
        connection.autocommit = True
        found = row(connection, settings_statement(writes))
    except psycopg2.Error as e:
        raise connection_failure(dsn, "connect", str(e)) from None
    try:
        require_settled(describe(dsn), found, connection.info.backend_pid)
    except UnsafeSession:
        connection.close()
        raise
    connection.autocommit = autocommit
    return connection


# Remedies by a part of the message of a server or of libpq.
_REMEDIES = {
    "certificate verify failed": "Set sslrootcert in the DSN to the certificate of the authority that signed the"
    " server's certificate, or correct the server's certificate.",
    "does not match host name": "Use a host name in the DSN that the server's certificate is issued for, or set"
    " sslmode=verify-ca if every server of this authority can be trusted.",
    "root certificate file": "Install the authority's certificate at the path of sslrootcert: on the driver, on every"
    " executor, and on Airflow's workers.",
    "does not support SSL": "Turn on ssl on the server, or remove sslmode from the DSN.",
    "requires a valid client certificate": "Add sslcert and sslkey to the DSN.",
}
# Remedies by patterns of the messages with which a server (SQLSTATE 28P01, 28000, 3D000) or PgBouncer refuses a login.
# Drivers do not provide the SQLSTATE of a connection that failed.
_LOGIN_REMEDIES = {
    r"password authentication failed|no password supplied|SASL authentication failed|wrong password": "Correct the"
    " password in the DSN, or in the variable or connection that the pipeline file names. To set another password on"
    " the server, run `ALTER ROLE … PASSWORD`.",
    r'role ".*" does not exist|no such user': "Correct the user in the DSN, or create the role on the server.",
    r"is not permitted to log in": "Run: ALTER ROLE … LOGIN; or name another role in the DSN.",
    r'database ".*" does not exist|no such database': "Correct the database in the DSN, or create it on the server.",
    # Not LDAP, RADIUS, PAM, GSSAPI, BSD: Postgres reports the same if the service behind them is temporarily down.
    r"(Peer|Ident|certificate) authentication failed": "Correct the user in the DSN, or change pg_hba.conf so that it"
    " asks this role for a password.",
    r"no encryption": "If pg_hba.conf allows only encrypted connections, add sslmode=verify-full and sslrootcert to the"
    " DSN; otherwise allow this role in pg_hba.conf.",
    r"no pg_hba.conf entry|pg_hba.conf rejects": "Allow this role to connect to this database from this host in"
    " pg_hba.conf; a `replication` entry does not help, because the pipeline names a database.",
    r"unsupported startup parameter": "Use the server's own address in the DSN. This is the address of a connection"
    " pooler, behind which a session lacks the settings that keep values unchanged.",
    r'invalid value for parameter "(TimeZone|DateStyle)"': "Remove PGTZ and PGDATESTYLE from the environment of this"
    " process.",
}


def connection_failure(
    dsn: str, what: str, text: str, otherwise: str = "Check that the server runs and is reachable from here."
) -> CdcError:
    """Return the error for a failed connection.

    :param what: the attempted action, as in "cannot connect".
    :param text: libpq's message.
    :param otherwise: the solution if the message does not imply a better one.
    """
    lines = without_password(text.strip(), dsn).splitlines() or ["no reason was given"]
    message = f"cannot {what} to {describe(dsn)}: {lines[0]}"
    if "permission denied for database" in text:
        parts = urlsplit(dsn)
        database, user = (quoted(unquote(name)) for name in (parts.path.lstrip("/"), parts.username or "…"))
        return MissingPrivilege(message, f"Run: GRANT CONNECT ON DATABASE {database} TO {user};")
    if remedy := _login_remedy(dsn, text):
        return LoginRefused(message, remedy)
    return ConnectionFailed(message, next((r for mark, r in _REMEDIES.items() if mark in text), otherwise))


def _login_remedy(dsn: str, text: str) -> str | None:
    """Return the remedy for a refused login.

    :returns: ``None`` if no login was refused, or if another server of the DSN may become available again.
    """
    if "SSL SYSCALL error" in text or "SSL error" in text:  # the refusal belongs to a second try without TLS
        return None
    tries = [each for each in re.split(r"(?=connection to server )", text) if each.strip()]
    found = [next((r for mark, r in _LOGIN_REMEDIES.items() if re.search(mark, each)), None) for each in tries]
    several = "," in psycopg2.extensions.parse_dsn(dsn).get("host", "")
    return None if several and None in found else next(filter(None, found), None)


def without_password(text: str, dsn: str) -> str:
    """Return a message of a driver with the DSN's password replaced by asterisks."""
    for form in passwords(dsn):
        text = text.replace(form, "***")
    return text


def passwords(dsn: str) -> list[str]:
    """Return all forms in which a DSN's password may appear, longer ones first."""
    parts = urlsplit(dsn)
    pairs = (pair.partition("=") for pair in parts.query.split("&"))
    given = [parts.password, *(value for name, _, value in pairs if name == "password")]
    plain = [unquote(secret) for secret in given if secret]
    # Unescaped, as written in the DSN, and as session_dsn writes it.
    forms = {*filter(None, given), *plain, *(quote(secret, safe="") for secret in plain), *map(quote, plain)}
    return sorted(forms, key=len, reverse=True)


def quoted(name: str) -> str:
    """Quote an identifier without using a connection."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def connected(
    dsn: str, application: str = "airflow-cdc", *, settings: Mapping[str, str] | None = None, writes: bool = False
) -> Iterator[Connection]:
    """Open an autocommit connection for the duration of the block; see :func:`connect`.

    :raises TableLocked: if it has waited for a lock for too long.
    """
    connection = connect(dsn, application, settings=settings, writes=writes)
    try:
        with naming_holders():
            yield connection
    finally:
        connection.close()


def rows(connection: Connection, query: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Execute a query and return all its rows (none if it has no result).

    :param query: SQL text or a ``psycopg2.sql`` composition.
    :raises MissingPrivilege: if the role may not execute it.
    """
    with connection.cursor() as cursor:
        try:
            cursor.execute(query, parameters)
        except psycopg2.errors.InsufficientPrivilege as e:
            info = connection.info
            where = f"role {info.user!r} lacks a privilege on {info.host}:{info.port}/{info.dbname}"
            raise MissingPrivilege(f"{where}: {_first_line(e)}", privilege_remedy(str(e), quoted(info.user))) from e
        return cursor.fetchall() if cursor.description else []


def privilege_remedy(text: str, role: str = "…") -> str:
    """Return the remedy for a role that lacks a privilege.

    :param text: the server's message; it mentions row-level security if a policy is the cause.
    """
    if "row-level security" in text:
        return (
            f"A policy would hide rows. Run: ALTER ROLE {role} WITH BYPASSRLS; or let the table's owner run"
            " `ALTER TABLE … DISABLE ROW LEVEL SECURITY` (`NO FORCE ROW LEVEL SECURITY` if the role is the owner)."
        )
    return f"Grant the role {role} the privilege that the message names."


def row(connection: Connection, query: Any, parameters: Any = None) -> tuple[Any, ...]:
    """Execute a query that returns exactly one row, and return it."""
    (only,) = rows(connection, query, parameters)
    return only


def scalar(connection: Connection, query: Any, parameters: Any = None) -> Any:
    """Execute a query that returns exactly one value, and return it."""
    (value,) = row(connection, query, parameters)
    return value


def condition(text: str) -> sql.Composable:
    """Return a user's SQL condition in parentheses, with a line break that ends a trailing comment.

    :raises ConfigError: if the condition would break out of the parentheses.
    """
    trouble = find_syntax_problem(text)
    if trouble is not None:
        raise ConfigError(
            f"{text!r} is not one SQL condition: {trouble}", "Write one condition on the table's columns."
        )
    return sql.SQL("(") + sql.SQL(text) + sql.SQL("\n)")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def dataset(dsn: str, schema: str, table: str) -> tuple[str, str]:
    """Return namespace and name of a table in OpenLineage's terms; if the DSN has several hosts, the first counts."""
    from psycopg.conninfo import conninfo_to_dict

    parts = {name: str(value).partition(",")[0] for name, value in conninfo_to_dict(dsn).items() if value}
    host = parts.get("host", "localhost")
    server = "localhost" if host.startswith("/") else host  # the directory of a Unix socket
    return f"postgres://{server}:{parts.get('port', '5432')}", f"{parts['dbname']}.{schema}.{table}"
