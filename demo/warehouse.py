"""The stores that the demo can copy the shop to, one for each kind of sink, started empty and stopped at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE
from local_servers.jars import package_available
from local_servers.postgres import PostgresServer

if TYPE_CHECKING:
    from local_servers.kafka import KafkaServer
    from local_servers.mariadb import MariadbServer

POSTGRES = "16"
SETTINGS: Mapping[str, str] = {"shared_buffers": "256MB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}


@dataclass(frozen=True)
class Warehouse:
    """A running store.

    :param place: kind and address of the store, for display.
    :param address: address of its server, or path of its folder.
    :param section: the lines of the pipeline file's ``sink`` section.
    :param connections: Airflow's connections that the section names, as URIs by id.
    """

    place: str
    address: str
    section: str
    connections: Mapping[str, str] = field(default_factory=dict)


def start_server(started: ExitStack, directory: Path, database: str) -> PostgresServer:
    """Start a Postgres server with one empty database, and stop it at the end."""
    server = PostgresServer.create(directory, POSTGRES, SETTINGS)
    started.callback(server.stop)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
    return server


def _postgres(started: ExitStack, directory: Path) -> Warehouse:
    server = start_server(started, directory, "warehouse")
    dsn = server.dsn("warehouse")
    section = "  conn_id: shop_target\n  mode: mirror\n"
    return Warehouse(f"Postgres {POSTGRES} on port {server.port}", dsn, section, {"shop_target": dsn})


def _files(started: ExitStack, directory: Path) -> Warehouse:
    return Warehouse(f"Parquet files in {directory}", str(directory), f"  type: files\n  path: {directory}\n")


def start_mariadb(started: ExitStack, directory: Path) -> MariadbServer:
    """Start a MariaDB server without databases, and stop it at the end."""
    from local_servers.mariadb import MariadbServer  # imported late, because only this store needs its driver

    server = MariadbServer.create(directory)
    started.callback(server.stop)
    server.start()
    return server


def start_broker(started: ExitStack, directory: Path) -> KafkaServer:
    """Start a Kafka broker without topics, and stop it at the end."""
    from local_servers.kafka import KafkaServer  # imported late, because only this store needs its client

    server = KafkaServer.create(directory)
    started.callback(server.stop)
    server.start()
    return server


def _mysql(started: ExitStack, directory: Path) -> Warehouse:
    server = start_mariadb(started, directory)
    section = "  type: mysql\n  conn_id: shop_mysql\n  mode: mirror\n"
    return Warehouse(f"MariaDB on port {server.port}", server.dsn, section, {"shop_mysql": server.dsn})


def _kafka(started: ExitStack, directory: Path) -> Warehouse:
    server = start_broker(started, directory)
    section = "  type: kafka\n  conn_id: shop_kafka\n"
    connections = {"shop_kafka": f"kafka://{server.brokers}"}
    return Warehouse(f"Kafka topics on port {server.port}", server.brokers, section, connections)


def _delta(started: ExitStack, directory: Path) -> Warehouse:
    started.enter_context(package_available(PACKAGE))
    return Warehouse(f"Delta tables in {directory}", str(directory), f"  type: delta\n  path: file://{directory}\n")


WAREHOUSES: Mapping[str, Callable[[ExitStack, Path], Warehouse]] = {
    "postgres": _postgres,
    "mysql": _mysql,
    "delta": _delta,
    "files": _files,
    "kafka": _kafka,
}
"""Functions that start a store in its own directory, by the sink's ``type``."""

TITLES: Mapping[str, str] = {
    "postgres": "another Postgres",
    "mysql": "MySQL",
    "delta": "Delta Lake",
    "files": "Parquet files",
    "kafka": "Kafka",
}
"""Names of the stores for display, by the sink's ``type``."""
