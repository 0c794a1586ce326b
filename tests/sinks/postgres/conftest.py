"""Fixtures of the tests of views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.support.postgres_store import PostgresStore


@pytest.fixture(scope="module")
def database(target_server: PostgresServer) -> Iterator[str]:
    create_database(target_server, "views")
    yield target_server.dsn("views")
    drop_database(target_server, "views")


@pytest.fixture
def empty(database: str) -> Iterator[str]:
    yield database
    PostgresStore(database).query("DROP SCHEMA IF EXISTS airflow_cdc, mirror, dwd CASCADE")
