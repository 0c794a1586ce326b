"""Connections whose packets are lost while no answer is pending: only the kernel's own probes can notice."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import psutil
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import connect, connected, session_dsn
from airflow_cdc_provider.engine.postgres.replication import open_replication
from tests.protocol.outages.conftest import Pair
from tests.support.network import Network
from tests.support.patience import SECONDS
from tests.support.proxy import Proxy

pytestmark = pytest.mark.slow


# Each driver has its own libpq: psycopg2, psycopg, ADBC.
WAYS: dict[str, Callable[[str], Any]] = {
    "control": connect,
    "replication": lambda dsn: open_replication(dsn, "airflow-cdc"),
    "read": lambda dsn: adbc.connect(session_dsn(dsn, "airflow-cdc read")),
}


@pytest.mark.parametrize("way", WAYS)
def test_quiet_connections_are_probed_as_stated(pair: Pair, way: str) -> None:
    """The first probe is sent after 15 seconds, then one every 5 seconds, three times: by both client and server."""
    before = sockets(pair.source.port)
    connection = WAYS[way](pair.source.dsn())
    try:
        (opened,) = sockets(pair.source.port) - before
        with socket.socket(fileno=os.dup(opened)) as ours:
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [ours.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [15, 5, 3]
    finally:
        connection.finish() if way == "replication" else connection.close()
    with connected(pair.source.dsn()) as session, session.cursor() as cursor:
        settings = [f"current_setting('tcp_keepalives_{name}')" for name in ("idle", "interval", "count")]
        cursor.execute(f"SELECT {', '.join(settings)}")
        assert cursor.fetchone() == ("15", "5", "3")


def sockets(port: int) -> set[int]:
    """Return our file descriptors of connections to a port."""
    return {found.fd for found in psutil.Process().net_connections("tcp") if found.raddr and found.raddr.port == port}


@pytest.mark.usefixtures("impatient")
def test_a_quiet_connection_without_a_network_ends(pair: Pair, network: Network) -> None:
    proxy = Proxy(pair.target.port, network.listener())
    try:
        dsn = pair.target.dsn().replace(f"127.0.0.1:{pair.target.port}", f"{proxy.host}:{proxy.port}")
        with (
            connected(dsn) as session,
            socket.socket(fileno=os.dup(session.fileno())) as ours,
            network.unplugged(),
        ):
            lost = await_condition(
                lambda: ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT, SECONDS
            )
        assert lost
    finally:
        proxy.close()
