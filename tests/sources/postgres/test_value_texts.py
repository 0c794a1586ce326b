"""The texts of values that the reads of chunks select are those of the types' output functions."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.postgres.connection import connect, rows
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import (
    read_query,
)
from local_servers.postgres import PostgresServer
from tests.sources.postgres.full_server import database, resolved

__all__ = ["database"]

# One value, or several if they matter, of every built-in type that a column can have.
VALUES = {
    "aclitem": ["postgres=r/postgres"],
    "bit": ["101"],
    "bool": ["t", "f"],
    "box": ["(1,2),(0,0)"],
    "bpchar": ["ab  ", ""],
    "bytea": ["\\xdeadbeef", ""],
    "char": ["a", "\\200", ""],
    "cid": ["7"],
    "cidr": ["10.0.0.0/8", "::/0"],
    "circle": ["<(0,0),1.5>"],
    "date": ["2024-02-29", "infinity", "0044-03-15 BC"],
    "datemultirange": ["{[2024-01-01,2024-02-01)}"],
    "daterange": ["[2024-01-01,)"],
    "float4": ["0.1", "NaN", "1e-40"],
    "float8": ["0.30000000000000004", "-0", "-Infinity"],
    "gtsvector": [],
    "inet": ["10.0.0.1", "10.0.0.1/32", "10.0.0.0/8", "::1"],
    "int2": ["-32768"],
    "int4": ["2147483647"],
    "int4multirange": ["{[1,2),[5,9)}"],
    "int4range": ["[1,5)", "empty"],
    "int8": ["-9223372036854775808"],
    "int8multirange": ["{}"],
    "int8range": ["(,5)"],
    "interval": ["1 year 2 mons -3 days 04:05:06.7", "-00:00:01"],
    "json": ['{"a" :  1}'],
    "jsonb": ['{"b": 1, "a": "\\u00e4"}'],
    "jsonpath": ["$.a[*]"],
    "line": ["{1,-1,0.5}"],
    "lseg": ["[(0,0),(1,1)]"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "money": ["-1234.56"],
    "name": ["we ird"],
    "numeric": ["1.10", "NaN", "1e30"],
    "nummultirange": ["{[1.5,2)}"],
    "numrange": ["[1.50,2]"],
    "oid": ["4294967295"],
    "path": ["((0,0),(1,1))", "[(0,0),(1,1)]"],
    "pg_brin_bloom_summary": [],
    "pg_brin_minmax_multi_summary": [],
    "pg_dependencies": [],
    "pg_lsn": ["16/B374D848"],
    "pg_mcv_list": [],
    "pg_ndistinct": [],
    "pg_node_tree": [],
    "pg_snapshot": ["10:20:10,14"],
    "point": ["(1.1,2)"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "refcursor": ["c 1"],
    "regclass": ["pg_class", "pg_type"],
    "regcollation": ['"C"'],
    "regconfig": ["english"],
    "regdatabase": ["postgres"],
    "regdictionary": ["simple"],
    "regnamespace": ["pg_catalog"],
    "regoper": ["||/"],
    "regoperator": ["+(integer,integer)"],
    "regproc": ["now"],
    "regprocedure": ["abs(integer)"],
    "regrole": ["postgres"],
    "regtype": ["integer"],
    "text": ["a\\b\n\"'ä %s", ""],
    "tid": ["(1,2)"],
    "time": ["24:00:00", "01:02:03.000004"],
    "timestamp": ["2024-01-02 03:04:05.6", "-infinity"],
    "timestamptz": ["2024-01-02 03:04:05.6+02"],
    "timetz": ["01:02:03+02"],
    "tsmultirange": ['{["2024-01-01 00:00:00","2024-01-02 00:00:00")}'],
    "tsquery": ["'a' & !'b'"],
    "tsrange": ['["2024-01-01 00:00:00",)'],
    "tstzmultirange": ['{["2024-01-01 00:00:00+00",)}'],
    "tstzrange": ['["2024-01-01 00:00:00+00",)'],
    "tsvector": ["'a':1A 'b'"],
    "txid_snapshot": ["10:20:"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "varbit": ["10101", ""],
    "varchar": ["ab  "],
    "xid": ["7"],
    "xid8": ["18446744073709551615"],
    "xml": ['<?xml version="1.0" encoding="UTF-8"?><a/>', "<b/>"],
}


def output(connection: Connection, table: str) -> list[list[str | None]]:
    """Return all rows as COPY writes them: with the types' output functions, like pgoutput."""
    with connection.cursor() as cursor:
        text = io.StringIO()
        cursor.copy_expert(f"COPY {table} TO STDOUT (FORMAT csv, FORCE_QUOTE *, NULL '<null>')", text)
    # csv cannot distinguish a quoted <null> from a bare one, and no value is one.
    return [[None if value == "<null>" else value for value in row] for row in csv.reader(io.StringIO(text.getvalue()))]


@pytest.mark.lengthy
@pytest.mark.parametrize("edition", ["system", "18"])
def test_texts_are_those_of_the_output_functions(database: Connection, server_directory: Path, edition: str) -> None:
    """This covers every built-in type, its arrays, domains over it, and user-defined types."""
    if edition == "system":
        check_texts(database)
        return
    with PostgresServer.create(server_directory / "texts", edition, {"fsync": "off"}) as server:
        connection = connect(server.dsn(), writes=True)
        check_texts(connection)
        connection.close()


def check_texts(connection: Connection) -> None:
    types = rows(
        connection,
        "SELECT typname, typarray <> 0 FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace"
        " AND typtype IN ('b', 'r', 'm') AND typcategory <> 'A' AND oid < 16384",
    )
    assert {name for name, _ in types} <= set(VALUES), "a built-in type has no values here"
    has_xml = not connection.info.server_version >= 180000
    rows(connection, "CREATE SCHEMA texts")
    columns, values = [], []
    for name, _ in types:
        if not VALUES[name] or (name == "xml" and not has_xml):
            continue
        rows(connection, f'CREATE DOMAIN texts."{name}" AS pg_catalog."{name}"')
        for type_ in (f'pg_catalog."{name}"', f'texts."{name}"'):
            columns += [type_, f"{type_}[]"]
            values += [VALUES[name][0], [*VALUES[name], None]]
    rows(
        connection,
        "CREATE TYPE texts.pair AS (a int, b text, c character(3)); CREATE TYPE texts.mood AS ENUM ('sad');"
        "CREATE CAST (texts.pair AS text) WITH INOUT; CREATE DOMAIN texts.flag AS texts.mood",
    )
    columns += [
        "texts.pair",
        "texts.pair",
        "texts.mood",
        "texts.flag[]",
        "pg_catalog.numeric(8,3)",
        'pg_catalog."char"',
    ]
    values += ['(,"x y",)', "(,,)", "sad", ["sad"], "1.5", "\\200"]
    definition = ", ".join(f"c{i} {type_}" for i, type_ in enumerate(columns))
    rows(connection, f"CREATE TABLE texts.t ({definition}); ALTER TABLE texts.t REPLICA IDENTITY FULL")
    placeholders = ", ".join(f"%s::text{'[]' * isinstance(v, list)}::{t}" for v, t in zip(values, columns, strict=True))
    rows(connection, f"INSERT INTO texts.t SELECT {placeholders}", values)
    rows(connection, "INSERT INTO texts.t DEFAULT VALUES")
    more = [
        (i, v)
        for i, t in enumerate(columns)
        if not t.endswith("[]")
        for v in VALUES.get(t.split('"')[1] if '"' in t else "", [])[1:]
    ]
    for i, value in more:
        rows(connection, f"INSERT INTO texts.t (c{i}) SELECT %s::text::{columns[i]}", [value])

    table = resolved(connection, "texts.t")
    texts = rows(connection, read_query(table, None))
    expected = output(connection, "texts.t")

    assert len(texts) == len(more) + 2
    for got, wanted in zip(texts, expected, strict=True):
        for column, text, output_text in zip(table.columns, got, wanted, strict=True):
            assert text == output_text, column
    rows(connection, "DROP SCHEMA texts CASCADE")
