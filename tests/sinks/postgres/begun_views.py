"""A started Postgres sink with views over two tables, for the tests of views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.begun_sink import IDENTITY, Begun, text
from tests.support.postgres_store import PostgresStore

Row = tuple[str | None, ...]
START = 100

WIDE = "SELECT o.id, o.total, c.city FROM shop.orders o LEFT JOIN shop.customers c ON c.id = o.customer_id"
WHOLE = (
    "SELECT o.id, o.customer_id, o.total, o.note, c.city FROM shop.orders o"
    " LEFT JOIN shop.customers c ON c.id = o.customer_id"
)
"""Reads all columns of its root."""
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


def a_shop(dsn: str, **views: str | ViewSettings) -> Shop:
    """Return a shop with three orders of two customers, and its views built."""
    shop = Shop(dsn, **views)
    shop.unit({1: ("1", "10", "a"), 2: ("1", "20", "b"), 3: ("2", "30", "c")}, {1: ("Rome", "Ada"), 2: ("Oslo", "Ben")})
    shop.build()
    return shop
