"""COPY into a real server, of record batches and of another server's COPY: every value as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg2 import sql

from airflow_cdc_provider.demo.servers import PostgresServer
from airflow_cdc_provider.engine import reading_sessions
from airflow_cdc_provider.engine.connection import Connection, connected
from airflow_cdc_provider.engine.reading_sessions import CopySession
from airflow_cdc_provider.engine.sinks.postgres import copy as postgres_copy
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches, copy_texts
from tests.conftest import Databases

TEXTS = st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"))
ROWS = st.lists(st.tuples(TEXTS, st.none() | st.binary(), st.none() | st.lists(TEXTS)), max_size=30)


@pytest.fixture(scope="module")
def servers(source_server: PostgresServer, target_server: PostgresServer) -> Iterator[tuple[str, Connection]]:
    """The address of one server and a connection to the other, both with a table for the rows."""
    columns = "n int, a text, b bytea, c text[]"
    with connected(source_server.dsn()) as source, connected(target_server.dsn()) as target:
        with source.cursor() as cursor:
            cursor.execute(f"CREATE TABLE public.copied_rows ({columns})")
        with target.cursor() as cursor:
            cursor.execute(f"CREATE TABLE public.copied_rows ({columns}, d text, e text)")
        yield source_server.dsn(), target
        for connection in (source, target):
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE public.copied_rows")


@settings(max_examples=100, deadline=None)
@given(ROWS, st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.sampled_from([2, 7, 1 << 18]))
def test_what_one_server_writes_the_other_reads(
    servers: tuple[str, Connection], rows: list[tuple[Any, ...]], constant: str, slice_bytes: int
) -> None:
    dsn, target = servers
    numbered = [(n, *row) for n, row in enumerate(rows)]
    with connected(dsn) as source, source.cursor() as cursor:
        cursor.execute("TRUNCATE public.copied_rows")
        for row in numbered:
            cursor.execute("INSERT INTO public.copied_rows VALUES (%s, %s, %s, %s)", row)
    with pytest.MonkeyPatch.context() as patch, closing(CopySession(dsn, {})) as session, target.cursor() as cursor:
        patch.setattr(reading_sessions, "_SLICE_BYTES", slice_bytes)
        cursor.execute("TRUNCATE public.copied_rows")
        texts = session.copied("SELECT * FROM public.copied_rows", [constant, "end"])
        table = sql.Identifier("public", "copied_rows")
        assert copy_texts(target, table, list("nabcde"), texts) == len(rows)
        cursor.execute("SELECT n, a, b, c, d, e FROM public.copied_rows ORDER BY n")
        found = [(n, a, None if b is None else bytes(b), c, d, e) for n, a, b, c, d, e in cursor.fetchall()]
    assert found == [(*row, constant, "end") for row in numbered]


def test_large_rows_are_copied_like_others(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever characters they hold, alone and between others."""
    monkeypatch.setattr(postgres_copy, "_LARGE_BYTES", 20)
    monkeypatch.setattr(postgres_copy, "_READ_BYTES", 3)
    quotes = postgres_copy._QUOTES
    texts = ["", None, "short", 'a "long" text, with é and \n and \r\n', quotes * 9, "\x01" * 30 + '"', "\\." * 20, "x"]
    numbers = [1, None, 3, 4, 5, 6, 7, 8]
    flags = [True, False, None, True, False, True, False, True]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(texts, pa.large_string()), pa.array(texts), pa.array(numbers), pa.array(flags)], names=list("abcd")
    )
    with connected(databases.target) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE public.c (n serial, a text, b text, c int, d bool)")
        table = sql.Identifier("public", "c")
        assert copy_batches(connection, table, list("abcd"), iter([batch, batch.slice(3, 2)])) == 10
        cursor.execute("SELECT a, b, c, d FROM public.c ORDER BY n")
        expected = list(zip(texts, texts, numbers, flags, strict=True))
        assert cursor.fetchall() == expected + expected[3:5]
