"""Views in a Postgres mirror, step by step: built, moved, queued, redefined, refused, and interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    ConfigError,
    Failpoint,
    Fenced,
    ForeignTable,
    ViewRefused,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.postgres import fence, view_store
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.sinks.begun_sink import IDENTITY, WATERMARK, Begun, batch, text
from tests.support.given_rows import GivenRows
from tests.support.postgres_store import PostgresStore

Row = tuple[str | None, ...]
START = 100

WIDE = "SELECT o.id, o.total, c.city FROM shop.orders o LEFT JOIN shop.customers c ON c.id = o.customer_id"
CITIES = (
    "SELECT c.city, count(*) AS n, sum(o.total) AS total FROM shop.customers c"
    " JOIN shop.orders o ON o.customer_id = c.id GROUP BY c.city"
)


def a_target(name: str, oid: int, *columns: tuple[str, str, int]) -> Target:
    described = tuple(
        Column(column, kind, type_oid, None, column == "id", True, attnum=n)
        for n, (column, kind, type_oid) in enumerate(columns, start=1)
    )
    table = Table(oid, "shop", name, described, ("id",), "d", None, (Leaf(oid, "shop", name),), "r", attnums=9)
    return Target(table, "mirror", name)


INT, TEXT = ("integer", 23), ("text", 25)
ORDERS = a_target("orders", 1, ("id", *INT), ("customer_id", *INT), ("total", *INT), ("note", *TEXT))
CUSTOMERS = a_target("customers", 2, ("id", *INT), ("city", *TEXT), ("name", *TEXT))


class Shop:
    """A mirror of two tables, and views over it."""

    def __init__(self, dsn: str, **views: str | ViewSettings) -> None:
        self.store = PostgresStore(dsn)
        self.dsn = dsn
        self.open(**views)
        self.sink.prepare([ORDERS, CUSTOMERS], [], IDENTITY, START)
        self.epoch = self.sink.take_epoch("test")
        self.applied = START
        self.keeper = ViewKeeper(self.sink, self.epoch)

    def open(self, **views: str | ViewSettings) -> None:
        """Read another file."""
        given = {name: ViewSettings("dwd", name, v) if isinstance(v, str) else v for name, v in views.items()}
        self.sink = PostgresSink(self.dsn, "p", "mirror", views=tuple(given.values()))

    def reopen(self, **views: str | ViewSettings) -> None:
        """Start another run with another file."""
        self.open(**views)
        self.epoch = self.sink.take_epoch("next")
        self.keeper = ViewKeeper(self.sink, self.epoch)

    def unit(
        self, orders: Mapping[int, Row | None] | None = None, customers: Mapping[int, Row | None] | None = None
    ) -> None:
        """Write rows by key; ``None`` deletes one."""
        effects = [an_effect(target.table, rows) for target, rows in ((ORDERS, orders), (CUSTOMERS, customers)) if rows]
        piece = Begun(self.store, self.sink, self.epoch).piece(*effects)
        assert self.sink.commit(self.epoch, self.applied, self.applied + 10, [piece])
        self.applied += 10

    def build(self) -> None:
        while self.keeper.step():
            pass

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in self.store.query(query)]

    @property
    def versions(self) -> list[tuple[int, str, bool]]:
        return [(each.number, each.view.name, each.kept) for each in self.sink.view_versions()]


def an_effect(table: Table, rows: Mapping[int, Row | None]) -> Effect:
    columns = {"erased": pa.array([row is None for row in rows.values()])}
    for n in range(len(table.columns)):
        columns[f"c{n}"] = text(
            *(str(key) if n == 0 else None if row is None else row[n - 1] for key, row in rows.items())
        )
    return Effect(table.label, False, pa.table(columns))


@pytest.fixture(scope="module")
def database(target_server: PostgresServer) -> Iterator[str]:
    create_database(target_server, "views")
    yield target_server.dsn("views")
    drop_database(target_server, "views")


@pytest.fixture
def empty(database: str) -> Iterator[str]:
    yield database
    PostgresStore(database).query("DROP SCHEMA IF EXISTS airflow_cdc, mirror, dwd CASCADE")


def a_shop(dsn: str, **views: str | ViewSettings) -> Shop:
    """Return a shop with three orders of two customers, and its views built."""
    shop = Shop(dsn, **views)
    shop.unit({1: ("1", "10", "a"), 2: ("1", "20", "b"), 3: ("2", "30", "c")}, {1: ("Rome", "Ada"), 2: ("Oslo", "Ben")})
    shop.build()
    return shop


def test_readers_see_mirror_and_views_move_together(empty: str) -> None:
    shop = a_shop(empty, wide=WIDE, cities=CITIES)
    assert shop.rows("SELECT * FROM dwd.cities ORDER BY 1") == [("Oslo", 1, 30), ("Rome", 2, 30)]
    shop.unit({3: ("1", "31", "c"), 2: None, 4: ("9", "5", "d")}, {1: ("Bonn", "Ada")})
    assert shop.rows("SELECT * FROM dwd.wide ORDER BY 1") == [(1, 10, "Bonn"), (3, 31, "Bonn"), (4, 5, None)]
    assert shop.rows("SELECT * FROM dwd.cities ORDER BY 1") == [("Bonn", 2, 41)]


def test_a_change_of_columns_that_no_view_reads_affects_no_anchor(empty: str) -> None:
    shop = a_shop(empty, wide=WIDE)
    before = shop.sink.view_versions()
    shop.unit({1: ("1", "10", "another note")}, {1: ("Rome", "another name")})
    assert shop.sink.view_versions() == before


def test_an_unchanged_row_is_not_written(empty: str) -> None:
    """Five orders of Rome are affected, but the city of one customer only is another."""
    shop = a_shop(empty, wide=WIDE)
    before = dict(shop.rows("SELECT id, xmin::text FROM dwd.wide"))
    shop.unit({1: ("1", "11", "a"), 2: None})
    shop.unit({2: ("1", "20", "b")})
    after = dict(shop.rows("SELECT id, xmin::text FROM dwd.wide"))
    assert after[3] == before[3]
    assert after[1] != before[1]


def test_indexes_for_the_upkeep_are_created_once(empty: str) -> None:
    shop = a_shop(empty, wide=WIDE, cities=CITIES)
    found = shop.rows("SELECT indexdef FROM pg_indexes WHERE schemaname = 'mirror' AND indexname LIKE 'airflow_cdc%'")
    assert sorted(row[0].partition(" USING ")[2] for row in found) == ["btree (city)", "btree (customer_id)"]
    printed = replace(shop.sink.views[0], sql=f"{WIDE} WHERE o.total > 0", indexes="print")
    shop.store.query(
        "DROP INDEX mirror." + shop.rows("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%customer_id)'")[0][0]
    )
    shop.reopen(wide=printed)
    shop.build()
    assert shop.rows("SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%(customer_id)'") == [(0,)]


class TestQueue:
    """Views whose changes are queued."""

    def test_more_anchors_than_max_rows_are_drained_between_units(self, empty: str) -> None:
        shop = a_shop(empty, wide=ViewSettings("dwd", "wide", WIDE, max_rows=1))
        behind = shop.applied
        shop.unit(customers={1: ("Bonn", "Ada")})
        (version,) = shop.sink.view_versions()
        assert version.behind == behind
        assert shop.rows("SELECT id FROM dwd.wide WHERE city = 'Bonn'") == []
        assert not shop.keeper.reached(shop.applied)
        assert shop.keeper.reached(behind)
        shop.unit({3: ("2", "99", "c")})  # a single anchor moves at once
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 3") == [(99,)]
        shop.build()
        assert shop.rows("SELECT id FROM dwd.wide WHERE city = 'Bonn' ORDER BY 1") == [(1,), (2,)]
        assert shop.keeper.reached(shop.applied)

    def test_a_reader_of_the_queue_is_not_waited_for(self, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fence, "LOCK_SECONDS", 0.5)
        shop = a_shop(empty, wide=ViewSettings("dwd", "wide", WIDE, max_rows=1))
        (version,) = shop.sink.view_versions()
        with psycopg.connect(empty) as reader:
            reader.execute(f"SELECT count(*) FROM airflow_cdc.{version.queue}".encode())
            shop.unit(customers={1: ("Bonn", "Ada")})
            shop.build()
            assert shop.rows("SELECT id FROM dwd.wide WHERE city = 'Bonn' ORDER BY 1") == [(1,), (2,)]

    def test_a_portion_that_takes_too_long_is_made_smaller(self, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row of the view takes 0.2 seconds."""
        slow = (
            "CREATE FUNCTION mirror.slow(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE"
            " AS $$ BEGIN PERFORM pg_sleep(0.2); RETURN n; END $$"
        )
        shop = Shop(empty)
        shop.store.query(slow)
        shop.unit({n: ("1", str(n), "a") for n in range(1, 13)})
        monkeypatch.setattr(view_store, "_STEP_TIMEOUT", "1s")
        shop.reopen(v="SELECT o.id, mirror.slow(o.total) AS total FROM shop.orders o")
        shop.build()
        assert shop.rows("SELECT count(*), sum(total) FROM dwd.v") == [(12, 78)]

    def test_the_keeper_waits_for_a_long_unit(self, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fence, "LOCK_SECONDS", 0.2)
        shop = a_shop(empty, wide=ViewSettings("dwd", "wide", WIDE, max_rows=1))
        shop.unit(customers={1: ("Bonn", "Ada")})
        with psycopg.connect(empty) as unit:
            unit.execute("SELECT FROM airflow_cdc.pipelines FOR NO KEY UPDATE")
            assert not shop.keeper.step()
        assert shop.keeper.step()
        assert shop.rows("SELECT id FROM dwd.wide WHERE city = 'Bonn' ORDER BY 1") == [(1,), (2,)]

    def test_a_view_with_refresh_coalesces_until_it_is_due(self, empty: str) -> None:
        shop = a_shop(empty, cities=ViewSettings("dwd", "cities", CITIES, refresh=60))
        clock = [1000.0]
        shop.keeper = ViewKeeper(shop.sink, shop.epoch, lambda: clock[0])
        for total in ("1", "2", "3"):
            shop.unit({1: ("1", total, "a")})
            shop.build()
            clock[0] += 1
        assert shop.rows("SELECT total FROM dwd.cities WHERE city = 'Rome'") == [(21,)]  # refreshed once
        clock[0] += 60
        shop.build()
        assert shop.rows("SELECT total FROM dwd.cities WHERE city = 'Rome'") == [(23,)]
        shop.unit({1: ("1", "7", "a")})
        while shop.keeper.step(everything=True):
            pass
        assert shop.rows("SELECT total FROM dwd.cities WHERE city = 'Rome'") == [(27,)]


class TestDefinitions:
    """Changes of a view's definition and of its tables."""

    def test_a_new_definition_takes_the_place_of_the_former_one(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.store.query("GRANT SELECT ON dwd.wide TO PUBLIC")
        shop.reopen(wide=WIDE.replace("c.city", "c.city, c.name"))
        shop.keeper.step()
        shop.unit(customers={1: ("Bonn", "Ada")})  # readers still see the former one, which moves
        assert shop.rows("SELECT * FROM dwd.wide ORDER BY 1")[0] == (1, 10, "Bonn")
        shop.build()
        assert shop.rows("SELECT * FROM dwd.wide ORDER BY 1")[0] == (1, 10, "Bonn", "Ada")
        assert shop.versions == [(2, "wide", True)]
        assert shop.rows("SELECT has_table_privilege('public', 'dwd.wide', 'SELECT')") == [(True,)]
        assert shop.rows("SELECT relname FROM pg_class WHERE relname ~ '^(queue|airflow_cdc)_' AND relkind = 'r'") == [
            (shop.sink.view_versions()[0].queue,)
        ]

    def test_a_removed_view_stays_as_it_is(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE, cities=CITIES)
        behind = shop.applied
        shop.reopen(cities=CITIES)
        shop.build()
        shop.unit({1: ("1", "11", "a")})
        assert shop.versions == [(1, "wide", False), (2, "cities", True)]
        assert shop.sink.view_versions()[0].behind == behind
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 1") == [(10,)]
        shop.reopen(cities=CITIES, wide=WIDE)
        shop.build()
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 1") == [(11,)]

    def test_recorded_views_move_although_a_command_uses_a_file_without_them(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.open()
        shop.unit({1: ("1", "11", "a")})
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 1") == [(11,)]
        without = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=(CUSTOMERS.table.columns[0],)))
        shop.sink.redefine(shop.epoch, CUSTOMERS, without)
        assert shop.versions == [(1, "wide", False)]

    def test_a_dropped_column_that_a_view_reads_stops_by_name(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        without = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=(CUSTOMERS.table.columns[0],)))
        with pytest.raises(CannotFollow, match=r"view dwd.wide cannot follow a change of shop.customers: .*c.city"):
            shop.sink.redefine(shop.epoch, CUSTOMERS, without)
        assert shop.rows("SELECT count(city) FROM mirror.customers") == [(2,)]
        shop.reopen(wide=WIDE.replace(", c.city", ""))
        shop.sink.redefine(shop.epoch, CUSTOMERS, without)
        shop.build()
        assert shop.rows("SELECT * FROM dwd.wide ORDER BY 1") == [(1, 10), (2, 20), (3, 30)]

    def test_a_definition_for_a_renamed_column_may_be_in_the_file_before(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.reopen(wide=WIDE.replace("c.city", "c.town"))
        shop.build()
        shop.unit(customers={1: ("Bonn", "Ada")})
        assert shop.rows("SELECT city FROM dwd.wide WHERE id = 1") == [("Bonn",)]
        id_, city, name = CUSTOMERS.table.columns
        renamed = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=(id_, replace(city, name="town"), name)))
        shop.sink.redefine(shop.epoch, CUSTOMERS, renamed)
        shop.build()
        assert shop.rows("SELECT town FROM dwd.wide WHERE id = 1") == [("Bonn",)]

    def test_an_unused_column_may_change_and_another_type_rebuilds(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        id_, city, _ = CUSTOMERS.table.columns
        fewer = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=(id_, city)))
        shop.sink.redefine(shop.epoch, CUSTOMERS, fewer)
        assert shop.versions == [(1, "wide", True)]
        id_, customer, total, note = ORDERS.table.columns
        wider = replace(total, type="bigint", type_oid=20)
        retyped = replace(ORDERS, table=replace(ORDERS.table, columns=(id_, customer, wider, note)))
        shop.sink.redefine(shop.epoch, ORDERS, retyped)
        assert shop.versions == [(1, "wide", False), (2, "wide", True)]
        shop.build()
        assert shop.versions == [(2, "wide", True)]
        shop.unit({1: ("1", "5000000000", "a")})
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 1") == [(5_000_000_000,)]

    def test_a_view_whose_table_was_dropped_is_built_again(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.store.query("DROP TABLE dwd.wide")
        with pytest.raises(ViewRefused, match="does not exist") as refused:
            shop.unit({1: ("1", "11", "a")})
        assert "built again" in refused.value.solution
        shop.reopen(wide=WIDE)
        shop.keeper.reconcile()
        shop.unit({1: ("1", "11", "a")})
        shop.build()
        assert shop.rows("SELECT id, total FROM dwd.wide ORDER BY 1") == [(1, 11), (2, 20), (3, 30)]

    def test_a_table_that_leaves_the_pipeline_ends_its_views(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE, totals="SELECT o.id, o.total FROM shop.orders o")
        shop.sink.forget(shop.epoch, ["shop.customers"])
        assert shop.versions == [(1, "wide", False), (2, "totals", True)]
        shop.unit({1: ("1", "11", "a")})
        assert shop.rows("SELECT total FROM dwd.totals WHERE id = 1") == [(11,)]
        shop.reopen(wide=WIDE)
        with pytest.raises(ConfigError, match=r"view dwd.wide: the table shop.customers is not captured"):
            shop.build()

    def test_a_table_with_policies_or_triggers_is_not_replaced(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.store.query("ALTER TABLE dwd.wide ENABLE ROW LEVEL SECURITY")
        shop.reopen(wide=f"{WIDE} WHERE o.total > 0")
        with pytest.raises(ViewRefused, match="row-level security or triggers"):
            shop.build()
        assert shop.rows("SELECT count(*) FROM dwd.wide") == [(3,)]
        shop.store.query("DROP TABLE dwd.wide")
        shop.build()
        assert shop.rows("SELECT count(*) FROM dwd.wide") == [(3,)]

    def test_another_key_of_a_table_builds_its_views_again(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        renamed = tuple(replace(c, name="number") if c.name == "id" else c for c in CUSTOMERS.table.columns)
        after = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=renamed, key=("number",)))
        with pytest.raises(CannotFollow, match=r"c\.id is unknown"):
            shop.sink.redefine(shop.epoch, CUSTOMERS, after)
        by_city = replace(CUSTOMERS, table=replace(CUSTOMERS.table, key=("city",)))
        rows = GivenRows(iter([batch(("1", "Rome", "Ada"), ("2", "Rom", "Ben"))]), lambda: WATERMARK)
        shop.sink.replace(shop.epoch, by_city, None, rows, CUSTOMERS)
        assert shop.versions == [(1, "wide", False), (2, "wide", True)]

    def test_a_former_version_that_reads_a_dropped_column_ends(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.reopen(wide="SELECT o.id, o.total FROM shop.orders o")
        shop.keeper.reconcile()
        without = replace(CUSTOMERS, table=replace(CUSTOMERS.table, columns=(CUSTOMERS.table.columns[0],)))
        shop.sink.redefine(shop.epoch, CUSTOMERS, without)
        assert shop.versions == [(1, "wide", False), (2, "wide", True)]
        shop.unit({1: ("1", "11", "a")})
        shop.build()
        assert shop.rows("SELECT total FROM dwd.wide WHERE id = 1") == [(11,)]

    def test_a_new_definition_that_is_wrong_is_refused(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.reopen(wide=WIDE.replace("LEFT JOIN", "FULL JOIN"))
        with pytest.raises(ConfigError, match="FULL JOIN"):
            shop.keeper.reconcile()

    def test_everything_read_again_builds_views_again(self, empty: str) -> None:
        shop = a_shop(empty, wide=WIDE)
        shop.sink.restart(shop.epoch, [ORDERS, CUSTOMERS], IDENTITY, 500)
        assert shop.versions == [(1, "wide", False), (2, "wide", True)]
        assert not shop.keeper.step()  # the mirror is not consistent


class TestRefusals:
    """What is refused, by name."""

    @pytest.mark.parametrize(
        ("select", "why"),
        [
            ("SELECT o.id, clock_timestamp() AS t FROM shop.orders o", r"CLOCK_TIMESTAMP\(\) is not allowed"),
            ("SELECT o.id, txid_current_snapshot()::text AS t FROM shop.orders o", "only stable"),
            ("SELECT o.id, pg_backend_pid() AS t FROM shop.orders o", "pg_backend_pid is not allowed"),
            ("SELECT o.id, regexp_split_to_table(o.note, ',') AS t FROM shop.orders o", "returns several rows"),
            ("SELECT o.id, 'now'::timestamp AS t FROM shop.orders o", "'now' is a moment"),
            ("SELECT o.id FROM shop.orders o WHERE o.note::date > ' Yesterday'", "' Yesterday' is a moment"),
            ("SELECT o.id, nothing(o.total) AS t FROM shop.orders o", "function nothing"),
            ("SELECT o.id, o.total + 'x' AS t FROM shop.orders o", "invalid input syntax"),
            ("SELECT o.id, o.missing FROM shop.orders o", "column o.missing is unknown"),
            ("SELECT o.id, o.ctid FROM shop.orders o", "o.ctid is unknown"),
        ],
    )
    def test_a_select_that_is_not_determined(self, empty: str, select: str, why: str) -> None:
        with pytest.raises(ConfigError, match=f"view dwd.v: .*{why}") as refused:
            Shop(empty, v=select)
        assert refused.value.solution
        assert PostgresSink(empty, "p", "mirror").record() is None  # nothing was touched

    def test_functions_that_depend_on_settled_settings_only(self, empty: str) -> None:
        select = "SELECT o.id, concat(o.note, to_char(o.total, '999')) AS t FROM shop.orders o"
        assert a_shop(empty, v=select).rows("SELECT t FROM dwd.v WHERE id = 1") == [("a  10",)]

    def test_texts_that_are_no_moments_comments_and_odd_aliases(self, empty: str) -> None:
        select = """SELECT "a{x}".id, "a{x}".note = 'today' AS "is 100% %s" FROM shop.orders AS "a{x}"; -- done {}"""
        assert a_shop(empty, v=select).rows('SELECT "is 100% %s" FROM dwd.v WHERE id = 1') == [(False,)]

    def test_a_name_that_is_taken(self, empty: str) -> None:
        PostgresStore(empty).query("CREATE SCHEMA dwd; CREATE TABLE dwd.wide (a int)")
        with pytest.raises(ForeignTable, match=r"view dwd.wide: the sink has a table of this name"):
            Shop(empty, wide=WIDE)
        with pytest.raises(ConfigError, match=r"shop.orders is copied into a table of this name"):
            Shop(empty, orders=ViewSettings("mirror", "orders", WIDE))

    def test_a_row_that_cannot_be_computed_stops_the_unit_by_name(self, empty: str) -> None:
        shop = a_shop(empty, v="SELECT o.id, 100 / o.total AS share FROM shop.orders o")
        with pytest.raises(ViewRefused, match=r"view dwd.v cannot be brought up to date: division by zero"):
            shop.unit({1: ("1", "0", "a")})
        assert shop.rows("SELECT total FROM mirror.orders WHERE id = 1") == [(10,)]
        shop.reopen(v="SELECT o.id, 100 / nullif(o.total, 0) AS share FROM shop.orders o")
        shop.keeper.reconcile()
        shop.unit({1: ("1", "0", "a")})
        shop.build()
        assert shop.rows("SELECT share FROM dwd.v WHERE id = 1") == [(None,)]
        assert shop.versions == [(2, "v", True)]


class TestInterruptions:
    """Steps that fail, and runs that are overtaken."""

    @pytest.mark.parametrize(
        "place",
        [
            "after-view-reconciled",
            "before-view-begun",
            "after-view-index",
            "before-view-built",
            "before-view-exchanged",
        ],
    )
    def test_a_build_goes_on_after_a_failure(self, empty: str, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        shop = Shop(empty, wide=WIDE, cities=CITIES)
        shop.unit({1: ("1", "10", "a")}, {1: ("Rome", "Ada")})
        monkeypatch.setenv(VARIABLE, f"{place}:error")
        with pytest.raises(Failpoint):
            shop.build()
        monkeypatch.delenv(VARIABLE)
        shop.unit({2: ("1", "20", "a")})
        shop.keeper = ViewKeeper(shop.sink, shop.epoch)
        shop.build()
        assert shop.rows("SELECT * FROM dwd.wide ORDER BY 1") == [(1, 10, "Rome"), (2, 20, "Rome")]
        assert shop.rows("SELECT * FROM dwd.cities") == [("Rome", 2, 30)]

    @pytest.mark.parametrize("place", ["after-view-anchors", "after-view-settled", "before-view-drained"])
    def test_a_unit_or_a_portion_is_done_completely_or_not_at_all(
        self, empty: str, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        shop = a_shop(empty, wide=WIDE, queued=ViewSettings("dwd", "queued", CITIES, max_rows=1))

        def both() -> None:
            shop.unit(customers={1: ("Bonn", "Ada"), 2: ("Bern", "Ben")})
            shop.build()

        before = shop.rows("SELECT * FROM dwd.wide ORDER BY 1"), shop.rows("SELECT * FROM dwd.queued ORDER BY 1")
        monkeypatch.setenv(VARIABLE, f"{place}:error")
        with pytest.raises(Failpoint):
            both()
        found = shop.rows("SELECT * FROM dwd.wide ORDER BY 1"), shop.rows("SELECT * FROM dwd.queued ORDER BY 1")
        drained = place == "before-view-drained"
        assert (found == before) is not drained
        assert found[1] == before[1]
        monkeypatch.delenv(VARIABLE)
        shop.build() if drained else both()
        assert shop.rows("SELECT city FROM dwd.wide ORDER BY id") == [("Bonn",), ("Bonn",), ("Bern",)]
        assert shop.rows("SELECT city, n FROM dwd.queued ORDER BY 1") == [("Bern", 1), ("Bonn", 2)]

    def test_an_overtaken_run_does_nothing(self, empty: str) -> None:
        shop = a_shop(empty, wide=ViewSettings("dwd", "wide", WIDE, max_rows=1))
        shop.unit(customers={1: ("Bonn", "Ada")})
        shop.sink.take_epoch("another")
        with pytest.raises(Fenced):
            shop.keeper.step()
        assert shop.rows("SELECT id FROM dwd.wide WHERE city = 'Bonn'") == []
