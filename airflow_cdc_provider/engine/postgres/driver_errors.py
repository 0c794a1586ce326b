"""Errors of the database drivers: what they say about a server, and as errors of the engine."""

from __future__ import annotations

import adbc_driver_manager
import psycopg2

from airflow_cdc_provider.engine.core.errors import CdcError, LimitExceeded, MissingPrivilege, StreamFailed
from airflow_cdc_provider.engine.postgres.connection import privilege_remedy
from airflow_cdc_provider.engine.postgres.dead_connections import trouble_of

DRIVER_ERRORS: tuple[type[Exception], ...] = (psycopg2.Error, adbc_driver_manager.Error)

_SOLUTIONS = {
    "25006": "The server takes no writes: is it a standby, or is default_transaction_read_only set?",
    "53100": "Make room on the server's disk.",
    "53200": "The server is out of memory.",
    "53300": "The server is out of connections: raise max_connections, or end sessions.",
}
"""By SQLSTATE: what is wrong with a server that is otherwise well."""
_NO_PRIVILEGE = "42501"
# Connection, rolled back for others, resources, not available now, operator, system.
_OUTAGES = ("08", "40", "53", "55", "57", "58")
# Schema, column, type, function or operator, table; a value's text, as of an enum's label.
_UNKNOWN = frozenset({"3F000", "42703", "42704", "42883", "42P01", "22P02"})


def is_outage(error: BaseException) -> bool:
    """Whether an error of a database driver says that the server, or the way to it, fails, not what was asked of it."""
    state = sqlstate(error)
    return state is None or state.startswith(_OUTAGES)


def knows_not(error: BaseException) -> bool:
    """Whether a source does not know, or not any more, what a statement about a captured table names and spells."""
    return sqlstate(error) in _UNKNOWN


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of an error of a database driver, if it has one."""
    return getattr(error, "pgcode", None) or getattr(error, "sqlstate", None)


def exceeds_limit(state: str | None, text: str) -> bool:
    """Whether an error of a server says that a row is too large for it.

    :param state: the SQLSTATE. That of a row that outgrows the memory of a message is one of the server's own bugs, and
        its text is never translated.
    """
    return state == "54000" or "invalid memory alloc request size" in text


def is_limit(error: BaseException) -> bool:
    """Whether an error, of a driver or of the engine, says that a row is too large for a server."""
    return isinstance(error, LimitExceeded) or exceeds_limit(sqlstate(error), str(error))


def driver_failure(error: BaseException, where: str) -> CdcError:
    """An engine error for an error of a database driver."""
    text = trouble_of(error) or str(error).strip()
    if isinstance(error, adbc_driver_manager.Error):
        text = text.rpartition("': ")[2]  # it begins with the query
    if exceeds_limit(sqlstate(error), text):
        return LimitExceeded.by(f"{where}: {text}")
    if sqlstate(error) == _NO_PRIVILEGE:
        return MissingPrivilege(f"{where}: {text.splitlines()[0]}", privilege_remedy(text))
    return StreamFailed(
        f"{where}: {text.splitlines()[0] if text else type(error).__name__}",
        " ".join(
            [
                _SOLUTIONS.get(sqlstate(error) or "", "If it persists, look at the server's log."),
                "Start again: what has been committed stays, the rest is done anew.",
            ]
        ),
        None if is_outage(error) else f"{where}: {type(error).__name__}, SQLSTATE {sqlstate(error)}",
    )
