"""Checks a replication connection and starts it on a slot."""

from __future__ import annotations

import os
import socket

from psycopg import pq
from psycopg.pq.abc import PGconn

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.lsn import Lsn, format_lsn
from airflow_cdc_provider.engine.postgres.connection import (
    Connection,
    describe,
    scalar,
)
from airflow_cdc_provider.engine.postgres.replication import execute, first_row, replication_failure
from airflow_cdc_provider.engine.postgres.server_identity import QUERY, ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import read_slot

_PATIENCE_SECONDS = 300.0
# While a network card is busy with a packet, the next messages gather behind it (tcp_autocorking). On one machine
# nothing holds them up: each passes all of TCP, on the walsender's time. With little room in our receive buffer they
# gather in the server's send buffer until we read, which may be seldom, and pass together.
_NEAR_ROOM_BYTES = 64 << 10


def require_origin(connection: PGconn, dsn: str, origin: ServerIdentity | None) -> int:
    """Check which server the connection leads to; return the id of our process there.

    :raises StreamFailed: when it is not the one that the gate has seen.
    """
    pid, *found = first_row(connection, f"SELECT pg_backend_pid(), {QUERY}")
    if origin is not None:
        origin.require(found, dsn)
    return int(pid)


def require_slot(control: Connection, dsn: str, slot: str, pid: int, start: Lsn) -> None:
    """Check the position of the slot after we have acquired it, so that no other session can move it any more.

    One may have moved it after the gate, and Postgres silently forwards a start that lies behind the slot's position.

    :raises StreamFailed: when the slot is not where the stream has to begin.
    """
    state = read_slot(control, slot)
    if state is None or state.active_pid != pid:
        found = "is not the one that is being read"
    elif state.confirmed_flush_lsn > start:
        found = f"has been acknowledged up to {format_lsn(state.confirmed_flush_lsn)}, beyond {format_lsn(start)}"
    else:
        return
    raise StreamFailed(
        f"slot {slot!r} at {describe(dsn)} {found}", "Start again: whether the stream can go on is checked first."
    )


def shrink_receive_buffer(connection: PGconn) -> bool:
    """Make messages gather on the server's side, if it is on this machine and reached by TCP; return whether it is."""
    with socket.socket(fileno=os.dup(connection.socket)) as ours:
        try:
            if ours.family == socket.AF_UNIX or ours.getpeername()[0] != ours.getsockname()[0]:
                return False
        except OSError:  # closed by the server; the next command fails with the reason
            return False
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEAR_ROOM_BYTES)
    return True


def start_replication(connection: PGconn, slot: str, publication: str, start: Lsn) -> None:
    name = '"' + publication.replace('"', '""') + '"'
    names = "'" + name.replace("'", "''") + "'"
    command = (
        f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(start)} '
        f"(proto_version '1', publication_names {names}, messages 'true')"
    )
    result = execute(connection, command)
    if result is None or result.status != pq.ExecStatus.COPY_BOTH:
        raise replication_failure(connection)


def sender_timeout(control: Connection) -> float:
    """Return the seconds that the server waits for us, and we for it; five minutes if the server waits forever."""
    timeout = scalar(control, "SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return float(timeout / 1000) if timeout else _PATIENCE_SECONDS
