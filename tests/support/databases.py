"""Statements in a test's databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


def execute(dsn: str, *statements: str) -> None:
    """Execute statements, each in its own transaction."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def query_rows(dsn: str, query: str) -> list[tuple[Any, ...]]:
    """Execute a query and return its rows."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


@contextmanager
def transaction(dsn: str, *statements: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a session with an open transaction, which is rolled back unless the test ends it."""
    connection = psycopg.connect(dsn)
    try:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection
    finally:
        connection.close()
