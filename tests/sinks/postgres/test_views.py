"""Views in a Postgres mirror, step by step: built, moved, queued, and interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import (
    Failpoint,
    Fenced,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.sinks.postgres import fence, view_store
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.postgres.view_upkeep import PostgresViewUpkeep
from airflow_cdc_provider.engine.sinks.transactional.view_upkeep import Images
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.begun_sink import IDENTITY, WATERMARK
from tests.sinks.postgres.begun_views import CITIES, ORDERS, WHOLE, WIDE, Shop, a_shop
from tests.support.given_rows import GivenRows


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


@pytest.mark.parametrize(
    "select",
    [
        WHOLE,
        CITIES,
        "SELECT c.id, c.city, c.name, o.total FROM shop.customers c JOIN shop.orders o ON o.customer_id = c.id",
    ],
    ids=["one row", "groups", "several rows"],
)
def test_units_are_counted_that_change_rows_of_the_view(empty: str, select: str) -> None:
    shop = a_shop(empty, v=select)
    units = [shop.sink.view_versions()[0].units]
    for orders, customers in [
        ({1: ("1", "10", "a")}, {1: ("Rome", "Ada")}),  # as they are
        ({1: ("1", "11", "a")}, {}),
        ({1: None}, {}),
        ({4: ("1", "5", "d")}, {}),
    ]:
        shop.unit(orders, customers)
        units.append(shop.sink.view_versions()[0].units)
    assert [each - units[0] for each in units] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("views", "columns"),
    [
        ({"whole": WHOLE}, 0),
        ({"whole": WHOLE, "wide": WIDE}, 3),
        ({"whole": ViewSettings("dwd", "whole", WHOLE, refresh=60.0)}, 4),
    ],
    ids=["whole", "beside another", "refreshed"],
)
def test_of_changed_rows_that_a_view_reads_as_a_whole_only_keys_are_noted(
    empty: str, monkeypatch: pytest.MonkeyPatch, views: dict[str, Any], columns: int
) -> None:
    begin, noted = PostgresViewUpkeep._begin, list[tuple[str, int]]()

    def noting(upkeep: PostgresViewUpkeep, label: str, columns: Sequence[str]) -> Images:
        noted.append((label, len(columns)))
        return begin(upkeep, label, columns)

    shop = a_shop(empty, **views)
    monkeypatch.setattr(PostgresViewUpkeep, "_begin", noting)
    shop.unit({1: ("2", "12", "a")}, {2: ("Bonn", "Ben")})
    shop.sink.replace(shop.epoch, ORDERS, frozenset({("2",)}), GivenRows([], lambda: WATERMARK), ORDERS)
    assert noted == [("shop.orders", columns), ("shop.customers", 2), ("shop.orders", 4)]
    while shop.keeper.step(everything=True):
        pass
    assert shop.rows("SELECT * FROM dwd.whole ORDER BY 1") == [(1, 2, 12, "a", "Bonn"), (3, 2, 30, "c", "Bonn")]


def test_an_unchanged_row_is_not_written(empty: str) -> None:
    """Five orders of Rome are affected, but the city of one customer only is another."""
    shop = a_shop(empty, wide=WIDE)
    before = dict(shop.rows("SELECT id, xmin::text FROM dwd.wide"))
    shop.unit({1: ("1", "11", "a"), 2: None})
    shop.unit({2: ("1", "20", "b")})
    after = dict(shop.rows("SELECT id, xmin::text FROM dwd.wide"))
    assert after[3] == before[3]
    assert after[1] != before[1]


def test_indexes_for_the_upkeep_are_created_once_and_pages_have_room(empty: str) -> None:
    shop = a_shop(empty, wide=WIDE, cities=CITIES)
    found = shop.rows("SELECT indexdef FROM pg_indexes WHERE schemaname = 'mirror' AND indexname LIKE 'airflow_cdc%'")
    assert sorted(row[0].partition(" USING ")[2] for row in found) == ["btree (city)", "btree (customer_id)"]
    packed = "SELECT relname FROM pg_class WHERE relname IN ('orders', 'wide') AND reloptions = '{fillfactor=70}'"
    assert len(shop.rows(packed)) == 2
    PostgresSink(empty, "q", "mirror").prepare([replace(ORDERS, schema="other")], [], IDENTITY, 100)
    assert shop.rows("SELECT reloptions FROM pg_class WHERE oid = 'other.orders'::regclass") == [(["fillfactor=90"],)]
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
