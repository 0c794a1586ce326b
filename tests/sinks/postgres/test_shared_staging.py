"""Few changes of each of many tables: staged in one relation they yield the same rows as staged separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import StagingLost, ValueRefused
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.array_text import array_text
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sinks.postgres import shared_staging as postgres_gathered
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import element_types
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.sinks.begun_sink import IDENTITY, Begun
from tests.support.postgres_store import PostgresStore

TYPES = """
CREATE TYPE public.mood AS ENUM ('so so', 'NULL', '"quoted", well');
CREATE TYPE public.pair AS (a int, b text);
CREATE DOMAIN public.positive AS int NOT NULL CHECK (VALUE > 0);
"""
WEIRD = ["", "NULL", "null", 'a "quoted" one', "back\\slash", "{curly, comma}", "line\nend\ttab", "ünïcode", " spaced "]
GATHERED: Mapping[str, Sequence[str]] = {
    "text": WEIRD,
    'text COLLATE "C"': WEIRD,
    "varchar(3)": ["abc", "a    ", ""],
    "char(3)": ["a", "abc", "abc  "],
    "char": ["x"],
    '"char"': ["x", ""],
    "name": WEIRD,
    "bit(3)": ["101"],
    "varbit": ["10", ""],
    "numeric(5, 1)": ["1.25", "-0.05", "NaN"],
    "numeric": ["1.000", "Infinity", "123456789012345678901234567890.5"],
    "double precision": ["-0", "1e-300", "NaN"],
    "bytea": ["\\x00ff22", "\\x"],
    "boolean": ["t", "f"],
    "date": ["2024-02-29", "infinity", "0044-03-15 BC"],
    "timestamp(0)": ["2024-01-01 00:00:00.6"],
    "timestamptz": ["2024-01-01 00:00:00.123456+00", "-infinity"],
    "interval": ["1 year -2 days 03:04:05.6"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"a":  [1, "x\\"y"]}'],
    "jsonb": ['{"a": [1, "x\\"y"]}'],
    "int4range": ["[1,5)", "empty"],
    "datemultirange": ["{[2024-01-01,2024-02-01)}"],
    "point": ["(1,2)"],
    "inet": ["::1/128"],
    "tsvector": ["'a':1 'b c':2"],
    "public.mood": ["so so", "NULL", '"quoted", well'],
}
ALONE: Mapping[str, Sequence[str]] = {
    "int[]": ["{1,NULL,3}", "{{1,2},{3,4}}", "{}"],
    "text[]": ['{"a \\"b\\"",NULL}'],
    "box": ["(2,2),(1,1)"],
    "public.pair": ['(1,"x, y")'],
    "public.positive": ["1"],
}
KINDS = [*GATHERED, *ALONE]


@pytest.fixture
def begun(databases: Databases) -> Begun:
    """Return a pipeline with an empty table for each kind of values."""
    for dsn in (databases.source, databases.target):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TYPES)
    with psycopg.connect(databases.source, autocommit=True) as connection:
        for n, kind in enumerate(KINDS):
            key = ("int", "numeric")[n % 2]  # equal values of which have one text, or several
            connection.execute(f"CREATE TABLE public.k{n} (id {key} PRIMARY KEY, v {kind})".encode())
    with connected(databases.source) as source:
        tables = resolve(source, tuple(TableRule(f"public.k{n}") for n in range(len(KINDS))))
    targets = [Target(table, "copy", table.name) for table in tables]
    sink = PostgresSink(databases.target, "p", "mirror")
    sink.prepare(targets, [Chunk(target.table.label, 0, None, None) for target in targets], IDENTITY, 100)
    return Begun(PostgresStore(databases.target), sink, sink.take_epoch("test"))


def effect(n: int, *rows: tuple[str, str | None, bool]) -> Effect:
    """Return the rows of a table: key, value, and whether the row is deleted."""
    ids, values, erased = zip(*rows, strict=True)
    columns = {"c0": pa.array(ids, pa.large_string()), "c1": pa.array(values, pa.large_string())}
    return Effect(f"public.k{n}", False, pa.table({"erased": pa.array(erased, pa.bool_())} | columns))


def changes(n: int, kind: str) -> Effect:
    """Return all values of a kind, and a row that existed and is deleted."""
    values = [*(GATHERED | ALONE)[kind], None] if kind != "public.positive" else ALONE[kind]
    return effect(n, *((str(i), value, False) for i, value in enumerate(values, 1)), ("0", None, True))


def contents(begun: Begun) -> dict[str, list[str]]:
    return {
        kind: [row["r"] for row in begun.store.query(f"SELECT t::text AS r FROM copy.k{n} t ORDER BY id")]  # type: ignore[attr-defined]
        for n, kind in enumerate(KINDS)
    }


def stage_and_commit(begun: Begun) -> tuple[Staged, ...]:
    """Stage and commit two units: the second removes a row of the first, and writes all values next to it."""
    first = [effect(n, ("0", (GATHERED | ALONE)[kind][0], False)) for n, kind in enumerate(KINDS)]
    begun.unit(100, 150, *first)
    piece = begun.piece(*(changes(n, kind) for n, kind in enumerate(KINDS)))
    begun.sink.commit(begun.epoch, 150, 200, [piece])
    return piece.tables


def test_what_is_gathered_is_as_what_is_staged_alone(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = stage_and_commit(begun)
    assert {kind for kind, staged in zip(KINDS, gathered, strict=True) if staged.share} == GATHERED.keys()
    assert len({staged.relation for staged in gathered}) == 1 + len(ALONE)
    found = contents(begun)
    assert begun.store.staged() == 0
    for n in range(len(KINDS)):
        begun.store.query(f"DELETE FROM copy.k{n}")  # type: ignore[attr-defined]
    begun.store.query("UPDATE airflow_cdc.pipelines SET applied_lsn = '0/64'")  # type: ignore[attr-defined]
    monkeypatch.setattr(postgres_gathered, "is_small", lambda rows: False)
    assert not any(staged.share for staged in stage_and_commit(begun))
    assert found == contents(begun)
    counts = {kind: len((GATHERED | ALONE)[kind]) + (kind != "public.positive") for kind in KINDS}
    assert {kind: len(rows) for kind, rows in found.items()} == counts


def test_a_change_of_one_table_is_staged_alone(begun: Begun) -> None:
    (staged,) = begun.piece(effect(0, ("1", "a", False))).tables
    assert staged.share is None


def test_what_is_much_is_staged_alone(begun: Begun) -> None:
    many = [(str(n), "a", False) for n in range(1000)]
    staged = begun.piece(
        effect(0, *many), effect(1, ("1", "a" * 300_000, False)), *(effect(n, ("1", "a", False)) for n in (2, 3))
    ).tables
    assert [each.share is not None for each in staged] == [False, False, True, True]


@pytest.mark.parametrize(("kind", "value"), [("varchar(3)", "abcd"), ("bit(3)", "1"), ("public.mood", "none")])
def test_a_value_that_the_target_refuses_is_an_error(begun: Begun, kind: str, value: str) -> None:
    n = KINDS.index(kind)
    with pytest.raises(
        ValueRefused, match=rf"column 'v' of the target table copy\.k{n} cannot hold a value of public\.k{n}"
    ):
        begun.unit(100, 200, effect(0, ("1", "a", False)), effect(n, ("1", value, False)))
    assert begun.record.applied == 100
    assert contents(begun)["text"] == []


def test_what_the_server_cannot_read_is_told_of_its_table(begun: Begun) -> None:
    """Bytes may be invalid UTF-8, such as a "char" of an old server."""
    n = KINDS.index('"char"')
    values = pa.array([b"\xe4"], pa.large_binary()).view(pa.large_string())
    broken = pa.table({"erased": pa.array([False]), "c0": pa.array(["1"], pa.large_string()), "c1": values})
    with pytest.raises(ValueRefused, match=rf"the target table copy\.k{n} cannot hold"):
        begun.piece(effect(0, ("1", "a", False)), effect(1, ("1", "a", False)), Effect(f"public.k{n}", False, broken))
    assert begun.store.staged() == 0


@pytest.mark.parametrize(("kind", "key"), [("numeric(20, 4)", "1.0000"), ("char(5)", "1    "), ("varchar(5)", "1")])
def test_a_row_is_found_by_a_key_that_the_target_writes_otherwise(begun: Begun, kind: str, key: str) -> None:
    begun.store.query(f"ALTER TABLE copy.k0 ALTER COLUMN id TYPE {kind} USING id::text::{kind}")
    put = [effect(n, ("1", "a", False), ("2", "b", False)) for n in range(3)]
    begun.unit(100, 150, *put)
    piece = begun.piece(*(effect(n, ("1", None, True), ("2", "c", False)) for n in range(3)))
    begun.sink.commit(begun.epoch, 150, 200, [piece])
    assert begun.store.query("SELECT id::text AS id, v FROM copy.k1") == [{"id": "2", "v": "c"}]
    assert begun.store.query("SELECT format('%s', id) AS id, v FROM copy.k0") == [
        {"id": key.replace("1", "2"), "v": "c"}
    ]
    assert [staged.share is not None for staged in piece.tables] == [kind == "varchar(5)", True, True]


def test_a_table_is_emptied_before_its_few_rows(begun: Begun) -> None:
    begun.unit(100, 150, *(effect(n, ("1", "a", False)) for n in range(3)))
    truncated = Effect("public.k0", True, effect(0, ("2", "b", False)).rows)
    pieces = [
        begun.piece(truncated, effect(1, ("1", "c", False)), index=0),
        begun.piece(effect(0, ("3", "d", False)), effect(2, ("1", None, True)), index=1),
    ]
    assert all(staged.share for piece in pieces for staged in piece.tables)
    begun.sink.commit(begun.epoch, 150, 200, pieces)
    found = contents(begun)
    assert [found[kind] for kind in KINDS[:3]] == [["(2,b)", "(3,d)"], ["(1,c)"], []]


def test_types_that_the_role_may_not_name_are_staged_alone(begun: Begun, databases: Databases) -> None:
    begun.store.query("CREATE SCHEMA hidden; CREATE TYPE hidden.mood AS ENUM ('a')")
    begun.store.query("ALTER SCHEMA hidden OWNER TO CURRENT_USER")
    begun.store.query("ALTER TABLE copy.k0 ALTER COLUMN v TYPE hidden.mood USING v::hidden.mood")
    targets = [target for target in begun.record.targets if target.table.label in ("public.k0", "public.k1")]
    found = []
    for dsn in (databases.target, databases.pipeline_target):
        with connected(dsn) as connection:
            found.append(element_types(connection, targets).keys())
    assert found == [{"public.k0", "public.k1"}, {"public.k1"}]


def test_what_a_crash_has_emptied_is_noticed(begun: Begun) -> None:
    piece = begun.piece(*(effect(n, ("1", "a", False)) for n in range(3)))
    begun.store.damage(piece.tables[0])
    with pytest.raises(StagingLost, match="3 rows were staged for 3 tables, but 0 were found"):
        begun.sink.commit(begun.epoch, 100, 200, [piece])


@given(
    values=st.lists(
        st.none() | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), max_size=5
    )
)
def test_the_server_reads_an_array_as_it_was(target_server: PostgresServer, values: list[str | None]) -> None:
    column = pa.chunked_array([pa.array(values, pa.large_string())])
    with psycopg.connect(target_server.dsn("postgres")) as connection:
        row = connection.execute("SELECT %s::text[]", [array_text(column).decode()]).fetchone()
    assert row == (values,)
