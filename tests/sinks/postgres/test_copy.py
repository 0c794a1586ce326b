"""COPY into a real server, of record batches and of another server's COPY: every value is preserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain, zip_longest
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.postgres import types
from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import Connection, connected
from airflow_cdc_provider.engine.sinks.postgres import copy as postgres_copy
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches, copy_written, takes_binary
from airflow_cdc_provider.engine.sources.postgres.reading import read_sessions
from airflow_cdc_provider.engine.sources.postgres.reading.read_sessions import CopySession
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.support.type_values import VALUES as BUILT_IN

TEXTS = st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"))
ROWS = st.lists(st.tuples(TEXTS, st.none() | st.binary(), st.none() | st.lists(TEXTS)), max_size=30)


@pytest.fixture(scope="module")
def servers(source_server: PostgresServer, target_server: PostgresServer) -> Iterator[tuple[str, Connection]]:
    """Return the address of one server and a connection to the other, both with a table for the rows."""
    columns = "n int, a text, b bytea, c text[]"
    with connected(source_server.dsn(), writes=True) as source, connected(target_server.dsn(), writes=True) as target:
        with source.cursor() as cursor:
            cursor.execute(f"CREATE TABLE public.copied_rows ({columns})")
        with target.cursor() as cursor:
            cursor.execute(f"CREATE TABLE public.copied_rows ({columns}, d text, e text)")
        yield source_server.dsn(), target
        for connection in (source, target):
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE public.copied_rows")


@pytest.mark.lengthy
@settings(max_examples=100, deadline=None)
@given(
    ROWS,
    st.text(st.characters(exclude_characters="\0", codec="utf-8")),
    st.sampled_from([2, 7, 1 << 18]),
    st.booleans(),
)
def test_what_one_server_writes_the_other_reads(
    servers: tuple[str, Connection], rows: list[tuple[Any, ...]], constant: str, slice_bytes: int, binary: bool
) -> None:
    dsn, target = servers
    numbered = [(n, *row) for n, row in enumerate(rows)]
    with connected(dsn, writes=True) as source, source.cursor() as cursor:
        cursor.execute("TRUNCATE public.copied_rows")
        for row in numbered:
            cursor.execute("INSERT INTO public.copied_rows VALUES (%s, %s, %s, %s)", row)
    with pytest.MonkeyPatch.context() as patch, closing(CopySession(dsn, {})) as session, target.cursor() as cursor:
        patch.setattr(read_sessions, "_SLICE_BYTES", slice_bytes)
        cursor.execute("TRUNCATE public.copied_rows")
        constants = [(constant, "text"), ("end", "text")]
        written = session.copy_data("SELECT * FROM public.copied_rows", constants, binary)
        table = sql.Identifier("public", "copied_rows")
        assert copy_written(target, table, list("nabcde"), written, binary) == len(rows)
        cursor.execute("SELECT n, a, b, c, d, e FROM public.copied_rows ORDER BY n")
        found = [(n, a, None if b is None else bytes(b), c, d, e) for n, a, b, c, d, e in cursor.fetchall()]
    assert found == [(*row, constant, "end") for row in numbered]


# Some need no quotes, some do, and the empty text is not NULL.
PLAIN = st.text(st.characters(exclude_characters='\0\t\r\n"\\', codec="utf-8"), min_size=1)
SPECIAL = st.sampled_from(
    ["", "NULL", "\\N", "\\.", "\\", "a\\tb", "\t", "\r", "\n", "\r\n", '"', 'a"b', "'", ",", "  ", "\x01"]
)


@pytest.mark.lengthy
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.none() | PLAIN, st.none() | PLAIN | SPECIAL, st.none() | st.booleans()), max_size=20),
        max_size=4,
    )
)
def test_batches_are_copied_with_all_characters(
    servers: tuple[str, Connection], batches: list[list[tuple[str | None, str | None, bool | None]]]
) -> None:
    kinds = (pa.string(), pa.large_string(), pa.bool_())
    rows = [(*row, n) for n, row in enumerate(chain.from_iterable(batches))]
    numbers = iter(range(len(rows)))
    arrow = [
        pa.RecordBatch.from_arrays(
            [pa.array([row[i] for row in batch], kind) for i, kind in enumerate(kinds)]
            + [pa.array([next(numbers) for _ in batch], pa.int64())],
            names=list("abcn"),
        )
        for batch in batches
    ]
    _, target = servers
    with target.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE batched (a text, b text, c bool, n int)")
        try:
            assert copy_batches(target, sql.Identifier("batched"), list("abcn"), arrow) == len(rows)
            for column in "ab":  # alone, so that a row may be an empty line
                only = [batch.select([column]) for batch in arrow]
                assert copy_batches(target, sql.Identifier("batched"), [column], only) == len(rows)
            cursor.execute("SELECT a, b, c, n FROM batched WHERE n IS NOT NULL ORDER BY n")
            assert cursor.fetchall() == rows
            cursor.execute("SELECT count(a), count(b) FROM batched WHERE n IS NULL")
            assert cursor.fetchall() == [tuple(sum(row[i] is not None for row in rows) for i in (0, 1))]
        finally:
            cursor.execute("DROP TABLE batched")


def test_rows_go_as_text_where_none_of_their_values_needs_quotes() -> None:
    def plain(*values: object) -> bool:
        return postgres_copy._encoded(pa.RecordBatch.from_arrays([pa.array(values)], names=["a"]))[0]

    assert all([plain("a", None, "with, commas and 'these' |"), plain(1, None), plain(True)])
    assert not any(plain("a", value) for value in ("", "\\", "\t", "\n", "\r", '"'))


# The types for which test_types has values, and some that are composed of them.
VALUES = {
    name: values
    for name, values in BUILT_IN.items()
    if (known := types.get(name.partition("(")[0])) is not None and known.oid in postgres_copy._SAME_EVERYWHERE
} | {
    "char(3)": ["a", "abc"],
    "text[]": ["{}", '{NULL,"NULL",""}', "[0:1]={a,b}", "{{a},{b}}"],
    "int4[]": ["{1,NULL}"],
    "numeric[]": ["{1.50,NaN}"],
}


@pytest.mark.parametrize("source_is_older", [True, False])
def test_values_of_all_types_pass_in_the_binary_format(
    servers: tuple[str, Connection], make_server: ServerMaker, source_is_older: bool
) -> None:
    dsns = servers[0], make_server("18").dsn()
    source_dsn, target_dsn = dsns if source_is_older else reversed(dsns)
    table = sql.Identifier("public", "typed")
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(VALUES))
    names = [f"c{n}" for n in range(len(VALUES))]
    texts = ", ".join(f"format('%s', {name})" for name in names)
    shown = f"SELECT {texts} FROM public.typed ORDER BY n"
    with connected(source_dsn, writes=True) as source, connected(target_dsn, writes=True) as target:
        for connection in (source, target):
            with connection.cursor() as cursor:
                cursor.execute(f"DROP TABLE IF EXISTS public.typed; CREATE TABLE public.typed (n int, {columns})")
        with source.cursor() as cursor:
            for row in enumerate(zip_longest(*VALUES.values())):
                cursor.execute(f"INSERT INTO public.typed VALUES (%s{', %s' * len(names)})", (row[0], *row[1]))
            cursor.execute(
                "SELECT attname::text, atttypid::int8 FROM pg_attribute WHERE attrelid = 'public.typed'::regclass"
            )
            oids = {name: oid for name, oid in cursor.fetchall() if name in names}
            cursor.execute(shown)
            expected = cursor.fetchall()
        assert {types[oid].oid for oid in postgres_copy._SAME_EVERYWHERE} <= set(oids.values())
        assert takes_binary(target, table, oids)
        with closing(CopySession(source_dsn, {})) as session, target.cursor() as cursor:
            written = session.copy_data("SELECT * FROM public.typed", (), True)
            assert copy_written(target, table, ["n", *names], written, True) == len(expected)
            cursor.execute(shown)
            assert cursor.fetchall() == expected
        for connection in (source, target):
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE public.typed")


def test_only_the_very_types_pass_in_the_binary_format(databases: Databases) -> None:
    """A number would be interpreted as a date, and the format of a later version as something else."""
    int4, text, money, interval, xml = 23, 25, 790, 1186, 142
    table = sql.Identifier("public", "Typed")
    with connected(databases.target, writes=True) as target, target.cursor() as cursor:
        cursor.execute('CREATE TABLE public."Typed" (a int, b date, c bigint, d text, m money, i interval, x xml)')
        assert takes_binary(target, table, {"d": text, "a": int4})
        for name in ("b", "c", "d", "none"):
            assert not takes_binary(target, table, {"a": int4, name: int4})
        for name, oid in (("m", money), ("i", interval), ("x", xml)):
            assert not takes_binary(target, table, {"a": int4, name: oid})


def test_large_rows_are_copied_like_others(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may contain any characters, alone and between other rows."""
    monkeypatch.setattr(postgres_copy, "_LARGE_BYTES", 20)
    monkeypatch.setattr(postgres_copy, "_READ_BYTES", 3)
    quotes = postgres_copy._QUOTES
    texts = ["", None, "short", 'a "long" text, with é and \n and \r\n', quotes * 9, "\x01" * 30 + '"', "\\." * 20, "x"]
    numbers = [1, None, 3, 4, 5, 6, 7, 8]
    flags = [True, False, None, True, False, True, False, True]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(texts, pa.large_string()), pa.array(texts), pa.array(numbers), pa.array(flags)], names=list("abcd")
    )
    with connected(databases.target, writes=True) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE public.c (n serial, a text, b text, c int, d bool)")
        table = sql.Identifier("public", "c")
        assert copy_batches(connection, table, list("abcd"), iter([batch, batch.slice(3, 2)])) == 10
        cursor.execute("SELECT a, b, c, d FROM public.c ORDER BY n")
        expected = list(zip(texts, texts, numbers, flags, strict=True))
        assert cursor.fetchall() == expected + expected[3:5]
