"""Fixtures of the tests of the Postgres sink."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.support.postgres_store import PostgresStore


@pytest.fixture(scope="module")
def database(target_server: PostgresServer) -> Iterator[str]:
    """Return a database for all tests of a module."""
    create_database(target_server, "sink")
    yield target_server.dsn("sink")
    drop_database(target_server, "sink")


@pytest.fixture
def empty(database: str) -> Iterator[str]:
    """Return the database, from which what a pipeline with views has made is removed afterwards."""
    yield database
    PostgresStore(database).query("DROP SCHEMA IF EXISTS airflow_cdc, mirror, dwd CASCADE")
