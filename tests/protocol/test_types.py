"""Every built-in type, types of users and of extensions: snapshot and stream carry their extremes value by value.

What is compared is the text that each server's own output function writes, because that is what Postgres itself
restores a dump from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ValueRefused
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from local_servers.postgres import PostgresServer
from tests.conftest import SESSION_SETTINGS, Databases, create_database, create_roles, drop_database
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest
from tests.support.type_values import VALUES

pytestmark = pytest.mark.slow


Mode = Literal["mirror", "changelog"]


VERSIONS: dict[int, dict[str, Sequence[str]]] = {
    15: {"numeric(5,-2)": ["-99900", "1234567"], "numeric(3,5)": ["0.00999"]},
    16: {'"char"': ["\\377"]},
    17: {"interval": ["infinity", "-infinity"]},
}


XML = {"xml": ["", '<a b="1">&amp;</a>', "text", '<?xml version="1.0" standalone="yes"?><a>ä</a>', "<a/><b/>"]}


# Their values are made by the server; no input function takes them.
MADE = {
    "pg_node_tree": "SELECT conbin FROM pg_constraint WHERE conbin IS NOT NULL LIMIT 1",
    "pg_ndistinct": "SELECT stxdndistinct FROM pg_statistic_ext_data",
    "pg_dependencies": "SELECT stxddependencies FROM pg_statistic_ext_data",
    "pg_mcv_list": "SELECT stxdmcv FROM pg_statistic_ext_data",
}


# Nothing that a user can write gives a value of these: they live in indexes.
NO_VALUES = {"gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}


ONLY_HERE = (
    "CREATE SCHEMA only_here",
    "CREATE TABLE public.only_here (a int, b int CHECK (b >= 0))",
    "CREATE FUNCTION public.only_here() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "INSERT INTO public.only_here SELECT i % 3, i % 2 FROM generate_series(1, 100) i",
    "CREATE STATISTICS s ON a, b FROM public.only_here",
    "ANALYZE public.only_here",
)


@pytest.fixture(scope="module")
def servers(
    server_directory: Path, source_server: PostgresServer, system_binaries: Path
) -> Iterator[Mapping[str, PostgresServer]]:
    """One server a version; both databases of a test live on it."""
    newer = PostgresServer.create(server_directory / "types18", "18", SESSION_SETTINGS)
    full = PostgresServer.create(server_directory / "types-full", binaries=system_binaries, settings=SESSION_SETTINGS)
    try:
        for server in (newer, full):
            server.start()
            create_roles(server)
        yield {"16": source_server, "18": newer, "full": full}
    finally:
        newer.remove()
        full.remove()


@pytest.fixture
def make_databases() -> Iterator[Callable[[PostgresServer, PostgresServer], Databases]]:
    """Makes a pair of databases on servers of the test's choice."""
    made: list[tuple[PostgresServer, str]] = []

    def make(source: PostgresServer, target: PostgresServer) -> Databases:
        names = [f"types{len(made) + i}" for i in (0, 1)]
        for server, name in zip((source, target), names, strict=True):
            create_database(server, name)
            made.append((server, name))
        return Databases(source.dsn(names[0]), target.dsn(names[1]))

    yield make
    for server, name in made:
        drop_database(server, name)


def columns_of(pipeline: PipelineUnderTest, side: str, table: str) -> dict[str, str]:
    """Name and type of each column on one side."""
    with connected(getattr(pipeline.databases, side)) as connection:
        query = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        return dict(rows(connection, query, [table]))


def texts(pipeline: PipelineUnderTest, side: str, table: str, names: Sequence[str], tail: str = "ORDER BY id") -> Any:
    """All values of a table as text, as the server's own output functions write them."""
    # concat() calls the output function; a cast does not always.
    text = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
    cells = sql.SQL(", ").join(sql.SQL(text).format(sql.Identifier(name)) for name in names)
    with connected(getattr(pipeline.databases, side)) as connection:
        return rows(connection, sql.SQL("SELECT {} FROM {} " + tail).format(cells, sql.SQL(table)))


LATEST = (
    "l WHERE NOT EXISTS (SELECT FROM {0} m WHERE m.id = l.id AND (m._commit_lsn, m._seq) > (l._commit_lsn, l._seq))"
    " AND _op <> 'd' ORDER BY id"
)


def assert_same(pipeline: PipelineUnderTest, table: str = "public.t") -> None:
    """The target, or what a changelog adds up to, has the source's texts; and ``verify`` says so too."""
    names = list(columns_of(pipeline, "source", table))
    changelog = pipeline.pipeline.sink.mode == "changelog"
    tail = LATEST.format(table) if changelog else "ORDER BY id"
    ours, theirs = texts(pipeline, "source", table, names), texts(pipeline, "target", table, names, tail)
    assert len(ours) == len(theirs)
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert dict(zip(names, our_row, strict=True)) == dict(zip(names, their_row, strict=True))
    pipeline.assert_verified()


def assert_before(pipeline: PipelineUnderTest, table: str = "public.t") -> None:
    """The old row of each change of a changelog has the texts that the change before had."""
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
    """Every built-in type that can be a column is tested; arrays are made for each."""
    query = (
        "SELECT oid, typname FROM pg_type t WHERE typtype <> 'p' AND typrelid = 0 AND oid < 16384"
        " AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)"
    )
    tested = {oid for (oid,) in rows(source, "SELECT t::regtype::oid FROM unnest(%s::text[]) t", [list(kinds)])}
    assert [name for oid, name in rows(source, query) if oid not in tested] == []


def create_table_of(
    pipeline: PipelineUnderTest, values: Mapping[str, Sequence[str]], made: Mapping[str, str] = MADE
) -> list[str]:
    """Create ``public.t`` with a column of each type and of its array, and of each type made; return their names."""
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


USER_TYPES = (
    """CREATE TYPE "Mo od" AS ENUM ('a', 'b"', 'ü,{}', ' ')""",
    "CREATE DOMAIN positive AS int NOT NULL CHECK (VALUE > 0)",
    """CREATE DOMAIN word AS varchar(5) COLLATE "C" NOT NULL CHECK (VALUE <> '')""",
    "CREATE DOMAIN nested AS word CHECK (VALUE <> 'x')",
    "CREATE DOMAIN numbers AS numeric(4,2)[] NOT NULL",
    """CREATE TYPE pair AS (a int, "b c" text, moods "Mo od"[])""",
    "CREATE DOMAIN pairs AS pair NOT NULL CHECK ((VALUE).a > 0)",
    "CREATE TYPE floats AS RANGE (subtype = float8)",
)


USER_VALUES = {
    '"Mo od"': ["a", 'b"', "ü,{}", " "],
    "positive": ["1", "2147483647", "7", "8"],
    "word": ["a", "äöü€𝄞", "   ", '"'],
    "nested": ["a", "b", "c", "d"],
    "numbers": ["{}", "{NULL,1.5}", "[-1:0]={1,2}", "{{1},{2}}"],
    "pair": ['(1,"a""b",{a})', "(,,)", '(2,"",{})', '(3,"(,\\\\)","{a,NULL}")'],
    "pairs": ["(1,,)", "(2,x,{})", "(3,,)", "(4,,)"],
    "floats": ["empty", "[-Infinity,NaN]", "(,0.1)", "[1,1]"],
    "floats_multirange": ["{}", "{(,1),(2,3]}", "{(,)}", "{[1,1]}"],
}


EXTENSIONS = ("CREATE EXTENSION hstore", "CREATE EXTENSION citext", "CREATE EXTENSION ltree")


EXTENSION_VALUES = {
    "hstore": ["", '"a=>"=>"b\\"c", "n"=>NULL', "x=>y", 'y=>""'],
    "citext": ["", "Ab", "aC", "äÖ"],
    "ltree": ["", "a.b.C", "_1", "a"],
    "lquery": ["*.a|b@*", "a.*{1,2}", "!a", "*"],
    "ltxtquery": ["a & !b*@", "a", "b", "c"],
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("server", "statements", "values"),
    [("16", USER_TYPES, USER_VALUES), ("full", EXTENSIONS, EXTENSION_VALUES)],
    ids=["user", "extension"],
)
def test_types_of_users(
    servers: Mapping[str, PostgresServer],
    make_databases: Callable[[PostgresServer, PostgresServer], Databases],
    tmp_path: Path,
    server: str,
    statements: Sequence[str],
    values: Mapping[str, Sequence[str]],
    known: bool,
    mode: Mode,
) -> None:
    """A type that the target has is kept, one that it lacks becomes text; arrays too, and keys."""
    databases = make_databases(servers[server], servers["16" if not known else server])
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": mode})
    pipeline.source(*statements)
    if known:
        pipeline.target(*statements)
    cells = {f"c {i}": (kind, given) for i, (kind, given) in enumerate(values.items())}
    fields = ", ".join(f'"{name}" {kind} , "{name}[]" {kind}[]' for name, (kind, _) in cells.items())
    keyed = [kind for kind in ('"Mo od"', "nested", "citext", "ltree") if kind in values]
    pipeline.source(
        f"CREATE TABLE t (id int PRIMARY KEY, {fields})",
        f"CREATE TABLE k (id int, {', '.join(f'k{i} {kind}' for i, kind in enumerate(keyed))}, v int,"
        f" PRIMARY KEY ({', '.join(f'k{i}' for i in range(len(keyed)))}))",
    )
    insert_rows(databases.source, values, keyed, 0)
    pipeline.provision()
    pipeline.copy()
    pipeline.copy(table="public.k")
    insert_rows(databases.source, values, keyed, 4)
    pipeline.source(
        "DELETE FROM t WHERE id IN (1, 5)",
        "UPDATE t SET id = id + 100 WHERE id IN (0, 6)",
        "UPDATE k SET v = v + 1 WHERE id % 4 = 1",
        "DELETE FROM k WHERE id % 4 = 2",
    )
    pipeline.apply()
    pipeline.assert_verified()
    kinds = columns_of(pipeline, "target", "public.t")
    for name, (kind, _) in cells.items():
        domain = {"positive": "integer", "word": "character varying(5)", "nested": "character varying(5)"}
        domain |= {"numbers": "numeric(4,2)[]", "pairs": "public.pair"}
        scalar = domain.get(kind, f"public.{kind}") if mode == "changelog" else f"public.{kind}"
        assert (kinds[name], kinds[f"{name}[]"]) == ((scalar, f"public.{kind}[]") if known else ("text", "text"))
    for table, key in (("t", ["id"]), ("k", [f"k{i}" for i in range(len(keyed))])):
        assert_same_values(pipeline, key, list(columns_of(pipeline, "source", f"public.{table}")), "public", table)


def insert_rows(dsn: str, values: Mapping[str, Sequence[str]], keyed: Sequence[str], first: int) -> None:
    """Insert four rows into ``t`` and ``k``; in the keys of ``k`` an X tells one call from another where it can."""
    with connected(dsn, writes=True) as source:
        rows(source, "SET search_path = public")
        for i in range(4):
            cells: list[sql.Composable] = [sql.Literal(first + i)]
            for kind, given in values.items():
                one, other = (sql.SQL("{}::" + kind).format(sql.Literal(given[j])) for j in (i, i - 1))
                array = (
                    "ARRAY[{0}, {1}]::{2}[]",
                    "'{{}}'",
                    "ARRAY[ARRAY[{0}], ARRAY[{1}]]::{2}[]",
                    "array_fill({0}, ARRAY[1, 2], ARRAY[0, -5])::{2}[]",
                )[i]
                cells += [one, sql.SQL(array).format(one, other, sql.SQL(kind))]
            rows(source, sql.SQL("INSERT INTO t VALUES ({})").format(sql.SQL(", ").join(cells)))
            keys = [values[kind][i] if kind != "nested" else values[kind][i] + str(first) for kind in keyed]
            keys = [f"{key}x{first}" if kind == "citext" else key for kind, key in zip(keyed, keys, strict=True)]
            listed = sql.SQL(", ").join(map(sql.Literal, [first + i, *keys, 0]))
            rows(source, sql.SQL("INSERT INTO k VALUES ({})").format(listed))


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_an_enum_label_that_the_target_lacks(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """Refused with what to do, by the chunk and by the stream; afterwards nothing has been lost."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    create = "CREATE TYPE mood AS ENUM ('fine')"
    pipeline.source(create, "CREATE TABLE t (id int PRIMARY KEY, m mood)", "INSERT INTO t VALUES (1, 'fine')")
    pipeline.target(create)
    pipeline.provision()
    pipeline.source("ALTER TYPE mood ADD VALUE 'old'", "INSERT INTO t VALUES (2, 'old')")
    with pytest.raises(ValueRefused, match=r"'m' of .*public\.t.*mood: \"old\"") as refused:
        pipeline.copy()
    assert "ADD VALUE" in refused.value.solution
    pipeline.target("ALTER TYPE mood ADD VALUE 'old'")
    pipeline.copy()
    pipeline.source(
        "ALTER TYPE mood ADD VALUE 'new'", "UPDATE t SET m = 'new' WHERE id = 1", "DELETE FROM t WHERE id = 2"
    )
    with pytest.raises(ValueRefused, match=r"'m' of .*public\.t.*mood: \"new\""):
        pipeline.apply()
    assert pipeline.target_rows("SELECT id, m::text FROM t ORDER BY id") == [(1, "fine"), (2, "old")]
    pipeline.target("ALTER TYPE mood ADD VALUE 'new'")
    pipeline.apply()
    assert_same(pipeline)


def test_a_stricter_domain_on_the_target(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE DOMAIN d AS int", "CREATE TABLE t (id int PRIMARY KEY, v d)")
    pipeline.target("CREATE DOMAIN d AS int CHECK (VALUE < 5)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO t VALUES (1, 4), (2, 5)")
    with pytest.raises(ValueRefused, match=r"public\.t .*domain public\.d"):
        pipeline.apply()
    pipeline.target("ALTER TABLE t ALTER COLUMN v TYPE int")
    pipeline.apply()
    pipeline.assert_equal()


WIDENED = {
    "followed": ("CREATE DOMAIN d AS text", "CREATE DOMAIN e AS text", " CHECK (VALUE < 'p')"),
    "read again": ("CREATE TYPE d AS ENUM ('old'", "CREATE TYPE e AS ENUM ('old'", ")"),
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("case", ["followed", "read again"])
def test_a_column_that_was_made_text_to_take_all_values(
    databases: Databases, tmp_path: Path, mode: Mode, case: str
) -> None:
    """Its type's successor refuses them too: it stays text, since nobody could make it so before it is filled."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    *types, strict = WIDENED[case]
    closed = ")" if case == "read again" else ""
    pipeline.source(*(f"{create}{closed}" for create in types), "CREATE TABLE t (id int PRIMARY KEY, v d)")
    pipeline.target(*(f"{create}{strict}" for create in types))
    pipeline.provision()
    pipeline.copy()
    if case == "read again":
        pipeline.source(*(f"ALTER TYPE {name} ADD VALUE 'refused'" for name in "de"))
    pipeline.source("INSERT INTO t VALUES (1, 'old'), (2, 'refused')")
    if mode == "mirror" or case == "read again":  # a changelog has the types beneath domains
        with pytest.raises(ValueRefused, match=r"public\.t"):
            pipeline.apply()
        pipeline.target("ALTER TABLE t ALTER COLUMN v TYPE text")
    pipeline.apply()
    pipeline.source("ALTER TABLE t ALTER v TYPE e USING v::text::e", "INSERT INTO t VALUES (3, 'refused')")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        assert_same(pipeline)


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
        # Found before pg_catalog's by who does not qualify, and only in evil's search path.
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
    """64 MiB in one value, larger than a batch: read by a chunk, streamed, left alone by an update, moved."""
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
