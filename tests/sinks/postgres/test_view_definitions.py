"""The definitions of views in a Postgres mirror: changed, and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    ConfigError,
    ForeignTable,
    ViewRefused,
)
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.begun_sink import IDENTITY, WATERMARK, batch
from tests.sinks.postgres.begun_views import CITIES, CUSTOMERS, ORDERS, WIDE, Shop, a_shop
from tests.support.given_rows import GivenRows
from tests.support.postgres_store import PostgresStore


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
