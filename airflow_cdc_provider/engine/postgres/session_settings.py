"""The settings of every session with Postgres: what they are, and the look at whether a session has them.

They decide how values look as text: what a role or a database sets by default would otherwise leak into snapshot and
stream. libpq hands them over as ``options``, which are overridden: by what libpq itself puts into the packet of the
start (``client_encoding`` of a DSN, ``PGCLIENTENCODING``, ``PGTZ`` and ``PGDATESTYLE`` of the environment), by event
triggers at login, and by poolers, which drop them. So a session begins with :func:`settle`, which states once more
what the environment may have overridden, and returns what holds now.
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
    # A policy then is an error, where it would otherwise hide rows.
    "row_security": "off",
    # A stricter one would let commits beside each other fail, and statements of a session see an old snapshot.
    "default_transaction_isolation": "read committed",
}
"""Without one of them a session would go on with other values, and say nothing."""

SESSION = REQUIRED | {
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

_ENVIRONMENT = ("DateStyle", "TimeZone")
# The setting exists from Postgres 17 on, so it cannot stand among the others.
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


def settle(writes: bool) -> str:
    """The first statement of every session; for its row see :func:`require_settled`.

    :param writes: whether transactions may write unless told otherwise. Who only reads cannot be made to write then by
        what an owner of a table has put into its policies and indexes. It is no option of the connection, so that
        :func:`.takes_writes` sees what the server would do.
    """
    return _STATEMENT if writes else f"{_STATEMENT}, {_READ_ONLY}"


def options(settings: Mapping[str, str]) -> str:
    """Settings as libpq's ``options``."""
    escaped = {name: value.replace("\\", r"\\").replace(" ", r"\ ") for name, value in settings.items()}
    return " ".join(f"-c {name}={value}" for name, value in escaped.items())


def require_settled(server: str, found: Sequence[str | None], connected_to: int | None) -> int:
    """Check what :func:`settle` returned; the id of the session's backend.

    :param server: names it in the message.
    :param connected_to: the backend that answered to the start, where the driver tells it: another than that of a
        statement tells of a pooler.
    :raises UnsafeSession: when the session lacks a setting.
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
            f"sessions at {server} are those of a connection pooler, which drops their settings:"
            f" {'; '.join(different)}",
            "Give the DSN the server's own address: behind a pooler such as PgBouncer a session has not the settings"
            " that keep values as they are.",
        )
    raise UnsafeSession(
        f"a session at {server} does not have the settings that keep values as they are: {'; '.join(different)}",
        "Find what sets them after the login: an event trigger (`\\dy` in psql), a library of"
        " session_preload_libraries, or a connection pooler, which drops `options`; give the DSN the server's own"
        " address.",
    )
