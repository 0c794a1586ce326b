"""Chunks cover the key space of any table, and all parties agree to which chunk a key belongs.

The servers come from the system's packages, because the wheel's server has no ICU.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.chunk_ranges import choose_chunks
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record, Watermark
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import rows, scalar
from airflow_cdc_provider.engine.sources.postgres.reading import chunk_sql
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import (
    chunk_of,
    keys_condition,
    plan,
    range_condition,
    read_query,
)
from tests.sources.postgres.full_server import database, resolved

__all__ = ["database"]

NO_CONNECTION = cast(Connection, None)


@pytest.fixture
def source(database: Connection) -> Iterator[Connection]:
    """Return the module's database with an empty schema shop, on Postgres with ICU."""
    rows(database, "CREATE SCHEMA shop")
    yield database
    rows(database, "DROP SCHEMA shop CASCADE")


def bounds(planned: Sequence[Chunk]) -> list[tuple[str, ...]]:
    return [chunk.lower for chunk in planned[1:] if chunk.lower is not None]


def stored_keys(connection: Connection, table: Table, condition: sql.Composable | None = None) -> list[tuple[str, ...]]:
    """Return texts of the keys, those of all rows or of those that meet a condition."""
    texts = sql.SQL(", ").join(text_of(column) for column in table.key_columns)
    query = sql.SQL("SELECT {} FROM {} WHERE ").format(texts, sql.Identifier(table.schema, table.name))
    return rows(connection, query + (condition or sql.SQL("true")))


def arrays(keys: Sequence[tuple[str, ...]]) -> list[pa.Array]:
    return [pa.array(column, pa.large_string()) for column in zip(*keys, strict=True)]


def sizes(connection: Connection, table: Table, planned: Sequence[Chunk]) -> list[int]:
    query = sql.SQL("SELECT count(*) FROM ({}) AS chunk")
    return [int(scalar(connection, query.format(read_query(table, chunk)))) for chunk in planned]


def check_cover(connection: Connection, table: Table, planned: Sequence[Chunk]) -> None:
    """Check that every stored key is in exactly one chunk, and that the database's ``chunk_of`` agrees."""
    assert [chunk.index for chunk in planned] == list(range(len(planned)))
    assert planned[0].lower is None
    assert planned[-1].upper is None
    assert all(a.upper == b.lower is not None for a, b in itertools.pairwise(planned))
    found: dict[tuple[str, ...], int] = {}
    for chunk in planned:
        for key in stored_keys(connection, table, range_condition(table, chunk)):
            assert key not in found, f"{key} lies in chunks {found[key]} and {chunk.index}"
            found[key] = chunk.index
    keys = stored_keys(connection, table)
    assert sorted(found) == sorted(keys)
    random.Random(5).shuffle(keys)
    assert chunk_of(connection, table, bounds(planned), arrays(keys)).tolist() == [found[key] for key in keys]


LETTERS = "aAbBzZäÄåÅöÖßéE -_,\"'\\{}%0129ñчЧ"


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "integer": lambda r: str(r.randint(-(2**31), 2**31 - 1)),
    "bigint": lambda r: str(r.choice([r.randint(-50, 50), r.randint(-(2**63), 2**63 - 1)])),
    "numeric": lambda r: r.choice(
        ["NaN", "Infinity", "-Infinity", f"{r.uniform(-1e6, 1e6):.{r.randint(0, 20)}f}", "1e40"]
    ),
    "uuid": lambda r: f"{r.getrandbits(128):032x}",
    "text": lambda r: "".join(r.choices(LETTERS, k=r.randint(0, 5))),
    "timestamptz": lambda r: r.choice(
        ["infinity", "-infinity", f"{r.randint(1, 9000):04}-01-02 03:04:05.{r.randint(0, 999999):06}+02"]
    ),
    "bytea": lambda r: "\\x" + r.randbytes(r.randint(0, 4)).hex(),
    "boolean": lambda r: r.choice("tf"),
    "interval": lambda r: f"{r.randint(-50, 50)} months {r.randint(-50, 50)} days {r.randint(-9, 9)} s",
    "inet": lambda r: f"10.0.{r.randint(0, 9)}.{r.randint(0, 255)}/{r.choice([24, 32])}",
    "bit": lambda r: "".join(r.choices("01", k=10)),
    "float8": lambda r: r.choice(["NaN", "-0", "Infinity", repr(r.uniform(-1, 1)), repr(r.uniform(-1e300, 1e300))]),
    "mood": lambda r: r.choice(["sad", "ok", "Happy"]),
    "array": lambda r: "{" + ",".join(r.choices(["a", "B", "ä", '"x,y"', '"NULL"'], k=r.randint(0, 4))) + "}",
    "jsonb": lambda r: r.choice(["1", "null", '"a"', f'{{"a": {r.randint(0, 99)}}}', f"[{r.randint(0, 99)}]"]),
}


KEYS: dict[str, list[tuple[str, str]]] = {
    "bigint": [("bigint", "bigint")],
    "negative int": [("int", "integer")],
    "bigint, int": [("bigint", "integer"), ("int", "integer")],
    "skewed text, numeric": [('text COLLATE "sv-x-icu"', "boolean"), ("numeric", "numeric")],
    "uuid": [("uuid", "uuid")],
    "text C": [('text COLLATE "C"', "text")],
    "text default": [("text", "text")],
    "text en": [('text COLLATE "en-x-icu"', "text")],
    "text de": [('varchar(20) COLLATE "de-x-icu"', "text")],
    "text sv": [('text COLLATE "sv-x-icu"', "text")],
    "text nondeterministic": [("text COLLATE shop.nocase", "text")],
    "text, text": [('text COLLATE "de-x-icu"', "text"), ("text COLLATE shop.nocase", "text")],
    "citext": [("public.citext", "text")],
    "citext, bigint, citext": [("public.citext", "boolean"), ("bigint", "bigint"), ("shop.short", "text")],
    "domain with collation": [("shop.name", "text")],
    "domain under another collation": [('shop.name COLLATE "C"', "text")],
    "character(8)": [("character(8)", "text")],
    "name": [("name", "text")],
    "numeric": [("numeric", "numeric")],
    "numeric(30,2)": [("numeric(30,2)", "integer")],
    "timestamptz": [("timestamptz", "timestamptz")],
    "timestamp(3)": [("timestamp(3)", "timestamptz")],
    "bytea": [("bytea", "bytea")],
    "boolean, interval": [("boolean", "boolean"), ("interval day to second(3)", "interval")],
    "inet": [("inet", "inet")],
    "bit": [("bit(10)", "bit")],
    "float8": [("float8", "float8")],
    "enum, int": [("shop.mood", "mood"), ("int", "integer")],
    "text[]": [('text[] COLLATE "sv-x-icu"', "array")],
    "varchar(9)[], jsonb": [("varchar(9)[]", "array"), ("jsonb", "jsonb")],
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sampled"])
def test_every_key_falls_into_exactly_one_chunk(
    source: Connection, monkeypatch: pytest.MonkeyPatch, name: str, exact: bool
) -> None:
    """This covers keys that existed when the chunks were planned, and later keys."""
    rows(
        source,
        """
        CREATE COLLATION shop.nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
        CREATE DOMAIN shop.name AS text COLLATE "de-x-icu";
        CREATE DOMAIN shop.nested AS public.citext; CREATE DOMAIN shop.short AS shop.nested;
        CREATE TYPE shop.mood AS ENUM ('sad', 'ok', 'Happy');
        """,
    )
    types = KEYS[name]
    columns = ", ".join(f"k{i} {type_}" for i, (type_, _) in enumerate(types))
    names = ", ".join(f"k{i}" for i in range(len(types)))
    rows(source, f"CREATE TABLE shop.t (pad text, {columns}, PRIMARY KEY ({names}))")
    draw = random.Random(name)

    def insert(count: int) -> None:
        drawn = [[MAKERS[maker](draw) for _ in range(count)] for _, maker in types]
        values = ", ".join(f"u{i}::{type_.partition(' COLLATE')[0]}" for i, (type_, _) in enumerate(types))
        arrays = ", ".join(["%s::text[]"] * len(types))
        aliases = ", ".join(f"u{i}" for i in range(len(types)))
        query = f"INSERT INTO shop.t SELECT 'x', {values} FROM unnest({arrays}) AS u ({aliases}) ON CONFLICT DO NOTHING"
        rows(source, query, drawn)

    insert(400)
    table = resolved(source)
    if not exact:
        monkeypatch.setattr(chunk_sql, "EXACT_BYTES", 0)

    planned = plan(source, table, 30)

    count = scalar(source, "SELECT count(*) FROM shop.t")
    assert sum(sizes(source, table, planned)) == count
    if exact:
        assert sizes(source, table, planned) == [30] * (count // 30) + [count % 30] * (count % 30 > 0)
    else:
        assert abs(len(planned) - count / 30) <= 1
    check_cover(source, table, planned)
    insert(400)
    check_cover(source, table, planned)


def test_collations_decide_and_not_code_points(source: Connection) -> None:
    """Swedish sorts ä after z, German next to a: the same key belongs to different chunks."""
    found = {}
    for locale in ("de", "sv", "en"):
        rows(source, f'CREATE TABLE shop.{locale} (k text COLLATE "{locale}-x-icu" PRIMARY KEY)')
        table = resolved(source, f"shop.{locale}")
        found[locale] = chunk_of(source, table, [("b",), ("z",)], arrays([("ä",), ("B",), ("a",), ("Z",)])).tolist()

    assert found == {"de": [0, 1, 0, 2], "sv": [2, 1, 0, 2], "en": [0, 1, 0, 2]}


def test_an_empty_table_and_one_without_key_are_one_chunk(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.t (id int PRIMARY KEY); CREATE TABLE shop.keyless (id int)")
    rows(source, "ALTER TABLE shop.keyless REPLICA IDENTITY FULL; INSERT INTO shop.keyless VALUES (1), (1), (NULL)")

    for label, count in (("shop.t", 0), ("shop.keyless", 3)):
        table = resolved(source, label)
        planned = plan(source, table, 1)
        assert planned == (Chunk(label, 0, None, None),)
        assert range_condition(table, planned[0]).as_string(source) == "true"
        assert sizes(source, table, planned) == [count]


def test_chunks_of_one_row(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.t (id int PRIMARY KEY); INSERT INTO shop.t VALUES (-5), (7), (9)")
    table = resolved(source)

    planned = plan(source, table, 1)

    assert bounds(planned) == [("7",), ("9",)]
    assert [chunk.title for chunk in planned] == ["shop.t[0] .. 7", "shop.t[1] 7 .. 9", "shop.t[2] 9 .."]


def test_the_planner_does_not_believe_reltuples(source: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(
        source,
        """
        CREATE TABLE shop.t (id int PRIMARY KEY, pad text) WITH (autovacuum_enabled = false);
        INSERT INTO shop.t VALUES (1); ANALYZE shop.t; DELETE FROM shop.t;
        """,
    )
    rows(source, "INSERT INTO shop.t SELECT i, 'x' FROM generate_series(1, 20000) i")
    assert scalar(source, "SELECT reltuples FROM pg_class WHERE oid = 'shop.t'::regclass") == 1
    table = resolved(source)

    assert sizes(source, table, plan(source, table, 1000)) == [1000] * 20
    monkeypatch.setattr(chunk_sql, "EXACT_BYTES", 0)
    assert sizes(source, table, plan(source, table, 1000)) == [1000] * 20


@pytest.mark.parametrize("one_in", [1, 4], ids=["all rows of a block", "some rows of a block"])
def test_samples_cut_a_skewed_table_into_chunks_of_similar_size(
    source: Connection, monkeypatch: pytest.MonkeyPatch, one_in: int
) -> None:
    """Half of the rows have neighboring keys, the others are spread over the whole space."""
    rows(
        source,
        """
        CREATE TABLE shop.t (id bigint, pad text DEFAULT repeat('x', 300), PRIMARY KEY (id)) PARTITION BY RANGE (id);
        CREATE TABLE shop.t1 PARTITION OF shop.t FOR VALUES FROM (MINVALUE) TO (100000);
        CREATE TABLE shop.t2 PARTITION OF shop.t DEFAULT;
        INSERT INTO shop.t SELECT i FROM generate_series(1, 30000) i;
        INSERT INTO shop.t SELECT 1000003::bigint * i * i FROM generate_series(1, 30000) i;
        """,
    )
    table = resolved(source, where="id % 3 <> 0 AND id <> 25")
    count = scalar(source, "SELECT count(*) FROM shop.t WHERE id % 3 <> 0 AND id <> 25")
    monkeypatch.setattr(chunk_sql, "EXACT_BYTES", 1 << 20)
    monkeypatch.setattr(chunk_sql, "PROBED_BLOCKS", 60)
    sample_rows = 30 * count / 4000 * 15
    monkeypatch.setattr(chunk_sql, "SAMPLED_ROWS", sample_rows / one_in if one_in > 1 else 300_000)

    planned = plan(source, table, 4000)

    found = sizes(source, table, planned)
    assert sum(found) == count
    assert abs(len(planned) - count / 4000) <= 3
    assert max(found) < 3 * 4000
    check_cover(source, table, planned)


def test_rules_and_odd_names(source: Connection) -> None:
    rows(
        source,
        """
        CREATE TABLE shop."We ird%s" ("position" int, "k0" text, "a""b%s" bool, PRIMARY KEY ("k0", "position"));
        INSERT INTO shop."We ird%s" SELECT i, 'x''\\' || i % 7, i % 2 = 0 FROM generate_series(1, 200) i;
        CREATE TABLE shop.child () INHERITS (shop."We ird%s");
        INSERT INTO shop.child VALUES (1, 'child', true);
        """,
    )
    table = resolved(source, "shop.We ird%s", where='"position" % 2 = 0 -- half {of} them %s')

    planned = plan(source, table, 10)

    assert sizes(source, table, planned) == [10] * 10
    assert rows(source, read_query(table, planned[-1]))[0][2] == "t"
    assert len(rows(source, read_query(table, None))) == 100
    everything = resolved(source, "shop.We ird%s")
    with_all = plan(source, everything, 10)
    assert sum(sizes(source, everything, with_all)) == 200


def test_a_partitioned_table_without_partitions_reads_as_empty(source: Connection) -> None:
    rows(source, 'CREATE TABLE shop.t (id int PRIMARY KEY, "x y" text) PARTITION BY LIST (id)')
    table = resolved(source)

    assert plan(source, table, 5) == (Chunk("shop.t", 0, None, None),)
    with source.cursor() as cursor:
        cursor.execute(read_query(table, None))
        assert [column.name for column in cursor.description or ()] == ["id", "x y"]
        assert cursor.fetchall() == []


def test_a_key_that_outgrew_the_planned_type_is_not_cut(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.t (k varchar(3) PRIMARY KEY); CREATE TABLE shop.b (k bit(3) PRIMARY KEY)")
    text, bit = resolved(source), resolved(source, "shop.b")

    assert chunk_of(source, text, [("abcd",)], arrays([("abcc",), ("abcd",), ("abce",)])).tolist() == [0, 1, 1]
    assert chunk_of(source, bit, [("101",)], arrays([("100",), ("111",)])).tolist() == [0, 1]


def test_a_key_whose_domain_has_become_stricter(source: Connection) -> None:
    """Its keys are unchanged, and so are the bounds of the chunks."""
    rows(
        source,
        'CREATE DOMAIN shop.base AS text COLLATE "C"; CREATE DOMAIN shop.d AS shop.base;'
        " CREATE TABLE shop.t (k shop.d PRIMARY KEY); INSERT INTO shop.t VALUES ('a'), ('B'), ('c')",
    )
    table = resolved(source)
    planned = plan(source, table, 1)
    assert bounds(planned) == [("a",), ("c",)]
    rows(source, "ALTER DOMAIN shop.d ADD CHECK (VALUE > 'x') NOT VALID")
    check_cover(source, table, planned)
    assert stored_keys(source, table, keys_condition(table, [("B",), ("b",)])) == [("B",)]


def test_operators_in_a_schema_with_braces(source: Connection) -> None:
    rows(
        source,
        """
        CREATE SCHEMA "we{ird}"; ALTER EXTENSION citext SET SCHEMA "we{ird}";
        CREATE TABLE shop.t (i int, k "we{ird}".citext, PRIMARY KEY (k, i));
        INSERT INTO shop.t VALUES (1, 'a'), (1, 'B'), (2, 'b'), (1, 'c')
        """,
    )
    try:
        table = resolved(source)
        check_cover(source, table, plan(source, table, 1))
        assert stored_keys(source, table, keys_condition(table, [("A", "1"), ("A", "2")])) == [("a", "1")]
    finally:
        rows(source, 'ALTER EXTENSION citext SET SCHEMA public; DROP SCHEMA "we{ird}"')


def test_integers_and_single_chunks_do_not_ask_the_database() -> None:
    key = Column("id", "bigint", 20, None, True, True)
    table = Table(1, "shop", "t", (key,), ("id",), "d", None, (), "r")
    random_ = np.random.default_rng(3)
    lowers = np.unique(random_.integers(-(2**62), 2**62, 50))
    values: npt.NDArray[np.int64] = np.concatenate([random_.integers(-(2**62), 2**62, 500), lowers, lowers - 1])

    found = chunk_of(NO_CONNECTION, table, [(str(x),) for x in lowers], arrays([(str(x),) for x in values]))

    assert found.tolist() == [int((lowers <= value).sum()) for value in values]
    assert found.dtype == np.int64
    texts = Table(1, "shop", "t", (Column("k", "text", 25, None, True, True),), ("k",), "d", None, (), "r")
    assert chunk_of(NO_CONNECTION, texts, [], arrays([("a",), ("b",)])).tolist() == [0, 0]
    assert chunk_of(NO_CONNECTION, texts, [("x",)], [pa.array([], pa.large_string())]).tolist() == []


def test_chunks_as_json_and_titles() -> None:
    chunk = Chunk("shop.t", 3, ("1", string.ascii_letters * 2), None)

    assert Chunk.from_dict(chunk.to_dict()) == chunk
    assert chunk.title.startswith("shop.t[3] (1, abc")
    assert chunk.title.endswith("… ..")
    assert Chunk("shop.t", 0, None, None).title == "shop.t[0] all rows"


def test_chunks_are_chosen_by_ranges_unless_they_are_finished() -> None:
    finished = Watermark(Snapshot.parse("10:10:"), 1)
    planned = [
        ChunkRecord(Chunk(table, i, None, None), finished if i == 2 else None)
        for table in ("a.a", "a.b")
        for i in range(5)
    ]
    record = Record(1, 0, 0.0, {}, (), tuple(planned))

    def chosen(*ranges: tuple[str, int, int]) -> list[tuple[str, int]]:
        return [(c.table, c.index) for c in choose_chunks(record, ranges)]

    assert len(choose_chunks(record)) == 8
    assert chosen(("a.b", 1, 3)) == [("a.b", 1), ("a.b", 3)]
    assert chosen(("a.a", 4, 9), ("a.a", 0, 0), ("gone", 0, 9)) == [("a.a", 0), ("a.a", 4)]
    assert chosen() == []
