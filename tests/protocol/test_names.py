"""Names and values that would act as SQL, or as anything but a name, if one place forgets to quote.

Both databases contain canary tables, so that an injection shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg2 import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, rows
from airflow_cdc_provider.engine.postgres.slots import SlotState, emit_marker, read_slot
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import create_publication, drop_publication
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

NAMES = [
    *("Upper", "with space", " ", 'quo"te', '""', "apo'strophe", "''", "select", "user", "x" * 63, "ä" * 31, "🐘"),
    *("d$llar", "$1", "$$", "%s", "%(a)s", "100%", "back\\slash", "\\", "new\nline", "tab\t", "{}", "{0}", "{table}"),
    *("a.b", ".", "*", "?", "[a]", "a,b", "a:b", "--", "/*", "*/", "::int", "(1)", "null", "E'\\x'", "\u202e", "\x7f"),
    *("x; DROP TABLE public.canary; --", '"; DROP TABLE public.canary; --', "'; DROP TABLE public.canary; --"),
    *('"); DROP TABLE public.canary; --', "'); DROP TABLE public.canary; --", "$$; DROP TABLE public.canary; $$"),
]
# Names that the engine uses in staging tables and queries: of tables, and of columns.
TABLES = ["excluded", "t", "s", "k", "stage", "wanted"]
COLUMNS = [
    *(
        "c0",
        "c1",
        "b0",
        "o0",
        "k0",
        "k1",
        "t",
        "s",
        "k",
        "erased",
        "missing",
        "op",
        "unchanged",
        "old_kind",
        "seq",
        "xid",
    ),
    *(
        "commit_lsn",
        "commit_ts",
        "key",
        "content",
        "version",
        "texts",
        "wanted",
        "position",
        "bounds",
        "chunk",
        "bound",
    ),
    *("excluded", "stage", "r", "n", "start", "written", "starts", "halves", "lives", "numbered", "pipeline", "text"),
]
META = ["_op", "_commit_lsn", "_seq", "_xid", "_commit_ts", "_before", "_unchanged"]
BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"


@pytest.fixture
def guarded(databases: Databases) -> Iterator[Databases]:
    """Yield databases with canaries, which must exist at the end, without new tables next to them."""
    for dsn in (databases.source, databases.target):
        with connected(dsn, writes=True) as connection:
            rows(connection, "CREATE TABLE public.canary AS SELECT 'alive' AS canary")
    yield databases
    for dsn in (databases.source, databases.target):
        with connected(dsn, writes=True) as connection:
            assert rows(connection, "SELECT * FROM public.canary") == [("alive",)]
            assert rows(connection, "SELECT rolname FROM pg_roles WHERE rolname ~ 'pwned'") == []


def pattern(*names: str) -> str:
    """Return names as ``source.tables`` takes them."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def similar(name: str) -> str:
    """Return a name very similar to another one."""
    return name[:-1] + "_" if name != "_" else "__"


def run(dsn: str, name: str, *statements: str) -> None:
    """Execute statements in which ``{n}`` is a name, ``{o}`` a similar one, ``{v}`` and ``{w}`` their texts."""
    parts = {
        "n": sql.Identifier(name),
        "o": sql.Identifier(similar(name)),
        "v": sql.Literal(name),
        "w": sql.Literal(name[:20]),
    }
    with connected(dsn, writes=True) as connection:
        rows(connection, sql.SQL("; ").join(sql.SQL(text).format(**parts) for text in statements))


def create(databases: Databases, name: str, *, known: bool) -> None:
    """Create a schema, an enum, a table and its columns with one name; the target has the enum if it is ``known``."""
    for dsn in (databases.source, databases.target)[: 2 if known else 1]:
        run(dsn, name, "CREATE SCHEMA IF NOT EXISTS {n}", "CREATE TYPE {n}.{o} AS ENUM ('', {w})")
    run(
        databases.source,
        name,
        "CREATE TABLE {n}.{n} ({n} text, {o} {n}.{o}, big text, PRIMARY KEY ({n}, {o}))",
        f"INSERT INTO {{n}}.{{n}} SELECT n || {{v}}, {{w}}, {BIG.format('n')} FROM generate_series(0, 3) n",
    )


def change(databases: Databases, name: str) -> None:
    """Insert, update, move, delete, and update without changing a large value."""
    run(
        databases.source,
        name,
        "INSERT INTO {n}.{n} SELECT '9' || {n}, {o}, {n} FROM {n}.{n}",
        "UPDATE {n}.{n} SET {o} = '' WHERE {n} ^@ '0'",
        "UPDATE {n}.{n} SET {n} = '1' || {n} WHERE {n} ^@ '1'",
        "DELETE FROM {n}.{n} WHERE {n} ^@ '2'",
    )


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_schemas_tables_columns_and_types(guarded: Databases, tmp_path: Path, mode: Mode) -> None:
    """One pipeline with all of them: snapshot in chunks, stream, comparison, and re-read."""
    names = (NAMES + TABLES)[:: 1 if mode == "mirror" else 3]
    for i, name in enumerate(names):
        create(guarded, name, known=i % 4 < 2 or "{" in name)
    tables = [pattern(name, name) for name in names]
    pipeline = PipelineUnderTest(tmp_path, guarded, tables, sink={"mode": mode}, snapshot={"chunk_rows": 3})
    pipeline.change(source={"publication": NAMES[-1]})
    pipeline.provision()
    pipeline.copy_tables()
    for name in names:
        change(guarded, name)
    pipeline.apply()
    pipeline.assert_verified()
    for name in names:
        columns = [name, similar(name)]
        assert_same_values(pipeline, columns, [*columns, "big"], name, name)
    commands.resnapshot(pipeline.pipeline, tables=[f"{name}.{name}" for name in names[::4]])
    for name in (name for i, name in enumerate(names) if i % 4 == 1 or "{" in name):
        where = f"{pattern(name)} IS NOT NULL"
        commands.resnapshot(pipeline.pipeline, tables=[f"{name}.{name}"], where=where)
    pipeline.apply()
    result = commands.verify(pipeline.pipeline)
    assert result["equal"]
    assert len(result["tables"]) == len(names)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_columns_of_one_table(guarded: Databases, tmp_path: Path, mode: Mode) -> None:
    """Every name is a column, its value is the next one's name, and three of the engine's names are the key."""
    names = list(dict.fromkeys([*COLUMNS, *NAMES, *(META if mode == "mirror" else [])]))
    values = [*names[1:], names[0]]
    listed = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in names)
    with connected(guarded.source, writes=True) as source:
        rows(source, sql.SQL("CREATE TABLE public.t ({}, PRIMARY KEY (k0, o0, key))").format(listed))
        for i in range(3):
            given = sql.SQL(", ").join(sql.Literal(value + (str(i) if i else "")) for value in values)
            rows(source, sql.SQL("INSERT INTO public.t VALUES ({})").format(given))
        pipeline = PipelineUnderTest(tmp_path, guarded, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": 2})
        pipeline.provision()
        pipeline.copy_tables()
        pipeline.assert_verified()
        large = sql.SQL("UPDATE public.t SET {} = " + BIG.format("k0") + " WHERE k0 ~ '1$'")
        for name in ("missing", "{}", '"; DROP TABLE public.canary; --'):
            rows(source, large.format(sql.Identifier(name)))
        pipeline.apply()
        rows(source, "UPDATE public.t SET erased = 'x'")
        rows(source, "UPDATE public.t SET o0 = o0 || '2' WHERE k0 ~ '1$'")
        rows(source, "DELETE FROM public.t WHERE k0 ~ '2$'")
    pipeline.apply()
    pipeline.assert_verified()
    assert_same_values(pipeline, ["k0", "o0", "key"], names, "public", "t")
    if mode == "changelog":
        unchanged = pipeline.target_rows(
            "SELECT _unchanged FROM public.t WHERE erased = 'x' AND k0 ~ '1$' AND _seq > 0"
        )
        assert sorted(unchanged[0][0]) == sorted(["missing", "{}", '"; DROP TABLE public.canary; --'])


def test_a_changelog_cannot_have_a_column_of_its_own_name_twice(guarded: Databases, tmp_path: Path) -> None:
    """It is refused before anything is touched, with a remedy."""
    pipeline = PipelineUnderTest(tmp_path, guarded, ["public.t"], sink={"mode": "changelog"})
    pipeline.source('CREATE TABLE public.t (id int PRIMARY KEY, _xid int, "_OP" text)')
    with pytest.raises(ConfigError, match=r"public\.t .*_xid") as refused:
        pipeline.provision()
    assert "columns" in refused.value.solution
    assert pipeline.source_rows("SELECT count(*) FROM pg_publication") == [(0,)]
    pipeline.change(source={"tables": [{"table": "public.t", "columns": ["id", "_OP"]}]})
    pipeline.provision()


def test_names_that_differ_in_case_only(guarded: Databases, tmp_path: Path) -> None:
    names = ["case", "Case", "CASE", "casE"]
    for i, (schema, name) in enumerate(itertools.product(names[:2], names)):
        pipeline_table = pattern(schema, name)
        with connected(guarded.source, writes=True) as source:
            rows(source, f"CREATE SCHEMA IF NOT EXISTS {pattern(schema)}")
            rows(source, f'CREATE TABLE {pipeline_table} (id int, "Id" int PRIMARY KEY, "ID" int)')
            rows(source, f"INSERT INTO {pipeline_table} VALUES ({i}, {i + 1}, {i + 2})")
    pipeline = PipelineUnderTest(tmp_path, guarded, ["*.[cC][aA][sS][eE]"])
    pipeline.provision()
    pipeline.copy_tables()
    for schema, name in itertools.product(names[:2], names):
        pipeline.source(f'UPDATE {pattern(schema, name)} SET "ID" = 100 * "Id"')
    pipeline.apply()
    result = commands.verify(pipeline.pipeline)
    assert [table["equal"] for table in result["tables"]] == [True] * 8


def test_two_tables_that_messages_could_not_tell_apart(guarded: Databases, tmp_path: Path) -> None:
    """The record identifies tables by schema and name with a dot between them."""
    for schema, name in (("a", "b.c"), ("a.b", "c")):
        for statement in (
            f"CREATE SCHEMA {pattern(schema)}",
            f"CREATE TABLE {pattern(schema, name)} (id int PRIMARY KEY)",
        ):
            with connected(guarded.source, writes=True) as source:
                rows(source, statement)
    pipeline = PipelineUnderTest(tmp_path, guarded, [pattern("a", "b.c"), pattern("a.b", "c")])
    with pytest.raises(ConfigError, match=r"a\.b\.c"):
        pipeline.provision()


def slot_state(source: Connection, slot: str) -> SlotState:
    """Return the state of an existing slot."""
    state = read_slot(source, slot)
    assert state is not None
    return state


def test_publications(guarded: Databases) -> None:
    """Their names occur in SQL and in the replication protocol, which quotes in a different way."""
    with connected(guarded.source, writes=True) as source:
        rows(source, "CREATE TABLE public.t (id int PRIMARY KEY)")
        tables = resolve(source, (TableRule("public.t"),))
        for name in NAMES:
            create_publication(source, name, tables)
        slot = guarded.source.rpartition("/")[2]
        rows(source, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        rows(source, "INSERT INTO public.t VALUES (1)")
        lsn = emit_marker(source, "names")
        for name in NAMES:
            reader = WalReader(guarded.source, slot, name, 0)
            try:
                pieces = reader.take(Position(0), reader.reach(lsn))
                assert any(b"N\0\1t\0\0\0\0011" in piece.data for piece in pieces), name
            finally:
                reader.close()
            assert await_condition(lambda: not slot_state(source, slot).active, 60.0)
            drop_publication(source, name)
        assert rows(source, "SELECT pubname FROM pg_publication") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("slot", value) for value in ("Slot", "a-b", "a b", "ä", "x" * 64, "a\n", "'", '"', "a;b", "%s")),
        *(("publication", value) for value in ("x" * 64, "ä" * 32)),
    ],
)
def test_names_that_cannot_be_are_refused(guarded: Databases, tmp_path: Path, key: str, value: str) -> None:
    pipeline = PipelineUnderTest(tmp_path, guarded, ["public.t"])
    pipeline.change(source={key: value})
    with pytest.raises(ConfigError, match=f"source.{key}") as refused:
        pipeline.pipeline
    assert "63" in refused.value.solution


@pytest.mark.parametrize("name", ["a\n", "A", "x" * 41, "ä", ""])
def test_pipeline_names_that_cannot_be_are_refused(name: str, guarded: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, guarded, ["public.t"])
    pipeline.change(pipeline=name)
    with pytest.raises(ConfigError, match="pipeline: "):
        pipeline.pipeline


def test_the_longest_names(guarded: Databases, tmp_path: Path) -> None:
    """This covers slot and pipeline; a target schema that Postgres would truncate, and so confuse, is refused."""
    long = "y" * 63
    pipeline = PipelineUnderTest(tmp_path, guarded, [f"{long}.*"])
    pipeline.change(
        pipeline="p" * 40, source={"slot": "s" * 63, "publication": "Ü" * 31}, sink={"schema": "copy of {schema}"}
    )
    with connected(guarded.source, writes=True) as source:
        rows(source, f"CREATE SCHEMA {long}; CREATE TABLE {long}.{long} (id int PRIMARY KEY)")
    with pytest.raises(ConfigError, match=r"sink\.schema.*71 bytes"):
        pipeline.provision()
    pipeline.change(sink={"schema": "x" * 63})
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.source(f"INSERT INTO {long}.{long} VALUES (1)")
    pipeline.apply()
    pipeline.assert_verified()


# -- random names and values ---------------------------------------------------------------------------

_ALPHABET = st.one_of(
    st.sampled_from(list("aA \"'\\%${}();:,.*?[]/-_\n\t\r")),
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]),
)
_NAME = st.text(_ALPHABET, min_size=1, max_size=24).filter(
    lambda name: len(name.encode()) <= 63 and not name.startswith("pg_") and name not in META
)
_VALUE = st.text(_ALPHABET, max_size=30) | st.sampled_from(NAMES)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(_NAME, min_size=6, max_size=6, unique=True),
    values=st.lists(
        st.tuples(_VALUE, _VALUE.filter(bool), st.none() | _VALUE), min_size=4, max_size=4, unique_by=lambda v: v[0]
    ),
    mode=st.sampled_from(["mirror", "changelog"]),
)
def test_random_names_and_values(
    guarded: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    names: Sequence[str],
    values: Sequence[tuple[str, str, str | None]],
    mode: Mode,
) -> None:
    """They are created, copied, streamed, compared and re-read."""
    schema, table, key, mood, text, kind = names
    labels = list(dict.fromkeys(value[1].encode()[:60].decode(errors="ignore") for value in values))
    parts: dict[str, sql.Composable] = {
        "table": sql.Identifier(schema, table),
        "kind": sql.Identifier(schema, kind),
        "labels": sql.SQL(", ").join(map(sql.Literal, labels)),
    }
    parts |= {"schema": sql.Identifier(schema), "key": sql.Identifier(key)}
    parts |= {"mood": sql.Identifier(mood), "text": sql.Identifier(text)}
    cleanup = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema))
    pipeline = PipelineUnderTest(
        tmp_path_factory.mktemp("names"),
        guarded,
        [pattern(schema, table)],
        sink={"mode": mode},
        snapshot={"chunk_rows": 1},
    )
    try:
        with connected(guarded.source, writes=True) as source:
            for statement in (
                "CREATE SCHEMA {schema}",
                "CREATE TYPE {kind} AS ENUM ({labels})",
                "CREATE TABLE {table} ({key} text, {mood} {kind}, {text} text, PRIMARY KEY ({key}, {mood}))",
            ):
                rows(source, sql.SQL(statement).format(**parts))
            insert = sql.SQL("INSERT INTO {} VALUES ({})")

            def add(value: tuple[str, str, str | None], suffix: str = "") -> None:
                label = value[1].encode()[:60].decode(errors="ignore")
                given = sql.SQL(", ").join(map(sql.Literal, (value[0] + suffix, label, value[2])))
                rows(source, insert.format(parts["table"], given))

            for value in values[:3]:
                add(value)
            pipeline.provision()
            pipeline.copy_tables()
            for value in values:
                add(value, "+")
            for i, statement in enumerate(
                (
                    "UPDATE {table} SET {text} = {key} WHERE {key} = {value}",
                    "UPDATE {table} SET {key} = {text} WHERE {key} = {value} AND {text} IS NOT NULL",
                    "DELETE FROM {table} WHERE {key} = {value}",
                )
            ):
                rows(source, sql.SQL(statement).format(**parts, value=sql.Literal(values[i][0])))
            pipeline.apply()
            pipeline.assert_verified()
            where = sql.SQL("{} IS NULL OR {} <> {}").format(parts["text"], parts["text"], sql.Literal(values[3][0]))
            condition = where.as_string(source)
        label = f"{schema}.{table}"
        assert commands.resnapshot(pipeline.pipeline, tables=[label], where=condition)["rows"] is not None
        assert commands.resnapshot(pipeline.pipeline, tables=[label])["rows"] is not None
        pipeline.apply()
        pipeline.assert_verified()
    finally:
        commands.drop(pipeline.pipeline)
        for dsn in (guarded.source, guarded.target):
            with connected(dsn, writes=True) as connection:
                rows(connection, cleanup)
