"""Opens replication connections, executes commands on them, and reports why they end."""

from __future__ import annotations

import select
import time

import psycopg
import psycopg2.extensions
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from airflow_cdc_provider.engine.core.errors import CdcError, LimitExceeded, StreamFailed
from airflow_cdc_provider.engine.postgres.connection import (
    CONNECT_TIMEOUT,
    connection_failure,
    describe,
    session_dsn,
)
from airflow_cdc_provider.engine.postgres.driver_errors import exceeds_limit
from airflow_cdc_provider.engine.postgres.session_settings import require_settled, settings_statement

_ANSWER_SECONDS = 60.0


def open_replication(dsn: str, application: str) -> PGconn:
    """Open a connection that can read a slot.

    :raises ConnectionFailed: if the server cannot be reached or refuses the connection.
    :raises UnsafeSession: if the session does not get its settings.
    """
    reasons = []
    for address in _addresses(f"{session_dsn(dsn, application)}&replication=database"):
        connection = pq.PGconn.connect_start(address.encode())
        reason = _await_connection(connection)
        if reason is None:
            _settle(connection, dsn)
            return connection
        connection.finish()
        reasons.append(reason)
    raise connection_failure(
        dsn,
        "open a replication connection",
        "; ".join(reasons),
        "Check that the server runs, that the role has REPLICATION, that pg_hba.conf allows it, and that the"
        " address is the server's own: a connection pooler does not forward replication.",
    )


def _settle(connection: PGconn, dsn: str) -> None:
    """Apply and check :mod:`.session_settings`; close the connection if it is refused."""
    try:
        connection.nonblocking = 1
        require_settled(describe(dsn), first_row(connection, settings_statement(writes=False)), connection.backend_pid)
    except BaseException:
        connection.finish()
        raise


def first_row(connection: PGconn, query: str) -> list[str]:
    """Execute a query and return its first row.

    :raises StreamFailed: if it returns none.
    """
    result = execute(connection, query)
    if result is None or result.status != pq.ExecStatus.TUPLES_OK:
        raise replication_failure(connection, result)
    return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]


def _addresses(dsn: str) -> list[str]:
    """Return a DSN for each host that ``dsn`` names, since libpq times each host separately only in blocking calls."""
    parameters = psycopg2.extensions.parse_dsn(dsn)
    lists = {name: parameters[name].split(",") for name in ("host", "hostaddr", "port") if name in parameters}
    return [
        psycopg2.extensions.make_dsn(**parameters | {name: values[i % len(values)] for name, values in lists.items()})
        for i in range(max([1, *map(len, lists.values())]))
    ]


def _await_connection(connection: PGconn) -> str | None:
    """Connect without blocking, because psycopg's own call would stop all threads of the process while it waits.

    :returns: the reason of the failure; ``None`` if the connection succeeds.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while connection.status != pq.ConnStatus.BAD:
        state = connection.connect_poll()
        if state in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
            break
        reading, writing = ([connection.socket], []) if state == pq.PollingStatus.READING else ([], [connection.socket])
        if not any(select.select(reading, writing, [], max(0.0, deadline - time.monotonic()))):
            return f"no answer for {CONNECT_TIMEOUT} seconds"
    if connection.status == pq.ConnStatus.OK:
        return None
    return connection.error_message.decode(errors="replace").strip()


def execute(connection: PGconn, command: str) -> PGresult | None:
    """Execute a command and return its first result; in COPY mode it is the only one.

    :param connection: see :func:`open_replication`.
    :raises StreamFailed: if there is no answer.
    """
    try:
        return _execute(connection, command)
    except psycopg.Error as e:
        raise replication_failure(connection) from e


def _execute(connection: PGconn, command: str) -> PGresult | None:
    connection.send_query(command.encode())
    deadline = time.monotonic() + _ANSWER_SECONDS
    first: PGresult | None = None
    while True:
        while connection.flush() or connection.is_busy():
            left = deadline - time.monotonic()
            if left <= 0:
                raise StreamFailed(
                    f"the server has not answered {command.split()[0]} for {_ANSWER_SECONDS:g} seconds",
                    "Start the pipeline again; the stream continues from the last commit. If the error persists, check"
                    " the network and the server.",
                )
            if select.select([connection.socket], [], [], min(left, 1.0))[0]:
                connection.consume_input()
        result = connection.get_result()
        if result is None:
            return first
        first = result if first is None else first
        if result.status == pq.ExecStatus.COPY_BOTH:
            return first


def replication_failure(connection: PGconn, result: PGresult | None = None) -> CdcError:
    """Return the error for a stream that has ended.

    :param result: the server's last result, if it sent one.
    """
    text = connection.error_message.decode(errors="replace").strip()
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode() if result is not None else None
    message = f"the server ended the replication stream: {text or 'connection closed'}"
    if exceeds_limit(state, text):
        return LimitExceeded.by(message)
    return StreamFailed(
        message,
        "Start the pipeline again; the stream continues from the last commit. If the error persists, check the server"
        " log of the source.",
    )
