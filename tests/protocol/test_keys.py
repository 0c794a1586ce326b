"""Keys whose text, order or equality differs from that of plain strings, through snapshot and stream.

Postgres decides which keys are equal: ``citext`` and nondeterministic collations fold case, ``numeric`` has 1.0 and
1.00, ``float8`` has 0 and -0. The servers come from the system's packages, because the wheel's server has neither ICU
nor extensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sinks.postgres.key_equality import TargetKey
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import range_condition
from local_servers.postgres import PostgresServer
from tests.conftest import SESSION_SETTINGS, Databases, create_database, create_roles, drop_database
from tests.sinks.begun_sink import TABLE
from tests.support.changelogs import assert_same_values
from tests.support.databases import execute, transaction
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"
EXTENSIONS = ("citext", "hstore", "ltree")

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(server_directory: Path, system_binaries: Path) -> Iterator[PostgresServer]:
    """Run a full Postgres, which is source and target."""
    directory = server_directory / "keys"
    with PostgresServer.create(directory, settings=SESSION_SETTINGS, binaries=system_binaries) as started:
        create_roles(started)
        yield started


Make = Callable[..., PipelineUnderTest]


@pytest.fixture
def make_pipeline(server: PostgresServer, tmp_path: Path) -> Iterator[Make]:
    """Return a factory of pipelines whose databases have extensions in different schemas, and collations."""
    pairs: list[tuple[str, str]] = []

    def make(extensions: str = "public", mode: str = "mirror") -> PipelineUnderTest:
        number = next(_numbers)
        names = (f"keys_source_{number}", f"keys_target_{number}")
        pairs.append(names)
        for name, schema in zip(names, ("public", extensions), strict=True):
            create_database(server, name)
            create = [f"CREATE EXTENSION {extension} SCHEMA {schema}" for extension in EXTENSIONS]
            execute(
                server.dsn(name),
                f"CREATE SCHEMA IF NOT EXISTS {schema}",
                "CREATE SCHEMA shop",
                *create,
                "CREATE COLLATION public.nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
                "CREATE TYPE public.mood AS ENUM ('c', 'b', 'a', 'd', 'h', 'f', 'g', 'e')",
                "CREATE DOMAIN public.price AS numeric CHECK (VALUE IS NOT NULL)",
            )
        databases = Databases(server.dsn(names[0]), server.dsn(names[1]))
        sections = {"sink": {"mode": mode}, "snapshot": {"chunk_rows": 2, "parallelism": 1}}
        return PipelineUnderTest(tmp_path, databases, ["shop.*"], **sections)

    yield make
    for pair in pairs:
        for name in pair:
            drop_database(server, name)


@dataclass(frozen=True)
class Kind:
    """A kind of key.

    :param type: the column's type.
    :param values: texts of eight keys, all different.
    :param spelt: another text that the database considers equal to the first one, if there is one.
    """

    type: str
    values: Sequence[str]
    spelt: str | None = None


# They sort differently in each of these collations, and by code points.
NAMES = ["z", "Ä", "a", "Z", "ö", "å", "ß", "\U0001f600"]
KINDS: dict[str, Kind] = {
    "a citext": Kind("public.citext", ["Straße", "b", "C", "d", "é", "_", "Z", ""], "straße"),
    "nocase": Kind("text COLLATE public.nocase", ["Ä", "b", "C", "d", "é", "_", "Z", ""], "ä"),
    "numeric": Kind("numeric", ["1.0", "NaN", "-3", "Infinity", "1e-20", "1e40", "2", "-Infinity"], "1.000"),
    "price": Kind("public.price", ["1.0", "NaN", "-3", "17", "1e-20", "1e40", "2", "3"], "1.000"),
    "float8": Kind("float8", ["0", "NaN", "-Infinity", "1e-300", "0.1", "5", "6", "7"], "-0"),
    "interval": Kind("interval", ["1 mon", "1 day", "-1 year", "1 s", "5 days", "6 days", "7 days", "9 h"], "30 days"),
    "bpchar": Kind("bpchar", ["a", "B", "c", "D", "ä", "z", "", "zz"], "a  "),
    "character": Kind("character(4)", ["a", "B", "c", "D", "ä", "z", "", "zz"]),
    "jsonb": Kind("jsonb", ['{"a": 1}', "null", "[]", "2", '"x"', "true", "{}", "[[]]"], '{"a": 1.0}'),
    "numbers": Kind("numeric[]", ["{1,2}", "{}", "{NULL}", "{3}", "{4}", "{5}", "{6}", "{7}"], "{1.0,2}"),
    "a hstore": Kind("public.hstore", ["a=>1", "b=>2", '"a b"=>NULL', "c=>3", "d=>4", "e=>5", "", "f=>6"]),
    "a ltree": Kind("public.ltree", ["a.b", "A.b", "a", "b", "c", "d.e", "", "f"]),
    "timestamptz": Kind(
        "timestamptz",
        [
            "2024-01-02 03:04:05.6+02",
            "infinity",
            "-infinity",
            "0044-03-15 BC",
            "2020-01-01",
            "1-1-2021",
            "1-1-2022",
            "now",
        ],
    ),
    "uuid": Kind("uuid", [f"{n:032x}" for n in (1, 9 << 124, 8 << 124, 255, 254, 253, 252, 251)]),
    "bytea": Kind("bytea", ["\\x", "\\x00", "\\xff", "\\x5c22", "\\x0a", "\\x7f", "\\x80", "\\x27"]),
    "a mood": Kind("public.mood", list("hgfedcba")),
    "bits": Kind("bit(3)", [f"{n:03b}" for n in range(8)]),
    "en": Kind('text COLLATE "en-x-icu"', NAMES),
    "de": Kind('varchar(9) COLLATE "de-x-icu"', NAMES),
    "sv": Kind('text COLLATE "sv-x-icu"', NAMES),
    "C": Kind('text COLLATE "C"', NAMES),
}
# Changes of {t}: keys v0 … v7, where s is another text for v0. Each group is one transaction.
OPEN_DURING_SNAPSHOT = """
    INSERT INTO {t} VALUES ({v4}, 4, {big}); UPDATE {t} SET n = n + 10 WHERE n = 1; UPDATE {t} SET k = {s} WHERE n = 0;
"""
BETWEEN_CHUNKS = """
    INSERT INTO {t} VALUES ({v5}, 5, {big}); DELETE FROM {t} WHERE n = 2; UPDATE {t} SET k = {v6} WHERE n = 3;
    UPDATE {t} SET k = {v0}, n = 20 WHERE n = 0;
"""
UNITS = [
    """
    UPDATE {t} SET k = {s} WHERE n = 20; UPDATE {t} SET n = n + 100; UPDATE {t} SET k = {v0} WHERE n = 120;
    DELETE FROM {t} WHERE n = 120; INSERT INTO {t} VALUES ({s}, 120, {big}); UPDATE {t} SET k = {v0} WHERE n = 120;
    """,
    "UPDATE {t} SET k = {s} WHERE n = 120; UPDATE {t} SET n = n + 1000",
    """
    DELETE FROM {t} WHERE n = 1120; INSERT INTO {t} VALUES ({v0}, 1120, {big});
    UPDATE {t} SET k = {v7} WHERE n = 1120; UPDATE {t} SET k = {s} WHERE n = 1120;
    """,
    "DELETE FROM {t} WHERE n = 1120; DELETE FROM {t} WHERE n = 1104",
]


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def table_of(name: str) -> str:
    return f'shop."{name}"'


def statements(script: str, names: Iterable[str] = KINDS) -> str:
    """Return the statements of a script for the tables of some kinds of key."""
    return "".join(
        script.format(
            t=table_of(name),
            big=BIG.format("0"),
            s=literal(KINDS[name].spelt or KINDS[name].values[0]),
            **{f"v{n}": literal(value) for n, value in enumerate(KINDS[name].values)},
        )
        + ";"
        for name in names
    )


def assert_equal(pipeline: PipelineUnderTest, names: Iterable[str] = KINDS) -> None:
    if pipeline.pipeline.sink.mode == "changelog":
        for name in names:
            # The large value of a row that moved out of a chunk read later was never sent.
            assert_same_values(pipeline, ["k"], ["k", "n", "big"], "shop", name, may_lack=["big"])
        pipeline.assert_verified()
        return
    contents = " UNION ALL ".join(
        f"SELECT {literal(name)}, format('%s', k), n, md5(big) FROM {table_of(name)}" for name in names
    )
    query = f'SELECT * FROM ({contents}) AS rows (name, k, n, big) ORDER BY name, k COLLATE "C"'
    assert pipeline.target_rows(query) == pipeline.source_rows(query)
    pipeline.assert_verified()


def create_tables(pipeline: PipelineUnderTest, names: Iterable[str] = KINDS) -> None:
    """Create tables of four rows, with n from 0 to 3, and with values large enough to be left out of updates."""
    made: list[str] = []
    for name in names:
        rows = ", ".join(f"({literal(v)}, {n}, {BIG.format(n)})" for n, v in enumerate(KINDS[name].values[:4]))
        made += (
            f"CREATE TABLE {table_of(name)} (k {KINDS[name].type} PRIMARY KEY, n int, big text)",
            f"INSERT INTO {table_of(name)} VALUES {rows}",
        )
    pipeline.source(*made)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_every_kind_of_key_through_snapshot_and_stream(make_pipeline: Make, mode: str) -> None:
    """There are chunks with changes before, between and after them, and units that spell a key in several ways."""
    pipeline = make_pipeline(mode=mode)
    create_tables(pipeline)
    pipeline.provision()
    with transaction(pipeline.databases.source, statements(OPEN_DURING_SNAPSHOT)) as during:
        pipeline.copy_tables(0)
        during.commit()
        pipeline.source(statements(BETWEEN_CHUNKS))
    pipeline.copy_tables(1)
    for unit in UNITS[:2]:
        pipeline.source(statements(unit))
    pipeline.apply()
    assert_equal(pipeline)
    for unit in UNITS[2:]:
        pipeline.source(statements(unit))
        pipeline.apply()
    assert_equal(pipeline)


COARSE = ["a citext", "nocase", "numeric", "price"]


@pytest.mark.parametrize("extensions", ["public", "other"])
def test_rows_read_again_under_another_spelling(make_pipeline: Make, extensions: str) -> None:
    """The stream brings spellings from before the re-read, which neither side's condition has matched.

    With the extension in another schema of the target, its column is text, for which the spellings are two keys.
    """
    pipeline = make_pipeline(extensions)
    pipeline.change(stream={"max_batch_bytes": "1MiB"})
    create_tables(pipeline, COARSE)
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    pipeline.source(
        statements("UPDATE {t} SET k = {s} WHERE n = 0", COARSE),
        statements("UPDATE {t} SET k = {v0}, n = 7, big = 'x' WHERE n = 0", COARSE),
        # A unit ends here, so that the sink holds the intermediate spelling.
        f"INSERT INTO {table_of(COARSE[0])} SELECT {literal(KINDS[COARSE[0]].values[5])}, 5,"
        " string_agg(md5(i::text), '') FROM generate_series(1, 50000) i",
        statements("UPDATE {t} SET k = {s}, n = 8 WHERE n = 7", COARSE),
        statements("INSERT INTO {t} VALUES ({v4}, 4, {big}); DELETE FROM {t} WHERE n = 4", COARSE),
    )
    for name in COARSE:
        commands.resnapshot(pipeline.pipeline, tables=[f"shop.{name}"], where="n = 8")
    pipeline.source(statements("UPDATE {t} SET n = 80 WHERE n = 8", COARSE))
    pipeline.apply()
    assert_equal(pipeline, COARSE)


def test_a_large_value_of_a_row_that_changed_its_spelling(make_pipeline: Make) -> None:
    """The log lacks the value, and the chunk of the old key is filtered: the row is re-read by its new key."""
    pipeline = make_pipeline()
    create_tables(pipeline, COARSE)
    pipeline.provision()
    pipeline.copy_tables(0)
    pipeline.source(
        statements("UPDATE {t} SET k = {v7} WHERE n = 0", COARSE),
        statements("UPDATE {t} SET k = {s} WHERE n = 0", COARSE),
        statements("UPDATE {t} SET k = {v6} WHERE n = 3", COARSE),
    )
    pipeline.copy_tables(1)
    pipeline.source(statements("UPDATE {t} SET k = {v0} WHERE n = 0", COARSE))
    pipeline.apply()
    assert_equal(pipeline, COARSE)


CHUNKS = 10_000
SAMPLE = range(0, CHUNKS, 2500)


@pytest.mark.thorough
def test_ten_thousand_chunks_of_a_skewed_key(databases: Databases, tmp_path: Path) -> None:
    """All chunks are planned and filtered; tasks copy a sample, the others are read at once and marked as finished."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 2})
    pipeline.source(
        "CREATE TABLE public.t (region text, id int, n int, PRIMARY KEY (region, id))",
        # One region has nearly all rows, and the other rows are on both sides of it.
        "INSERT INTO public.t SELECT CASE WHEN i % 50 > 0 THEN 'm' ELSE 'region ' || i END, i, 0"
        f" FROM generate_series(1, {2 * CHUNKS}) i",
    )
    record = pipeline.provision()
    assert len(record.chunks) == CHUNKS
    table = record.targets[0].table
    changes = [
        "UPDATE public.t SET n = n + 1 WHERE id % 7 = 0",
        "UPDATE public.t SET id = -id WHERE id % 11 = 0",
        "DELETE FROM public.t WHERE id % 13 = 0",
        "INSERT INTO public.t SELECT 'm', i, 0 FROM generate_series(-300000, -299000) i",
    ]
    with transaction(databases.source, *changes) as open_:
        pipeline.copy(*SAMPLE)
        open_.commit()
    with connected(databases.source, writes=True) as source:
        sampled = [range_condition(table, record.chunks[index].chunk).as_string(source) for index in SAMPLE]
        with source.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT pg_current_snapshot()::text")
            (snapshot,) = cursor.fetchone() or ("",)
            cursor.execute(f"SELECT * FROM public.t WHERE NOT ({' OR '.join(sampled)})")
            rest = cursor.fetchall()
            cursor.execute("COMMIT")
    high = format_lsn(pipeline.marker())
    with psycopg.connect(databases.target) as target:
        with target.cursor().copy("COPY public.t FROM STDIN") as copy:
            for row in rest:
                copy.write_row(row)
        target.execute(
            "UPDATE airflow_cdc.chunks SET snapshot = %s, high_lsn = %s, row_count = 2, finished_at = now()"
            " WHERE snapshot IS NULL",
            [snapshot, high],
        )
    assert pipeline.record.unfinished == ()
    for change in changes[:3]:
        pipeline.source(change.replace("% 7", "% 17").replace("% 11", "% 19").replace("% 13", "% 23"))
    pipeline.apply()
    pipeline.assert_equal(order="1, 2")
    pipeline.assert_verified()


def test_the_index_of_a_key_is_found_whatever_the_databases_collation_and_encoding(server: PostgresServer) -> None:
    nocase = "CREATE COLLATION public.nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    databases = {
        "keys_collated": ("ENCODING 'UTF8' LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'en-US'", "public.nocase", nocase),
        "keys_ascii": ("ENCODING 'SQL_ASCII' LOCALE 'C'", 'pg_catalog."C"', "SELECT"),
    }
    for name, (how, collation, create) in databases.items():
        execute(server.dsn(), f"CREATE DATABASE {name} TEMPLATE template0 {how}")
        columns = f'account int, "Zähler" text COLLATE {collation}, PRIMARY KEY ("Zähler", account)'
        execute(server.dsn(name), create, f'CREATE TABLE public."Größe" ({columns})')
        target = Target(replace(TABLE, key=("account", "Zähler")), "public", "Größe")
        with connected(server.dsn(name), writes=True) as connection:
            key = TargetKey.of_all(connection, [target])[TABLE.label]
        assert [(column.type, column.collation) for column in key.columns] == [("integer", None), ("text", collation)]
        drop_database(server, name)
