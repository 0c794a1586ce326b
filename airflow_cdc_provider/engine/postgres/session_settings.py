"""The settings of every session with Postgres, and the check that a session has them.

The settings determine the text format of values. Otherwise, defaults of a role or a database would leak into snapshot
and stream. libpq passes the settings as ``options``, which other sources can override: values that libpq itself puts
into the startup packet (``client_encoding`` of a DSN, and ``PGCLIENTENCODING``, ``PGTZ`` and ``PGDATESTYLE`` of the
environment), event triggers at login, and poolers, which drop the options. Therefore a session begins with the
statement of :func:`settings_statement`, which repeats the settings that the environment may have overridden and
returns the values in effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from airflow_cdc_provider.engine.core.errors import UnsafeSession

REQUIRED = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
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
    # A policy then causes an error instead of hiding rows.
    "row_security": "off",
    # With a stricter level, concurrent commits would fail, and statements of a session would see an old snapshot.
    "default_transaction_isolation": "read committed",
}
"""Settings without which a session would silently use other values."""

SESSION = REQUIRED | {
    # Timeouts that a role or a database sets for its own clients would end long reads and commits. Sessions that must
    # not wait forever for a lock set lock_timeout again, as connect() does.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # Otherwise the server would keep the locks of a lost client for hours.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    # This timeout would also end sessions that wait for this process: data counts as unacknowledged while the receive
    # buffer is full.
    "tcp_user_timeout": "0",
}

_ENVIRONMENT = ("DateStyle", "TimeZone")
# The setting exists only from Postgres 17 on, so it is not listed with the others.
_NO_TRANSACTION_TIMEOUT = (
    "CASE WHEN pg_catalog.current_setting('transaction_timeout', true) <> '0'"
    " THEN pg_catalog.set_config('transaction_timeout', '0', false) END"
)

_STATEMENT = "SELECT pg_catalog.pg_backend_pid()::text, {}, {}".format(
    ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', false)"
        if name in _ENVIRONMENT
        else f"pg_catalog.current_setting('{name}')"
        for name, value in REQUIRED.items()
    ),
    _NO_TRANSACTION_TIMEOUT,
)
_READ_ONLY = "pg_catalog.set_config('default_transaction_read_only', 'on', false)"


def settings_statement(writes: bool) -> str:
    """Return the first statement of every session; :func:`require_settled` checks its row.

    :param writes: whether transactions may write by default. If not, the policies and indexes of a table's owner cannot
        make a session that only reads write anything. This is not an option of the connection, so that
        :func:`.takes_writes` sees the server's default.
    """
    return _STATEMENT if writes else f"{_STATEMENT}, {_READ_ONLY}"


def options(settings: Mapping[str, str]) -> str:
    """Format settings as libpq's ``options``."""
    escaped = {name: value.replace("\\", r"\\").replace(" ", r"\ ") for name, value in settings.items()}
    return " ".join(f"-c {name}={value}" for name, value in escaped.items())


def require_settled(server: str, found: Sequence[str | None], connected_to: int | None) -> int:
    """Check the row of the statement of :func:`settings_statement`, and return the process id of the session's backend.

    :param server: the server's name for messages.
    :param connected_to: the backend that answered at the start, if the driver provides it. If the statement was
        executed by another backend, there is a pooler.
    :raises UnsafeSession: if the session lacks a setting.
    """
    pid, *values = found[: len(REQUIRED) + 1]
    different = [
        f"{name} is {value!r}, not {wanted!r}"
        for (name, wanted), value in zip(REQUIRED.items(), values, strict=True)
        if value != wanted
    ]
    if not different:
        return int(pid or 0)
    if connected_to is not None and connected_to != int(pid or 0):
        raise UnsafeSession(
            f"sessions at {server} lack required settings because a connection pooler drops them:"
            f" {'; '.join(different)}",
            "Use the server's own address in the DSN: behind a pooler such as PgBouncer a session lacks the settings"
            " that keep values unchanged.",
        )
    raise UnsafeSession(
        f"a session at {server} lacks the settings that keep values unchanged: {'; '.join(different)}",
        "Find the cause that changes them after the login: an event trigger (`\\dy` in psql), a library of"
        " session_preload_libraries, or a connection pooler, which drops `options`. In the last case, use the server's"
        " own address in the DSN.",
    )
