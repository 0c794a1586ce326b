"""Values of Postgres in MySQL: each comes back as its original text, or is refused by name.

Tables are created on a real Postgres, which also provides the texts of its values; the sink keeps them in a real
MariaDB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg2 import sql

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import LimitExceeded, UncapturableTable
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, rows
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.mysql.types import column_type
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.given_rows import GivenRows
from tests.support.mysql import query
from tests.support.type_values import VALUES

WATERMARK = Watermark(Snapshot(10, 12, frozenset()), 150)
IDENTITY = {"system": "1", "timeline": 1, "database": 5}
# Types whose values refer to objects that only another database of the tests has.
LOCAL = re.compile(r"reg|aclitem|pg_am|information_schema")
ARRAYS = {
    "int4[]": ["{}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[0:1]={1,2}", "[2:2][3:4]={{1,2}}"],
    "float8[]": ["{NaN,-Infinity,1e+300,-0,0.1}"],
    "numeric[]": ["{1.500,NaN,0.00}"],
    "numeric(4,2)[]": ["{1.5}"],
    "bool[]": ["{t,f,NULL}"],
    "text[]": ['{"","NULL",null,"a,b","{}","\\"","\\\\"," x",é𝄞}', '{"\\n\\t"}'],
    "box[]": ["{(1,1),(0,0);(2,2),(1,1)}"],
    "bytea[]": ['{"\\\\x00ff",""}'],
    "date[]": ["{infinity,2000-01-01}"],
    "jsonb[]": ['{"{\\"a\\": [1, \\"b\\"]}"}'],
    "public.mood[]": ['{sad,"so so"}'],
}
OTHERS = {
    "public.mood": ["sad", "so so"],
    "public.percent": ["0", "100"],
    "public.word": ["", "a"],
    "public.price": ["1.50", "NaN"],
    "public.pair": ['(1,"a b")', "(,)"],
}
USERS = """
CREATE TYPE public.mood AS ENUM ('sad', 'so so');
CREATE DOMAIN public.percent AS int CHECK (VALUE <= 100);
CREATE DOMAIN public.word AS text;
CREATE DOMAIN public.price AS numeric(6,2);
CREATE TYPE public.pair AS (a int, b text);
"""


def made(source: Connection, name: str, columns: Sequence[str], key: str = "id") -> Target:
    """Return a table of the source, as a target."""
    definition = ", ".join(columns)
    rows(source, f"CREATE TABLE public.{name} ({definition}, PRIMARY KEY ({key}))")
    (table,) = resolve(source, (TableRule(f"public.{name}"),))
    return Target(table, "copy", name)


def texts_of(source: Connection, target: Target) -> list[tuple[str | None, ...]]:
    shown = sql.SQL(", ").join(text_of(column) for column in target.table.columns)
    found = rows(source, sql.SQL("SELECT {} FROM public.{}").format(shown, sql.Identifier(target.name)))
    return sorted(found, key=lambda row: int(row[0]))


def batch_of(target: Target, values: Sequence[Sequence[str | None]]) -> pa.RecordBatch:
    columns = [pa.array(column, pa.large_string()) for column in zip(*values, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=[column.name for column in target.table.columns])


@contextmanager
def sink_of(server: MariadbServer, target: Target, mode: str = "mirror") -> Iterator[tuple[MysqlSink, int]]:
    sink = MysqlSink(server.dsn, "types", mode)  # type: ignore[arg-type]
    sink.prepare([target], [Chunk(target.table.label, 0, None, None)], IDENTITY, 100)
    try:
        yield sink, sink.take_epoch("test")
    finally:
        sink.drop()
        query(server, f'DROP TABLE "copy"."{target.name}"')


def stored(sink: MysqlSink, target: Target) -> list[tuple[str | None, ...]]:
    names = [column.name for column in target.table.columns]
    found = [
        row for batch in sink.rows(target) for row in zip(*(batch.column(n).to_pylist() for n in names), strict=True)
    ]
    return sorted(found, key=lambda row: int(str(row[0])))


def copied(sink: MysqlSink, epoch: int, target: Target, values: Sequence[Sequence[str | None]]) -> None:
    """Copy rows through a chunk and through a staged unit, and return the target's texts."""
    chunk, origin, batch = (
        Chunk(target.table.label, 0, None, None),
        ServerIdentity.of(IDENTITY),
        batch_of(target, values),
    )
    sink.write_chunk(epoch, target, chunk, origin, GivenRows([batch], lambda: WATERMARK))
    assert stored(sink, target) == list(values)
    erased = pa.array([False] * len(values))
    effect = Effect(
        target.table.label,
        True,
        pa.table([erased, *batch.columns], names=["erased", *(f"c{i}" for i in range(batch.num_columns))]),
    )
    piece = StagedPiece("", "", 0, 1, b"", sink.stage(epoch, "test", [effect]), frozenset(), LOG_END)
    assert sink.commit(epoch, 100, 200, [piece])
    assert stored(sink, target) == list(values)


@pytest.fixture
def source(databases: Databases) -> Iterator[Connection]:
    with connected(databases.source, writes=True) as connection:
        rows(connection, USERS)
        yield connection


@pytest.mark.parametrize("local_infile", ["ON", "OFF"])
def test_every_value_comes_back_or_is_refused_by_name(
    source: Connection, mariadb: MariadbServer, local_infile: str
) -> None:
    every = {kind: values for kind, values in (VALUES | ARRAYS | OTHERS).items() if not LOCAL.match(kind)}
    target = made(source, "t", ["id int", *(f'"{n} c" {kind}' for n, kind in enumerate(every))])
    for place, (kind, values) in enumerate(every.items()):
        for number, value in enumerate(values):
            rows(
                source,
                f'INSERT INTO public.t (id, "{place} c") VALUES (%s, %s::{kind})',
                [1000 * place + number, value],
            )
    taken, refused = [], []
    kinds = [column_type(column) for column in target.table.columns]
    for row in texts_of(source, target):
        (column,) = [i for i, text in enumerate(row) if i and text is not None]
        pattern = kinds[column].takes
        fits = pattern is None or re.fullmatch(pattern, str(row[column]))
        (taken if fits else refused).append((column, row))
    query(mariadb, f"SET GLOBAL local_infile = {local_infile}")
    try:
        with sink_of(mariadb, target) as (sink, epoch):
            copied(sink, epoch, target, [row for _, row in taken])
            for column, row in refused:
                name = re.escape(repr(target.table.columns[column].name))
                with pytest.raises(LimitExceeded, match=rf"column {name} of public\.t has the value"):
                    sink.replace(epoch, target, None, GivenRows([batch_of(target, [row])], lambda: WATERMARK), target)
    finally:
        query(mariadb, "SET GLOBAL local_infile = ON")
    special = {str(row[column]) for column, row in refused}
    assert {"NaN", "Infinity", "-0", "infinity", "0044-03-15 BC", "5874897-12-31"} <= special
    assert len(taken) > 200


def test_every_power_of_two_and_of_ten_comes_back(source: Connection, mariadb: MariadbServer) -> None:
    """The shortest digits of a number are not always the nearest, and servers may disagree on them."""
    target = made(source, "t", ["id int", "d double precision", "r real"])
    rows(source, "INSERT INTO public.t SELECT n, 2::float8 ^ n FROM generate_series(-1074, 1023) n")
    rows(source, "INSERT INTO public.t SELECT 2000 + n, ('1e' || n)::float8 FROM generate_series(-323, 308) n")
    rows(source, "UPDATE public.t SET r = d WHERE abs(d) BETWEEN 1e-44 AND 3e38")
    with sink_of(mariadb, target) as (sink, epoch):
        copied(sink, epoch, target, texts_of(source, target))


PLAIN = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value or 0.0)  # no -0
DAYS = st.dates().map(str)
ROWS = st.tuples(
    st.text(PLAIN),
    FLOATS.map(repr),
    FLOATS.filter(lambda value: 1e-30 < abs(value) < 1e30).map(repr),
    st.decimals(-(10**8) + 1, 10**8 - 1, places=4, allow_nan=False).map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(
        lambda d: format(d, "f") if abs(d.adjusted()) < 900 else "1"
    ),
    st.datetimes().map(str),
    st.datetimes().map(lambda moment: f"{moment}+00"),
    st.times().map(str),
    DAYS,
    st.binary().map(lambda data: f"\\x{data.hex()}"),
    st.lists(st.none() | st.text(PLAIN)),
    st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)),
    st.uuids().map(str),
)
KINDS = (
    *("text", "float8", "float4", "numeric(12,4)", "numeric", "timestamp", "timestamptz", "time", "date"),
    *("bytea", "text[]", "int4[]", "uuid"),
)


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    deadline=None,
)
@given(st.lists(ROWS, min_size=1, max_size=60))
def test_values_of_any_kind_come_back(
    source: Connection, mariadb: MariadbServer, values: list[tuple[object, ...]]
) -> None:
    rows(source, "DROP TABLE IF EXISTS public.t")
    target = made(source, "t", ["id int", *(f"c{n} {kind}" for n, kind in enumerate(KINDS))])
    places = ", ".join(f"%s::{kind}" for kind in KINDS)
    for number, row in enumerate(values):
        rows(source, f"INSERT INTO public.t VALUES ({number}, {places})", list(row))
    with sink_of(mariadb, target) as (sink, epoch):
        copied(sink, epoch, target, texts_of(source, target))


def test_keys_are_told_apart_as_postgres_does(source: Connection, mariadb: MariadbServer) -> None:
    """They differ by case, accents, trailing spaces and normal forms, and may be as long as an index allows."""
    target = made(source, "t", ["id int", "a text", "b bytea"], key="id, a, b")
    texts = ["a", "A", "á", "a ", "a\t", "a\u0301", "", "ß", "ss", "é" * 380]
    for number, text in enumerate(texts):
        rows(source, "INSERT INTO public.t VALUES (1, %s, %s)", [text, f"\\x{number:04x}"])
    with sink_of(mariadb, target) as (sink, epoch):
        shown = texts_of(source, target)
        sink.replace(epoch, target, None, GivenRows([batch_of(target, shown)], lambda: WATERMARK), target)
        assert sorted(stored(sink, target)) == sorted(shown)
        assert sorted(sink.members(target, shown, [pa.array(c) for c in zip(*shown, strict=True)])) == [  # type: ignore[arg-type]
            (n, n) for n in range(len(shown))
        ]
        one = frozenset({shown[0]})
        sink.replace(epoch, target, one, GivenRows([], lambda: WATERMARK), target)  # type: ignore[arg-type]
        assert sorted(stored(sink, target)) == sorted(shown[1:])
        for column, value in (1, "é" * 384), (2, "\\x" + "00" * 1535):
            long = ["1", "a", "\\x00"]
            long[column] = value
            with pytest.raises(LimitExceeded, match=r"longer than \d+ in a key"):
                sink.replace(epoch, target, None, GivenRows([batch_of(target, [long])], lambda: WATERMARK), target)


def test_names_that_mysql_cannot_have_are_refused(source: Connection, mariadb: MariadbServer) -> None:
    for columns, said in (["id int", "a int", '"A" int'], "'a' and 'A'"), (["id int", '"b " int'], "'b '"):
        rows(source, "DROP TABLE IF EXISTS public.t")
        with pytest.raises(UncapturableTable, match=said), sink_of(mariadb, made(source, "t", columns)):
            pass
