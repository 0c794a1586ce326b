"""Views in a Postgres mirror: after every unit they equal their SELECTs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import psycopg
import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.sinks.begun_sink import IDENTITY, Begun
from tests.support.postgres_store import PostgresStore

COLUMNS = ("id", "fk", "v", "me")


def table(name: str, oid: int) -> Target:
    columns = tuple(Column(c, "integer", 23, None, c == "id", True, attnum=n + 1) for n, c in enumerate(COLUMNS))
    return Target(Table(oid, "shop", name, columns, ("id",), "d", None, (Leaf(oid, "shop", name),), "r"), "copy", name)


TARGETS = [table(name, n) for n, name in enumerate("abc", start=1)]
VIEWS = {
    "left3": "SELECT a.id AS k, a.v, b.v AS bv, c.v AS cv, m.v AS mv FROM shop.a LEFT JOIN shop.b ON b.id = a.fk"
    " AND b.v > 1 LEFT JOIN shop.c ON c.id = b.fk LEFT JOIN shop.a m ON m.id = a.me WHERE a.v < 9",
    "many": "SELECT a.id AS k, count(b.id) n, sum(b.v) s, min(c.v) mn FROM shop.a JOIN shop.b ON b.fk = a.fk"
    " LEFT JOIN shop.c ON c.id = b.id AND c.v <> a.v GROUP BY a.id",
    "grp": "SELECT b.v AS k, count(*) n, sum(a.v) s FROM shop.b JOIN shop.a ON a.fk = b.id"
    " LEFT JOIN shop.c ON c.fk = a.id GROUP BY b.v HAVING count(*) > 1",
    "multi": "SELECT a.id AS k, b.v FROM shop.a JOIN shop.b ON b.fk = a.fk LEFT JOIN shop.c ON c.fk = b.v",
}
Row = tuple[int | None, ...]


@pytest.fixture(scope="module")
def database(target_server: PostgresServer) -> Iterator[str]:
    create_database(target_server, "views")
    yield target_server.dsn("views")
    drop_database(target_server, "views")


def effect(label: str, rows: Mapping[int, Row | None], truncate: bool = False) -> Effect:
    """Return the effect of a piece; a key without a row is erased."""
    columns = {"erased": pa.array([row is None for row in rows.values()])}
    for n in range(len(COLUMNS)):
        cells = [key if n == 0 else None if row is None else row[n] for key, row in rows.items()]
        columns[f"c{n}"] = pa.array([None if cell is None else str(cell) for cell in cells], pa.large_string())
    return Effect(label, truncate, pa.table(columns))


def random_effects(rnd: random.Random) -> Sequence[Effect]:
    def value(below: int = 8) -> int | None:
        return rnd.choice([None, *range(below)])

    effects = []
    for target in rnd.sample(TARGETS, rnd.randint(1, 3)):
        rows: dict[int, Row | None] = {}
        for _ in range(rnd.randint(1, 4)):
            key = rnd.randint(0, 11)
            rows[key] = None if rnd.random() < 0.3 else (key, value(12), value(), value(12))
        effects.append(effect(target.table.label, rows, rnd.random() < 0.02))
    return effects


def test_views_equal_their_selects_after_every_unit(database: str) -> None:
    store = PostgresStore(database)
    views = tuple(ViewSettings("dwd", name, text) for name, text in VIEWS.items())
    sink = PostgresSink(database, "p", "mirror", views=views)
    sink.prepare(TARGETS, [Chunk(t.table.label, 0, None, None) for t in TARGETS], IDENTITY, 100)
    begun = Begun(store, sink, sink.take_epoch("test"))
    for t in TARGETS:
        begun.copy(Chunk(t.table.label, 0, None, None), ("0", "1", "2", "3"), target=t)
    lsn = 200
    begun.unit(100, lsn)
    keeper = ViewKeeper(sink, begun.epoch)
    while keeper.step():
        pass
    rnd = random.Random(1)
    with psycopg.connect(database, autocommit=True) as connection:
        for _ in range(100):
            pieces = [begun.piece(*random_effects(rnd), index=index) for index in range(rnd.randint(1, 2))]
            assert sink.commit(begun.epoch, lsn, lsn + 10, pieces)
            lsn += 10
            for name, text in VIEWS.items():
                found = connection.execute(f"SELECT * FROM dwd.{name}").fetchall()
                wanted = connection.execute(text.replace("shop.", "copy.")).fetchall()
                assert sorted(map(str, found)) == sorted(map(str, wanted)), name
