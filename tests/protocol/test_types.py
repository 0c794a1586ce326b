"""Every built-in type: snapshot and stream carry its extremes value by value.

The comparison uses the text that each server's output functions produce, from which Postgres itself restores a dump.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import connected, rows
from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.protocol.typed_tables import Mode, assert_same, columns_of, make_databases, servers, texts
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest
from tests.support.type_values import VALUES

__all__ = ["make_databases", "servers"]

pytestmark = pytest.mark.slow


VERSIONS: dict[int, dict[str, Sequence[str]]] = {
    15: {"numeric(5,-2)": ["-99900", "1234567"], "numeric(3,5)": ["0.00999"]},
    16: {'"char"': ["\\377"]},
    17: {"interval": ["infinity", "-infinity"]},
}


XML = {"xml": ["", '<a b="1">&amp;</a>', "text", '<?xml version="1.0" standalone="yes"?><a>ä</a>', "<a/><b/>"]}


# The server generates their values; no input function accepts them.
MADE = {
    "pg_node_tree": "SELECT conbin FROM pg_constraint WHERE conbin IS NOT NULL LIMIT 1",
    "pg_ndistinct": "SELECT stxdndistinct FROM pg_statistic_ext_data",
    "pg_dependencies": "SELECT stxddependencies FROM pg_statistic_ext_data",
    "pg_mcv_list": "SELECT stxdmcv FROM pg_statistic_ext_data",
}


# No input of a user yields a value of these types: they exist only in indexes.
NO_VALUES = {"gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}


ONLY_HERE = (
    "CREATE SCHEMA only_here",
    "CREATE TABLE public.only_here (a int, b int CHECK (b >= 0))",
    "CREATE FUNCTION public.only_here() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "INSERT INTO public.only_here SELECT i % 3, i % 2 FROM generate_series(1, 100) i",
    "CREATE STATISTICS s ON a, b FROM public.only_here",
    "ANALYZE public.only_here",
)


def assert_before(pipeline: PipelineUnderTest, table: str = "public.t") -> None:
    """Check that the old row of each change of a changelog has the texts of the previous change."""
    names = list(columns_of(pipeline, "source", table))
    with connected(pipeline.databases.target) as connection:
        found = rows(connection, sql.SQL("SELECT _before, id FROM {} WHERE _op IN ('u', 'd')").format(sql.SQL(table)))
        assert found
        for before, key in found:
            assert set(before) == set(names)
            earlier = sql.SQL("WHERE id = {} AND _op IN ('r', 'i', 'u') ORDER BY _commit_lsn, _seq").format(
                sql.Literal(int(before["id"]))
            )
            states = texts(pipeline, "target", table, names, earlier.as_string(connection))
            assert tuple(before[name] for name in names) in states, key


def stream_changes(pipeline: PipelineUnderTest, names: Sequence[str]) -> None:
    """Insert every row again, rotate the values of the first ones, delete one and, in a mirror, move two; one batch."""
    listed = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
    rotated = ", ".join('"{0}" = o."{0}"'.format(name.replace('"', '""')) for name in names)
    pipeline.source(
        f"INSERT INTO public.t (id, {listed}) SELECT id + 1000, {listed} FROM public.t",
        f"UPDATE public.t t SET {rotated} FROM public.t o"
        " WHERE t.id < 1000 AND o.id = (t.id + 1) % (SELECT count(*) / 2 FROM public.t)",
        "DELETE FROM public.t WHERE id = 1",
    )
    if pipeline.pipeline.sink.mode == "mirror":
        pipeline.source("UPDATE public.t SET id = -id WHERE id IN (2, 1001)")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("version", ["16", "18", "full"])
def test_every_builtin_type(
    servers: Mapping[str, PostgresServer],
    make_databases: Callable[[PostgresServer, PostgresServer], Databases],
    tmp_path: Path,
    version: str,
    mode: Mode,
) -> None:
    databases = make_databases(servers[version], servers[version])
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    values = {kind: list(given) for kind, given in VALUES.items()}
    with connected(databases.source) as source:
        for since, more in VERSIONS.items():
            if source.info.server_version >= since * 10000:
                for kind, given in more.items():
                    values[kind] = [*values.get(kind, []), *given]
        if version == "full":
            values |= {kind: list(given) for kind, given in XML.items()}
        assert_complete(source, [*values, *MADE, *NO_VALUES, *({"xml"} - values.keys())])
    pipeline.source(*ONLY_HERE)
    names = create_table_of(pipeline, values)
    if mode == "changelog":
        pipeline.source("ALTER TABLE public.t REPLICA IDENTITY FULL")
    pipeline.provision()
    pipeline.copy()
    assert_same(pipeline)
    stream_changes(pipeline, names)
    pipeline.apply()
    assert_same(pipeline)
    if mode == "changelog":
        assert_before(pipeline)
    ours, theirs = columns_of(pipeline, "source", "public.t"), columns_of(pipeline, "target", "public.t")
    as_text = {kind for kind in values if kind.startswith("reg") or kind == "aclitem"} | MADE.keys()
    for name, kind in ours.items():
        if name.removesuffix(" array") in as_text:
            assert theirs[name] == "text"
        elif mode == "mirror" or not kind.startswith("information_schema.") or kind.endswith("[]"):
            assert theirs[name] == kind


def assert_complete(source: Any, kinds: Sequence[str]) -> None:
    """Check that the tests cover every built-in type that a column can have; arrays are made for each."""
    query = (
        "SELECT oid, typname FROM pg_type t WHERE typtype <> 'p' AND typrelid = 0 AND oid < 16384"
        " AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)"
    )
    tested = {oid for (oid,) in rows(source, "SELECT t::regtype::oid FROM unnest(%s::text[]) t", [list(kinds)])}
    assert [name for oid, name in rows(source, query) if oid not in tested] == []


def create_table_of(
    pipeline: PipelineUnderTest, values: Mapping[str, Sequence[str]], made: Mapping[str, str] = MADE
) -> list[str]:
    """Create ``public.t`` with a column of each type and of its array, and of each created type; return their names."""
    cells: dict[str, tuple[str, list[sql.Composable]]] = {}
    for kind, given in values.items():
        scalars = [sql.SQL("{}::" + kind).format(sql.Literal(text)) for text in given]
        first, last = scalars[0], scalars[-1]
        listed = sql.SQL(", ").join(scalars)
        array = sql.SQL(f"ARRAY[{{}}]::{kind}[]")
        cells[kind] = kind, list(scalars)
        cells[f"{kind} array"] = (
            f"{kind}[]",
            [
                sql.SQL("'{{}}'").format(),
                array.format(sql.SQL("{}, NULL").format(listed)),
                sql.SQL("array_fill({}, ARRAY[2, 1, 2], ARRAY[-1, 0, 7])").format(last),
                sql.SQL(f"ARRAY[NULL]::{kind}[]"),
                array.format(sql.SQL("ARRAY[{}, NULL], ARRAY[{}, {}]").format(first, last, first)),
            ],
        )
    cells |= {kind: (kind, [sql.SQL(f"({query})")]) for kind, query in made.items()}
    count = max(len(given) for _, given in cells.values()) + 1  # the last row is all NULL
    columns = sql.SQL(", ").join(
        sql.SQL("{} " + kind).format(sql.Identifier(name)) for name, (kind, _) in cells.items()
    )
    with connected(pipeline.databases.source, writes=True) as source:
        rows(source, sql.SQL("CREATE TABLE public.t (id int PRIMARY KEY, {})").format(columns))
        for i in range(count):
            row = [given[i] if i < len(given) else sql.SQL("NULL") for _, given in cells.values()]
            rows(
                source, sql.SQL("INSERT INTO public.t VALUES ({}, {})").format(sql.Literal(i), sql.SQL(", ").join(row))
            )
    return list(cells)


HOSTILE_SETTINGS = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "datestyle": "'SQL, DMY'",
    "extra_float_digits": "-5",
    "intervalstyle": "iso_8601",
    "lc_monetary": "'C'",
    "quote_all_identifiers": "on",
    "search_path": "evil, public",
    "standard_conforming_strings": "off",
    "timezone": "'Asia/Kathmandu'",
    "xmlbinary": "hex",
    "xmloption": "document",
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_settings_of_roles_and_databases_do_not_leak(
    servers: Mapping[str, PostgresServer],
    make_databases: Callable[[PostgresServer, PostgresServer], Databases],
    tmp_path: Path,
    mode: Mode,
) -> None:
    databases = make_databases(servers["full"], servers["full"])
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    for dsn, side in ((databases.source, pipeline.source), (databases.target, pipeline.target)):
        name = dsn.rpartition("/")[2]
        side(*(f'ALTER DATABASE "{name}" SET {setting} = {value}' for setting, value in HOSTILE_SETTINGS.items()))
        # An unqualified name finds them before pg_catalog's, and only in evil's search path.
        side(
            "CREATE SCHEMA evil",
            "CREATE TABLE evil.pg_class ()",
            "CREATE FUNCTION evil.concat(text) RETURNS text LANGUAGE sql AS $$SELECT 'evil'$$",
        )
    values = {
        kind: VALUES[kind] for kind in ("float8", "money", "bytea", "timestamptz", "interval", "text", "regclass")
    }
    values |= XML
    pipeline.source(*ONLY_HERE)
    names = create_table_of(pipeline, values | {"date": VALUES["date"]}, made={})
    pipeline.provision()
    pipeline.copy()
    assert_same(pipeline)
    stream_changes(pipeline, names)
    pipeline.apply()
    assert_same(pipeline)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_large_values(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """One value of 64 MiB, larger than a batch, is read by a chunk, streamed, not changed by an update, and moved."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    big = "(SELECT repeat('é' || E'\\n\\t\"' || md5({}::text), 1850000))"
    pipeline.source(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        f"INSERT INTO t VALUES (1, {big.format(1)}, 0), (2, '', 0), (3, NULL, 0)",
    )
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        f"INSERT INTO t VALUES (4, {big.format(4)}, 0)", "UPDATE t SET n = 1, v = v", "UPDATE t SET id = 5 WHERE id = 1"
    )
    pipeline.apply()
    assert_same_values(pipeline, ["id"], ["id", "v", "n"], "public", "t")
    assert pipeline.source_rows("SELECT max(octet_length(v)) >= 64 << 20 FROM t") == [(True,)]
