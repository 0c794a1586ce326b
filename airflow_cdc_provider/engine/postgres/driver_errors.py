"""Classifies errors of the database drivers, and converts them to errors of the engine."""

from __future__ import annotations

import adbc_driver_manager
import psycopg2

from airflow_cdc_provider.engine.core.errors import CdcError, LimitExceeded, MissingPrivilege, StreamFailed
from airflow_cdc_provider.engine.postgres.connection import privilege_remedy
from airflow_cdc_provider.engine.postgres.dead_connections import cut_reason

DRIVER_ERRORS: tuple[type[Exception], ...] = (psycopg2.Error, adbc_driver_manager.Error)

_SOLUTIONS = {
    "25006": "The server accepts no writes: check whether it is a standby, or default_transaction_read_only is set.",
    "53100": "Free space on the server's disk.",
    "53200": "The server is out of memory.",
    "53300": "The server is out of connections: raise max_connections, or end sessions.",
}
"""Remedies by SQLSTATE for problems of a server that otherwise works."""
_NO_PRIVILEGE = "42501"
# Classes: connection, transaction rollback, insufficient resources, not in prerequisite state, operator intervention,
# system.
_OUTAGES = ("08", "40", "53", "55", "57", "58")
# Undefined schema, column, type, function or operator, table; invalid text of a value, such as an enum's label.
_UNKNOWN = frozenset({"3F000", "42703", "42704", "42883", "42P01", "22P02"})


def is_outage(error: BaseException) -> bool:
    """Return whether the cause of a driver's error is the server or the network rather than the statement."""
    state = sqlstate(error)
    return state is None or state.startswith(_OUTAGES)


def is_undefined_object(error: BaseException) -> bool:
    """Return whether a statement about a captured table failed because the source lacks a named object or a label.

    The source may never have had it, or not any longer.
    """
    return sqlstate(error) in _UNKNOWN


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of a database driver, if it has one."""
    return getattr(error, "pgcode", None) or getattr(error, "sqlstate", None)


def exceeds_limit(state: str | None, text: str) -> bool:
    """Return whether a server reports that a row is too large for it.

    :param state: the SQLSTATE. If a row exceeds the memory of a message, the SQLSTATE is that of an internal error,
        and the text is never translated.
    """
    return state == "54000" or "invalid memory alloc request size" in text


def is_limit(error: BaseException) -> bool:
    """Return whether an error of a driver or of the engine reports that a row is too large for a server."""
    return isinstance(error, LimitExceeded) or exceeds_limit(sqlstate(error), str(error))


def driver_failure(error: BaseException, where: str) -> CdcError:
    """Convert an error of a database driver to an error of the engine."""
    text = cut_reason(error) or str(error).strip()
    if isinstance(error, adbc_driver_manager.Error):
        text = text.rpartition("': ")[2]  # the text begins with the query
    if exceeds_limit(sqlstate(error), text):
        return LimitExceeded.by(f"{where}: {text}")
    if sqlstate(error) == _NO_PRIVILEGE:
        return MissingPrivilege(f"{where}: {text.splitlines()[0]}", privilege_remedy(text))
    return StreamFailed(
        f"{where}: {text.splitlines()[0] if text else type(error).__name__}",
        " ".join(
            [
                _SOLUTIONS.get(sqlstate(error) or "", "If the error persists, check the server's log."),
                "Start the pipeline again; committed data remains, and the rest is repeated.",
            ]
        ),
        None if is_outage(error) else f"{where}: {type(error).__name__}, SQLSTATE {sqlstate(error)}",
    )
