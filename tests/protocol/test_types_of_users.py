"""Types that users and extensions create: domains, enums, ranges, and columns that become text because of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ValueRefused
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.protocol.typed_tables import Mode, assert_same, columns_of, make_databases, servers
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

__all__ = ["make_databases", "servers"]

pytestmark = pytest.mark.slow


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
    """A type that the target has is kept, one that it lacks becomes text; the same holds for arrays and keys."""
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
    """Insert four rows into ``t`` and ``k``; in the keys of ``k`` an X distinguishes the calls if it can."""
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
    """Chunk and stream refuse it with a remedy; afterwards nothing has been lost."""
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
    """The type's successor refuses the values too, so the column stays text: only an empty column can be converted."""
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
