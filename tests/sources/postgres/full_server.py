"""A database on a full Postgres, with ICU and citext, and tables in it in the form in which they are captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from local_servers.postgres import PostgresServer


@pytest.fixture(scope="module")
def database(server_directory: Path) -> Iterator[Connection]:
    """Return a database on a full Postgres, with ICU."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not installed:
        pytest.fail("These tests need Postgres from the system's packages; on Debian: apt-get install postgresql.")
    directory = server_directory / "chunks"
    server = PostgresServer.create(directory, settings={"fsync": "off"}, binaries=installed[-1].parent)
    with server, connected(server.dsn(), writes=True) as connection:
        rows(connection, "CREATE EXTENSION citext SCHEMA public")
        yield connection


def resolved(connection: Connection, label: str = "shop.t", where: str | None = None) -> Table:
    (table,) = resolve(connection, (TableRule(label, where=where),))
    return table
