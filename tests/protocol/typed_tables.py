"""Servers of several versions for tests of types, and the values of both sides as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import connected, rows
from local_servers.postgres import PostgresServer
from tests.conftest import SESSION_SETTINGS, Databases, create_database, create_roles, drop_database
from tests.support.pipelines import PipelineUnderTest

Mode = Literal["mirror", "changelog"]


@pytest.fixture(scope="module")
def servers(
    server_directory: Path, source_server: PostgresServer, system_binaries: Path
) -> Iterator[Mapping[str, PostgresServer]]:
    """Run one server per version; both databases of a test are on it."""
    newer = PostgresServer.create(server_directory / "types18", "18", SESSION_SETTINGS)
    full = PostgresServer.create(server_directory / "types-full", binaries=system_binaries, settings=SESSION_SETTINGS)
    try:
        for server in (newer, full):
            server.start()
            create_roles(server)
        yield {"16": source_server, "18": newer, "full": full}
    finally:
        newer.remove()
        full.remove()


@pytest.fixture
def make_databases() -> Iterator[Callable[[PostgresServer, PostgresServer], Databases]]:
    """Return a factory of pairs of databases on servers of the test's choice."""
    made: list[tuple[PostgresServer, str]] = []

    def make(source: PostgresServer, target: PostgresServer) -> Databases:
        names = [f"types{len(made) + i}" for i in (0, 1)]
        for server, name in zip((source, target), names, strict=True):
            create_database(server, name)
            made.append((server, name))
        return Databases(source.dsn(names[0]), target.dsn(names[1]))

    yield make
    for server, name in made:
        drop_database(server, name)


def columns_of(pipeline: PipelineUnderTest, side: str, table: str) -> dict[str, str]:
    """Return the name and the type of each column on one side."""
    with connected(getattr(pipeline.databases, side)) as connection:
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        return dict(rows(connection, query, [table]))


def texts(pipeline: PipelineUnderTest, side: str, table: str, names: Sequence[str], tail: str = "ORDER BY id") -> Any:
    """Return all values of a table as text, as the server's output functions write them."""
    # concat() calls the output function; a cast does not always do so.
    text = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
    cells = sql.SQL(", ").join(sql.SQL(text).format(sql.Identifier(name)) for name in names)
    with connected(getattr(pipeline.databases, side)) as connection:
        return rows(connection, sql.SQL("SELECT {} FROM {} " + tail).format(cells, sql.SQL(table)))


LATEST = (
    "l WHERE NOT EXISTS (SELECT FROM {0} m WHERE m.id = l.id AND (m._commit_lsn, m._seq) > (l._commit_lsn, l._seq))"
    " AND _op <> 'd' ORDER BY id"
)


def assert_same(pipeline: PipelineUnderTest, table: str = "public.t") -> None:
    """Check that the target, or the result of a changelog, has the source's texts, and that ``verify`` agrees."""
    names = list(columns_of(pipeline, "source", table))
    changelog = pipeline.pipeline.sink.mode == "changelog"
    tail = LATEST.format(table) if changelog else "ORDER BY id"
    ours, theirs = texts(pipeline, "source", table, names), texts(pipeline, "target", table, names, tail)
    assert len(ours) == len(theirs)
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert dict(zip(names, our_row, strict=True)) == dict(zip(names, their_row, strict=True))
    pipeline.assert_verified()
