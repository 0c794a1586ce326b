"""Connections to Postgres servers, for control queries and COPY.

Every session has the settings of :mod:`.session_settings`, or is refused; so have
the replication connection and that of ADBC.
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
from airflow_cdc_provider.engine.postgres.session_settings import SESSION, options, require_settled, settle
from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble

Connection: TypeAlias = psycopg2.extensions.connection

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
    ours = options(SESSION | dict(settings or {}))
    query["options"] = f"{query['options']} {ours}" if "options" in query else ours
    # Stated in the packet of the start, where PGCLIENTENCODING would otherwise stand and override the options.
    encoding = {"client_encoding": SESSION["client_encoding"]}
    query = _TRANSPORT | {"application_name": application} | query | encoding
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
    writes: bool = False,
) -> Connection:
    """Open a connection with the session settings of this engine, which waits for a lock no longer than a while.

    :param writes: whether tables or definitions are changed on it; slots and messages of the log are neither.
    :raises ConnectionFailed: when the server cannot be reached or, as :class:`.LoginRefused`, refuses the login.
    :raises UnsafeSession: when the session does not get its settings.
    """
    limits = {"lock_timeout": f"{int(CONTROL_LOCK_SECONDS * 1000)}ms"}
    try:
        connection = psycopg2.connect(session_dsn(dsn, application, limits | dict(settings or {})))
        watch(connection, dsn)
        connection.autocommit = True
        found = row(connection, settle(writes))
    except psycopg2.Error as e:
        raise connection_failure(dsn, "connect", str(e)) from None
    try:
        require_settled(describe(dsn), found, connection.info.backend_pid)
    except UnsafeSession:
        connection.close()
        raise
    connection.autocommit = autocommit
    return connection


# What a server, or libpq, refuses for a reason that its message tells, and what to do about it.
_REMEDIES = {
    "certificate verify failed": "Let sslrootcert of the DSN name the certificate of the authority that has signed the"
    " server's, or correct the server's certificate.",
    "does not match host name": "Put a host name into the DSN that the server's certificate is made out to, or use"
    " sslmode=verify-ca if any server of this authority is as good.",
    "root certificate file": "Put the authority's certificate where sslrootcert names it: on the driver, on every"
    " executor, and on Airflow's workers.",
    "does not support SSL": "Turn on ssl at the server, or take sslmode out of the DSN.",
    "requires a valid client certificate": "Add sslcert and sslkey to the DSN.",
}
# A server's own refusals of a login (SQLSTATE 28P01, 28000, 3D000), and those of PgBouncer, as patterns of the message:
# drivers give no SQLSTATE of a connection that was not made.
_LOGIN_REMEDIES = {
    r"password authentication failed|no password supplied|SASL authentication failed|wrong password": "Correct the"
    " password in the DSN, or in the variable or connection that it names; on the server,"
    " `ALTER ROLE … PASSWORD` sets another.",
    r'role ".*" does not exist|no such user': "Correct the user in the DSN, or create the role on the server.",
    r"is not permitted to log in": "Run: ALTER ROLE … LOGIN; or name another role in the DSN.",
    r'database ".*" does not exist|no such database': "Correct the database in the DSN, or create it on the server.",
    # Not LDAP, RADIUS, PAM, GSSAPI, BSD: Postgres says the same where the service behind them is down for a while.
    r"(Peer|Ident|certificate) authentication failed": "Correct the user in the DSN, or have"
    " pg_hba.conf ask this role for a password.",
    r"no encryption": "Add sslmode=verify-full and sslrootcert to the DSN, if pg_hba.conf admits encrypted connections"
    " only; otherwise let it admit this role.",
    r"no pg_hba.conf entry|pg_hba.conf rejects": "Have pg_hba.conf admit this role to this database from here; a"
    " `replication` entry does not matter, as the pipeline names a database.",
    r"unsupported startup parameter": "Give the DSN the server's own address: this is a connection pooler's, and behind"
    " it a session has not the settings that keep values as they are.",
    r'invalid value for parameter "(TimeZone|DateStyle)"': "Take PGTZ and PGDATESTYLE out of the environment of this"
    " process.",
}


def connection_failure(
    dsn: str, what: str, text: str, otherwise: str = "Check that the server runs and is reachable from here."
) -> CdcError:
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
    if remedy := _login_remedy(dsn, text):
        return LoginRefused(message, remedy)
    return ConnectionFailed(message, next((r for mark, r in _REMEDIES.items() if mark in text), otherwise))


def _login_remedy(dsn: str, text: str) -> str | None:
    """What to do about a refused login; ``None`` where none was refused, or another server of the DSN may come back."""
    if "SSL SYSCALL error" in text or "SSL error" in text:  # the refusal is that of a second try, without TLS
        return None
    tries = [each for each in re.split(r"(?=connection to server )", text) if each.strip()]
    found = [next((r for mark, r in _LOGIN_REMEDIES.items() if re.search(mark, each)), None) for each in tries]
    several = "," in psycopg2.extensions.parse_dsn(dsn).get("host", "")
    return None if several and None in found else next(filter(None, found), None)


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
    dsn: str, application: str = "airflow-cdc", *, settings: Mapping[str, str] | None = None, writes: bool = False
) -> Iterator[Connection]:
    """An autocommitting connection that is closed at the end of the block; see :func:`connect`.

    :raises TableLocked: when it has waited for a lock for too long.
    """
    connection = connect(dsn, application, settings=settings, writes=writes)
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
            info = connection.info
            where = f"role {info.user!r} may not do this on {info.host}:{info.port}/{info.dbname}"
            raise MissingPrivilege(f"{where}: {_first_line(e)}", privilege_remedy(str(e), quoted(info.user))) from e
        return cursor.fetchall() if cursor.description else []


def privilege_remedy(text: str, role: str = "…") -> str:
    """What to do when a role lacks a privilege.

    :param text: the server's message, of which the name of a feature is the part that tells policies.
    """
    if "row-level security" in text:
        return (
            f"A policy would hide rows. Run: ALTER ROLE {role} WITH BYPASSRLS; or let the table's owner run ALTER TABLE"
            " … DISABLE ROW LEVEL SECURITY, or NO FORCE ROW LEVEL SECURITY where the role is the owner."
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
