"""Existing target tables: types that do not preserve the source's values are refused, unless they are converted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, ConfigError, ForeignTable
from airflow_cdc_provider.engine.core.type_shape import TypeShape
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.type_shapes import read_shapes
from airflow_cdc_provider.engine.sinks.postgres.kept_types import keeps
from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest

NARROW = {
    "a": ("numeric", "numeric(10,2)"),
    "b": ("timestamp without time zone", "date"),
    "c": ("text", "character varying(2)"),
    "d": ("double precision", "real"),
    "e": ("character varying(10)", "character(3)"),
    "f": ("timestamp with time zone", "timestamp(0) with time zone"),
    "g": ("interval", "interval(0)"),
    "h": ("time without time zone", "time(0) without time zone"),
    "i": ("text", "bytea"),
    "j": ("integer", "money"),
    "k": ("numeric(10,2)[]", "numeric(10,1)[]"),
    "l": ("date", "timestamp without time zone"),
    "m": ("json", "jsonb"),
    "n": ("integer", "smallint"),
    "o": ("character varying(3)", "character(5)"),
    "p": ("bit varying", "bit(3)"),
    "q": ("numeric(5,1)", "numeric(8,3)"),
    "r": ("bigint", "double precision"),
    "s": ("real", "double precision"),
}
WIDE = {
    "a": ("numeric(10,2)", "numeric(12,2)"),
    "b": ("numeric(10,2)", "numeric"),
    "c": ("integer", "bigint"),
    "d": ("integer", "numeric"),
    "e": ("bigint", "numeric(19,0)"),
    "f": ("character varying(5)", "text"),
    "g": ("character(5)", "character varying"),
    "h": ("timestamp(3) without time zone", "timestamp without time zone"),
    "i": ("jsonb", "text"),
    "j": ("bit(3)", "bit varying"),
    "k": ("integer[]", "bigint[]"),
    "l": ("text", 'text COLLATE "C"'),
    "m": ("interval day to second(2)", "interval"),
    "n": ("name", "character varying(64)"),
    "o": ("jsonb", "json"),
    "p": ("public.amount", "numeric"),
    "q": ("public.mood", "public.mood"),
    "r": ("public.amount", "public.amount"),
}
OWN = ("CREATE DOMAIN amount AS numeric(10,2)", "CREATE TYPE mood AS ENUM ('old', 'new')")


def tables(cells: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the statements that create a table at the source and at the target."""
    source, target = (", ".join(f"{name} {kinds[side]}" for name, kinds in cells.items()) for side in (0, 1))
    return f"CREATE TABLE t (id int PRIMARY KEY, {source})", f"CREATE TABLE t (id int PRIMARY KEY, {target})"


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_narrower_types_are_refused_by_name(databases: Databases, tmp_path: Path, mode: str) -> None:
    """Preflight and provision name each with its remedy; after the remedies, both pass."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": mode})
    made, narrow = tables(NARROW)
    if mode == "changelog":
        columns = '_op "char", _commit_lsn pg_lsn, _seq bigint, _xid bigint, _commit_ts timestamp, _before jsonb'
        narrow = f"{narrow[:-1].replace(' PRIMARY KEY', '')}, {columns}, _unchanged text[])"
    pipeline.source(made)
    pipeline.target(narrow)
    for command in commands.preflight, commands.provision:
        with pytest.raises(ForeignTable) as refused:
            command(pipeline.pipeline)
        for name, (theirs, ours) in NARROW.items():
            assert f"column {name} is {ours}, but {theirs} at the source" in refused.value.message
            assert f'ALTER COLUMN "{name}" TYPE {theirs} USING' in refused.value.solution
        assert ("_commit_ts" in refused.value.message) == (mode == "changelog")
        assert "column id" not in refused.value.message
    mending = refused.value.solution.removeprefix("Run at the target: ").partition(" Or drop")[0]
    pipeline.target(*mending.split(";")[:-1])
    commands.preflight(pipeline.pipeline)
    commands.provision(pipeline.pipeline)


def test_types_that_keep_every_value_are_accepted(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"])
    made, wide = tables(WIDE)
    pipeline.source(*OWN, made, "INSERT INTO t (id, a, g, h, q, r) VALUES (1, 1.5, 'x', '2020-01-01', 'new', 2)")
    pipeline.target(*OWN, wide)
    commands.preflight(pipeline.pipeline)
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO t (id, b, m, n, p) VALUES (2, 2.50, '1 02:03:04.56', 'n', 3)")
    pipeline.apply()
    pipeline.assert_verified()
    # A wider type at the source makes the target wider.
    pipeline.source("ALTER TABLE t ALTER a TYPE numeric(14,3)", "UPDATE t SET a = 12345678901.123")
    pipeline.apply()
    pipeline.assert_verified()


def test_converted_values_are_accepted_where_the_file_says_so(databases: Databases, tmp_path: Path) -> None:
    """`status` and `verify` name them, and `verify` finds the values that were rounded."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"types": "convert"})
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY, a numeric)", "INSERT INTO t VALUES (1, 1.239), (2, 1.5)")
    pipeline.target("CREATE TABLE t (id int PRIMARY KEY, a numeric(10,1))")
    commands.preflight(pipeline.pipeline)
    pipeline.provision()
    pipeline.copy()
    assert pipeline.target_rows("SELECT id, a::text FROM t ORDER BY id") == [(1, "1.2"), (2, "1.5")]
    place = pipeline.pipeline.sink.place
    assert [sink["converts"] for sink in commands.status(pipeline.pipeline)["sinks"]] == [True]
    verified = commands.verify(pipeline.pipeline)
    assert (verified["equal"], verified["converting"]) == (False, [place])
    assert f"{place} converts values" in pipeline.run("status").stdout
    assert f"{place} converts values" in pipeline.run("verify", code=4).stdout


def test_types_of_the_same_name_and_other_parts(databases: Databases, tmp_path: Path) -> None:
    """The target table exists, is about to be created, joins later, or gets such a column by DDL."""
    kinds = ("AS numeric(10,1)", "AS ENUM ('old')", "AS (a numeric(10,1))")
    wide = ("AS numeric", "AS ENUM ('old', 'new')", "AS (a numeric)")
    names = ("DOMAIN amount", "TYPE mood", "TYPE pair")
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"])
    pipeline.source(*(f"CREATE {name} {kind}" for name, kind in zip(names, wide, strict=True)))
    pipeline.target(*(f"CREATE {name} {kind}" for name, kind in zip(names, kinds, strict=True)))
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY, x amount, y mood[], z pair)")
    for command in commands.preflight, commands.provision:
        with pytest.raises(ForeignTable, match=r"column x is public\.amount.*column y.*column z is public.pair") as e:
            command(pipeline.pipeline)
        assert "ALTER TYPE public.mood ADD VALUE 'new';" in e.value.solution
    pipeline.source("ALTER TABLE t DROP x, DROP y, DROP z")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("CREATE TABLE later (id int PRIMARY KEY, x amount)")
    with pytest.raises(ForeignTable, match=r"public\.later .*column x"):
        commands.resnapshot(pipeline.pipeline, tables=["public.later"])
    pipeline.source("DROP TABLE later", "ALTER TABLE t ADD z pair", "INSERT INTO t VALUES (1, '(1.23)')")
    with pytest.raises(CannotFollow, match=r"column z is public\.pair"):
        pipeline.apply()


def test_a_missing_column_is_named(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY, a numeric(5,2))")
    pipeline.target("CREATE TABLE t (id int PRIMARY KEY)")
    for command in commands.preflight, commands.provision:
        with pytest.raises(ForeignTable, match="column a is missing") as refused:
            command(pipeline.pipeline)
    assert 'ADD COLUMN "a" numeric(5,2);' in refused.value.solution


# -- the decision, against a server ------------------------------------------------------------------

SCALARS = {
    "boolean": st.sampled_from(["t", "f"]),
    "smallint": st.integers(-(2**15), 2**15 - 1).map(str),
    "integer": st.integers(-(2**31), 2**31 - 1).map(str),
    "bigint": st.integers(-(2**63), 2**63 - 1).map(str),
    "oid": st.integers(0, 2**32 - 1).map(str),
    "real": st.floats(width=32).map(str),
    "double precision": st.floats().map(str),
    "money": st.integers(-(10**6), 10**6).map(str),
    "uuid": st.uuids().map(str),
    "date": st.dates().map(str),
    "bytea": st.binary(max_size=4).map(lambda value: "\\x" + value.hex()),
    "json": st.sampled_from(['{"b":1, "a":  2}', "[1.0]", '"x"']),
    "jsonb": st.sampled_from(['{"b":1, "a":  2}', "[1.0]", '"x"']),
    "inet": st.ip_addresses().map(str),
    "cidr": st.ip_addresses().map(str),
    "box": st.just("(1,1),(0,0)"),
    '"char"': st.sampled_from(["", "x", '"']),
}
NUMBERS = st.decimals(-(10**6), 10**6, places=4).map(lambda n: f"{n:f}")
TEXTS = st.text("ab \"'\\{},N", max_size=4)
BITS = st.text("01", min_size=1, max_size=6)
MOMENTS = st.datetimes().map(str)
INTERVALS = st.timedeltas().map(lambda d: f"{d.days} days {d.seconds}.{d.microseconds:06d} seconds")
SIZED = {
    "numeric({},{})": NUMBERS,
    "numeric": NUMBERS,
    "character varying({})": TEXTS,
    "character varying": TEXTS,
    "character({})": TEXTS,
    "bpchar": TEXTS,
    "text": TEXTS,
    "name": TEXTS,
    "bit({})": BITS,
    "bit varying({})": BITS,
    "bit varying": BITS,
    "timestamp({}) without time zone": MOMENTS,
    "timestamp without time zone": MOMENTS,
    "timestamp({}) with time zone": MOMENTS,
    "time({}) without time zone": st.times().map(str),
    "time without time zone": st.times().map(str),
    "time({}) with time zone": st.times().map(str),
    "interval({})": INTERVALS,
    "interval": INTERVALS,
    "interval day": INTERVALS,
    "interval second({})": INTERVALS,
    "interval day to second({})": INTERVALS,
    "numrange": st.just("[1.0,2.50)"),
}
KINDS = {**SCALARS, **SIZED}


def sized(form: str, sizes: tuple[int, int]) -> str:
    return form.format(sum(sizes), sizes[1]) if form.count("{}") == 2 else form.format(sizes[0])


ALL = [
    (form, sizes)
    for form in KINDS
    for sizes in itertools.product((1, 3, 6), repeat=2)
    if "{}" in form or sizes == (1, 1)
]
KEPT = [
    (form, sized(form, sizes), sized(other, others))
    for form, sizes in ALL
    for other, others in ALL
    if keeps(TypeShape.builtin(sized(form, sizes)), TypeShape.builtin(sized(other, others)))
]


@pytest.fixture(scope="module")
def server(source_server: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(source_server.dsn(), autocommit=True) as connection:
        connection.execute("SET datestyle = 'ISO'; SET timezone = 'UTC'; SET extra_float_digits = 3")
        yield connection


@pytest.mark.lengthy
@settings(max_examples=400, deadline=None)
@given(kept=st.sampled_from(KEPT), array=st.booleans(), data=st.data())
def test_what_passes_gives_back_every_text(
    server: psycopg.Connection, kept: tuple[str, str, str], array: bool, data: st.DataObject
) -> None:
    form, kind, target = kept
    ends = "[]" if array else ""
    if not keeps(TypeShape.builtin(kind + ends), TypeShape.builtin(target + ends)):
        return
    try:
        (text,) = one(server, f"SELECT format('%s', %s::{kind})", data.draw(KINDS[form]))
    except psycopg.DataError:
        return  # not one of the type's values
    if array:
        (text,) = one(server, f"SELECT format('%s', ARRAY[%s::{kind}, NULL])", text)
    assert one(server, f"SELECT format('%s', %s::{target}{ends})", text) == (text,)


def test_every_type_keeps_its_own_values() -> None:
    assert all(keeps(TypeShape.builtin(kind), TypeShape.builtin(kind)) for kind in (sized(*each) for each in ALL))
    assert len({(kind, target) for _, kind, target in KEPT}) < len(ALL) ** 2 / 4


def one(server: psycopg.Connection, query: str, value: str) -> tuple[str, ...]:
    found = server.execute(sql.SQL(query.replace("'%s'", "'%%s'")), [value]).fetchone()
    assert found is not None
    return found


def test_shapes_of_own_types_are_those_of_their_parts(databases: Databases) -> None:
    execute(
        databases.source,
        "CREATE DOMAIN d AS varchar(3)[]",
        "CREATE TYPE e AS ENUM ('b', 'a')",
        "CREATE TYPE c AS (a numeric(3,1), e e, d d)",
        "CREATE DOMAIN dc AS c",
    )
    with connected(databases.source) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 'public.dc[]'::regtype::oid::int8, 'public.dc[]'")
        (found,) = read_shapes(connection, cursor.fetchall())
    numbers = TypeShape("numeric", modifier="(3,1)")
    words = TypeShape("character varying[]", "array", elements=(TypeShape("character varying", modifier="(3)"),))
    pair = TypeShape(
        "c", "composite", own=True, elements=(numbers, TypeShape("e", "enum", "", True, ("b", "a")), words)
    )
    assert found.elements == (pair,)
    assert TypeShape.from_dict(asdict(found)) == found


def test_a_column_of_a_changelogs_own_names_is_not_followed(databases: Databases, tmp_path: Path) -> None:
    """It is added by DDL, or with a table that joins: the changelog's column would become the source's."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": "changelog"})
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source('ALTER TABLE t ADD "_op" int', "INSERT INTO t VALUES (1, 2)")
    with pytest.raises(CannotFollow, match="columns of the names _op"):
        pipeline.apply()
    pipeline.source("CREATE TABLE later (id int PRIMARY KEY, _seq int)")
    with pytest.raises(ConfigError, match="columns of the names _seq"):
        commands.resnapshot(pipeline.pipeline, tables=["public.later"])
    pipeline.source('ALTER TABLE t RENAME "_op" TO n')
    pipeline.apply()  # re-reads the table, because its definition was different when the row arrived
    assert pipeline.target_rows("SELECT _op::text, id, n FROM t") == [("r", 1, 2)]
