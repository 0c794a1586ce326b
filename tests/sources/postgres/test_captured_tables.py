"""The tables to which the rules of a pipeline resolve on a real source, and the refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.errors import ConfigError, UncapturableTable, UnknownTable
from airflow_cdc_provider.engine.core.table import Leaf, Table
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from airflow_cdc_provider.engine.sources.postgres.catalog import captured_tables, catalog
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import publication_sql
from local_servers.postgres import PostgresServer
from tests.conftest import ServerMaker, create_database, drop_database


@pytest.fixture(scope="module")
def database(source_server: PostgresServer) -> Iterator[Connection]:
    """Return a database for the whole module; creating one takes longer than most of these tests."""
    create_database(source_server, "catalog")
    with connected(source_server.dsn("catalog"), writes=True) as connection:
        yield connection
    drop_database(source_server, "catalog")


@pytest.fixture
def source(database: Connection) -> Iterator[Connection]:
    """Return the module's database, empty except for the schema shop."""
    rows(database, "CREATE SCHEMA shop")
    yield database
    drop = """
        SELECT pg_catalog.format('DROP SCHEMA %I CASCADE', nspname) FROM pg_catalog.pg_namespace
        WHERE nspname <> 'public' AND nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
        UNION ALL SELECT pg_catalog.format('DROP PUBLICATION %I', pubname) FROM pg_catalog.pg_publication
        UNION ALL SELECT pg_catalog.format('DROP FOREIGN DATA WRAPPER %I CASCADE', fdwname)
        FROM pg_catalog.pg_foreign_data_wrapper
    """
    for (statement,) in rows(database, drop):
        rows(database, statement)


def find(connection: Connection, *patterns: str | TableRule) -> tuple[Table, ...]:
    rules = tuple(TableRule(p) if isinstance(p, str) else p for p in patterns)
    return resolve(connection, rules)


def labels(connection: Connection, *patterns: str | TableRule) -> list[str]:
    return [table.label for table in find(connection, *patterns)]


def test_a_table_with_all_that_is_known_of_it(source: Connection) -> None:
    rows(
        source,
        """
        CREATE TYPE shop.mood AS ENUM ('sad', 'happy');
        CREATE DOMAIN shop.positive AS int CHECK (VALUE > 0);
        CREATE TABLE shop.orders (
            gone int, note varchar(10) COLLATE "C", id bigint, region text, amount numeric(10,2) NOT NULL,
            double numeric GENERATED ALWAYS AS (amount * 2) STORED, mood shop.mood, moods shop.mood[],
            count shop.positive, tags text[], PRIMARY KEY (region, id));
        ALTER TABLE shop.orders DROP COLUMN gone;
        """,
    )

    (table,) = find(source, "shop.orders")

    assert [(c.name, c.type, c.collation, c.not_null, c.builtin) for c in table.columns] == [
        ("note", "character varying(10)", 'pg_catalog."C"', False, True),
        ("id", "bigint", None, True, True),
        ("region", "text", None, True, True),
        ("amount", "numeric(10,2)", None, True, True),
        ("mood", "shop.mood", None, False, False),
        ("moods", "shop.mood[]", None, False, False),
        ("count", "shop.positive", None, False, False),
        ("tags", "text[]", None, False, True),
    ]
    assert table.key == ("region", "id")
    assert [column.name for column in table.key_columns] == ["region", "id"]
    assert (table.replica_identity, table.kind, table.label) == ("d", "r", "shop.orders")
    assert table.leaves == (Leaf(table.oid, "shop", "orders"),)
    assert Table.from_dict(json.loads(json.dumps(table.to_dict()))) == table


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("shop.a1", ["shop.a1"]),
        ("shop.a?", ["shop.a*", "shop.a1", "shop.a2"]),
        ("shop.a[!1]", ["shop.a*", "shop.a2"]),
        ("s*.a1", ["shop.a1"]),
        ('shop."a*"', ["shop.a*"]),
        ("shop.a*", ["shop.a*", "shop.a.b", "shop.a1", "shop.a2"]),
        ("shop.a.b", ["shop.a.b"]),
        ("shop.A1", ["shop.A1"]),
        ('"we.ird".t', ["we.ird.t"]),
        ("We ird.Sel ect", ["We ird.Sel ect"]),
        ('shop."qu""ote"', ['shop.qu"ote']),
        ('"shop".a"1"', ["shop.a1"]),
    ],
)
def test_patterns(source: Connection, pattern: str, expected: list[str]) -> None:
    rows(source, 'CREATE SCHEMA "we.ird"; CREATE SCHEMA "We ird"')
    for name in ("a1", "a2", "a*", "a.b", "A1", 'qu""ote', "b"):
        rows(source, f'CREATE TABLE shop."{name}" (id int PRIMARY KEY)')
    rows(source, 'CREATE TABLE "we.ird".t (id int PRIMARY KEY); CREATE TABLE "We ird"."Sel ect" (id int PRIMARY KEY)')

    assert sorted(labels(source, pattern)) == sorted(expected)


@pytest.mark.parametrize("pattern", ["orders", '"shop.orders"', 'shop."orders', "shop.", ".orders"])
def test_what_is_not_a_pattern_is_refused(source: Connection, pattern: str) -> None:
    with pytest.raises(ConfigError, match="is not a table"):
        find(source, pattern)


def test_globs_never_take_system_schemas_and_our_own(source: Connection) -> None:
    rows(source, "CREATE SCHEMA airflow_cdc; CREATE TABLE airflow_cdc.chunks (id int PRIMARY KEY)")
    rows(source, "CREATE TABLE shop.orders (id int PRIMARY KEY)")

    assert labels(source, "*.*") == ["shop.orders"]
    with pytest.raises(UncapturableTable, match=r"pg_catalog\.pg_class is a system"):
        find(source, "pg_catalog.pg_class")


def test_an_unknown_table_is_refused_with_similar_names(source: Connection) -> None:
    rows(source, 'CREATE TABLE shop.orders (id int PRIMARY KEY); CREATE TABLE shop."orders.1" (id int PRIMARY KEY)')

    with pytest.raises(UnknownTable, match=r"shop\.order does not exist") as plain:
        find(source, "shop.order")
    with pytest.raises(UnknownTable, match=r"no table matches nothing\.\*"):
        find(source, "nothing.*")

    assert 'Similar: shop.orders, shop."orders.1".' in plain.value.solution


def test_a_glob_skips_what_cannot_be_captured_and_says_so(source: Connection, caplog: pytest.LogCaptureFixture) -> None:
    rows(
        source,
        """
        CREATE TABLE shop.good (id int PRIMARY KEY);
        CREATE TABLE shop.keyless (id int);
        CREATE UNLOGGED TABLE shop.unlogged (id int PRIMARY KEY);
        CREATE TABLE shop.nothing (id int PRIMARY KEY);
        ALTER TABLE shop.nothing REPLICA IDENTITY NOTHING;
        CREATE VIEW shop.seen AS SELECT * FROM shop.good;
        CREATE TABLE shop.child (more int, PRIMARY KEY (id)) INHERITS (shop.good);
        """,
    )

    with caplog.at_level(logging.WARNING, logger=captured_tables.__name__):
        assert labels(source, "shop.*") == ["shop.child", "shop.good"]

    warnings = " ".join(record.getMessage() for record in caplog.records)
    assert all(name in warnings for name in ("shop.keyless", "shop.unlogged", "shop.nothing"))
    assert "shop.seen" not in warnings
    with pytest.raises(UncapturableTable, match=r"shop\.keyless"):
        find(source, "shop.k*")


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("CREATE TABLE shop.t (id int)", 'ALTER TABLE "shop"."t" ADD PRIMARY KEY'),
        ("CREATE TABLE shop.t (id int)", 'ALTER TABLE "shop"."t" REPLICA IDENTITY FULL'),
        (
            "CREATE TABLE shop.t (id int PRIMARY KEY); ALTER TABLE shop.t REPLICA IDENTITY NOTHING",
            'ALTER TABLE "shop"."t" REPLICA IDENTITY DEFAULT',
        ),
        ("CREATE TABLE shop.t (id int PRIMARY KEY DEFERRABLE)", "ADD PRIMARY KEY"),
        ("CREATE UNLOGGED TABLE shop.t (id int PRIMARY KEY)", 'ALTER TABLE "shop"."t" SET LOGGED'),
        ("CREATE VIEW shop.t AS SELECT 1 AS id", "name the tables that its rows come from"),
        ("CREATE MATERIALIZED VIEW shop.t AS SELECT 1 AS id", "name the tables that its rows come from"),
        (
            "CREATE TABLE shop.t (a int, id int GENERATED ALWAYS AS (a) STORED PRIMARY KEY)",
            "REPLICA IDENTITY USING INDEX",
        ),
        ("CREATE TABLE shop.t (); ALTER TABLE shop.t REPLICA IDENTITY FULL", "Remove it"),
        (
            "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
            "CREATE FOREIGN TABLE shop.t (id int) SERVER s",
            "Remove it",
        ),
    ],
)
def test_a_named_table_that_cannot_be_captured_is_refused_with_the_remedy(
    source: Connection, statement: str, remedy: str
) -> None:
    rows(source, statement)

    with pytest.raises(UncapturableTable, match=r"shop\.t") as refused:
        find(source, "shop.t")

    assert remedy in refused.value.solution


@pytest.mark.parametrize("definition", ["id int", "id int PRIMARY KEY DEFERRABLE"])
def test_a_table_without_key_is_taken_under_full(source: Connection, definition: str) -> None:
    rows(source, f"CREATE TABLE shop.t ({definition}); ALTER TABLE shop.t REPLICA IDENTITY FULL")

    (table,) = find(source, "shop.t")

    assert (table.key, table.replica_identity) == ((), "f")


def test_keys_by_index_and_under_full(source: Connection) -> None:
    rows(
        source,
        """
        CREATE TABLE shop.by_index (id int PRIMARY KEY, b int NOT NULL, a text NOT NULL, c int);
        CREATE UNIQUE INDEX other ON shop.by_index (a, b) INCLUDE (c);
        ALTER TABLE shop.by_index REPLICA IDENTITY USING INDEX other;
        CREATE TABLE shop.whole (a int, id int PRIMARY KEY); ALTER TABLE shop.whole REPLICA IDENTITY FULL;
        """,
    )

    by_index, whole = find(source, "shop.*")

    assert (by_index.key, by_index.replica_identity) == (("a", "b"), "i")
    assert (whole.key, whole.replica_identity) == (("id",), "f")

    rows(source, "DROP INDEX shop.other")
    with pytest.raises(UncapturableTable):
        find(source, "shop.by_index")


def test_the_first_plain_rule_wins_and_nothing_comes_twice(source: Connection) -> None:
    for name in "ab":
        rows(source, f"CREATE TABLE shop.{name} (id int PRIMARY KEY, x int)")

    tables = find(
        source,
        "shop.*",
        TableRule("shop.b", where="id > 1"),
        TableRule("shop.b", columns=("id",)),
    )

    assert [(table.label, table.where) for table in tables] == [("shop.a", None), ("shop.b", "id > 1")]


def test_columns_of_a_rule(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a) STORED)")

    (table,) = find(source, TableRule("shop.t", columns=("a", "id")))
    assert [column.name for column in table.columns] == ["id", "a"]
    assert table.column_list

    for columns, message in ((("id", "nope"), "nope"), (("id", "g"), "g"), (("a",), "lack id")):
        with pytest.raises(ConfigError, match=message):
            find(source, TableRule("shop.t", columns=columns))
    rows(source, "ALTER TABLE shop.t REPLICA IDENTITY FULL")
    with pytest.raises(ConfigError, match="FULL"):
        find(source, TableRule("shop.t", columns=("id", "a")))


def test_a_condition_must_hold_what_postgres_can_filter_by(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.t (id int PRIMARY KEY, a int)")

    assert find(source, TableRule("shop.t", where="t.id % 2 = 0 -- even"))[0].where == "t.id % 2 = 0 -- even"
    with pytest.raises(ConfigError, match="not valid"):
        find(source, TableRule("shop.t", where="nope > 1"))
    with pytest.raises(ConfigError, match="outside its key"):
        find(source, TableRule("shop.t", where="a > 1"))
    with pytest.raises(ConfigError, match="not one SQL condition"):
        find(source, TableRule("shop.t", where="true); DROP TABLE shop.t; SELECT (true"))
    assert labels(source, "shop.t") == ["shop.t"]

    rows(source, "ALTER TABLE shop.t REPLICA IDENTITY FULL")
    assert find(source, TableRule("shop.t", where="a > 1"))[0].where == "a > 1"


PARTITIONED = """
CREATE TABLE shop.p (region text, id int, v int, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE shop.p_de PARTITION OF shop.p FOR VALUES IN ('de');
CREATE TABLE shop.p_rest PARTITION OF shop.p DEFAULT PARTITION BY RANGE (id);
CREATE TABLE shop.p_rest_1 PARTITION OF shop.p_rest FOR VALUES FROM (0) TO (100);
"""


def test_a_partitioned_table_has_the_leaves_of_its_tree(source: Connection) -> None:
    rows(source, PARTITIONED)

    (table,) = find(source, "shop.*")

    assert (table.label, table.kind, table.key) == ("shop.p", "p", ("id", "region"))
    assert [leaf.name for leaf in table.leaves] == ["p_de", "p_rest_1"]
    assert [leaf.oid for leaf in table.leaves] == sorted(leaf.oid for leaf in table.leaves)
    assert labels(source, "shop.p_de") == ["shop.p_de"]
    with pytest.raises(ConfigError, match="belong to both"):
        find(source, "shop.*", "shop.p_de")


def test_values_of_rows_from_before_a_column_are_those_of_the_leaves(source: Connection) -> None:
    rows(source, PARTITIONED)
    rows(source, "ALTER TABLE shop.p ADD n numeric(10,2) DEFAULT 2.5, ADD b int")

    columns = {column.name: column for column in find(source, "shop.p")[0].columns}
    assert [(columns[name].missing, columns[name].uniform) for name in "nb"] == [("2.50", True), (None, True)]
    assert (columns["n"].type_modifier, columns["b"].type_modifier) == ((10 << 16 | 2) + 4, -1)
    rows(source, "VACUUM FULL shop.p_de")
    assert {column.name for column in find(source, "shop.p")[0].columns if not column.uniform} == {"n"}


def test_ddl_between_the_queries(
    source: Connection, source_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries see one moment, which includes the leaves of a tree."""
    rows(source, PARTITIONED + "CREATE TABLE shop.t (id int PRIMARY KEY, v int)")
    before = find(source, "shop.p", "shop.t")
    real = catalog.rows

    def meanwhile(connection: Connection, query: Any, parameters: Any = None) -> list[tuple[Any, ...]]:
        if query is catalog._LEAVES:
            with connected(source_server.dsn("catalog"), writes=True) as other:
                rows(other, "CREATE TABLE shop.p_fr PARTITION OF shop.p FOR VALUES IN ('fr')")
                rows(other, "ALTER TABLE shop.t ALTER v TYPE bigint")
        return real(connection, query, parameters)

    monkeypatch.setattr(catalog, "rows", meanwhile)
    found = find(source, "shop.p", "shop.t")
    monkeypatch.undo()
    assert [(t.leaves, [c.type_oid for c in t.columns]) for t in found] == [
        (t.leaves, [c.type_oid for c in t.columns]) for t in before
    ]
    assert [leaf.filenode for leaf in found[1].leaves] == [leaf.filenode for leaf in before[1].leaves]
    assert len(find(source, "shop.p")[0].leaves) == 3


def test_the_identity_of_leaves_counts(source: Connection) -> None:
    rows(source, PARTITIONED)

    rows(source, "ALTER TABLE shop.p REPLICA IDENTITY FULL")
    assert find(source, "shop.p")[0].replica_identity == "d"
    rows(source, "ALTER TABLE shop.p_de REPLICA IDENTITY FULL")
    with pytest.raises(UncapturableTable, match="differ in their replica identity"):
        find(source, "shop.p")
    rows(source, "ALTER TABLE shop.p_rest_1 REPLICA IDENTITY FULL")
    assert find(source, "shop.p")[0].replica_identity == "f"
    rows(source, "CREATE UNLOGGED TABLE shop.p_fr PARTITION OF shop.p FOR VALUES IN ('fr')")
    with pytest.raises(UncapturableTable, match=r"shop\.p_fr is unlogged"):
        find(source, "shop.p")


def test_a_key_only_on_the_leaves_is_none(source: Connection) -> None:
    rows(
        source,
        "CREATE TABLE shop.p (id int, v int) PARTITION BY LIST (v);"
        "CREATE TABLE shop.p1 PARTITION OF shop.p (PRIMARY KEY (id)) FOR VALUES IN (1)",
    )

    with pytest.raises(UncapturableTable, match=r"is not the key of shop\.p"):
        find(source, "shop.p")


def test_a_partitioned_table_without_partitions(source: Connection) -> None:
    rows(source, "CREATE TABLE shop.p (id int PRIMARY KEY) PARTITION BY LIST (id)")

    assert find(source, "shop.p")[0].leaves == ()


def test_what_resolves_can_be_published_and_written(source: Connection, make_server: ServerMaker) -> None:
    """This is the purpose of the refusals: no statement of the source fails because its table is captured."""
    server = make_server("18")
    with connected(server.dsn(), writes=True) as newest:
        rows(newest, "CREATE SCHEMA shop")
        for connection in (source, newest):
            rows(connection, PARTITIONED)
            rows(
                connection,
                """
                CREATE TABLE shop.t (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v) STORED);
                CREATE TABLE shop.listed (id int PRIMARY KEY, v int, w int);
                CREATE TABLE shop.filtered (id int PRIMARY KEY, v int);
                CREATE TABLE shop.whole (id int, v int, g int GENERATED ALWAYS AS (v) STORED);
                ALTER TABLE shop.whole REPLICA IDENTITY FULL;
                """,
            )
            listed, filtered = TableRule("shop.listed", ("id", "v")), TableRule("shop.filtered", where="id > 0")

            tables = find(connection, "shop.*", listed, filtered)

            whole = "shop.whole" in [table.label for table in tables]
            assert whole == (connection is source), "Postgres 18 refuses FULL with generated columns"
            rows(connection, publication_sql(connection, "everything", tables))
            for table in tables:
                extra = (", region", ", 'de'") if table.kind == "p" else ("", "")
                rows(connection, f"INSERT INTO {table.label} (id, v{extra[0]}) VALUES (1, 1{extra[1]})")
                rows(connection, f"UPDATE {table.label} SET v = 2, id = 3")
                rows(connection, f"DELETE FROM {table.label}")
        with pytest.raises(UncapturableTable, match="generated"):
            find(newest, "shop.whole")
        rows(newest, "CREATE PUBLICATION forced FOR TABLE shop.whole; INSERT INTO shop.whole VALUES (1, 1)")
        with pytest.raises(psycopg2.Error, match="cannot update"):
            rows(newest, "UPDATE shop.whole SET v = 2")
