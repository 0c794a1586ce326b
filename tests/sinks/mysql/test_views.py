"""Views in a MySQL mirror: after every unit they equal their SELECTs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import IDENTITY, Begun
from tests.sinks.view_cases import CHUNKS, SETTINGS, TARGETS, random_effects
from tests.support.mysql_store import MysqlStore


def begin(server: MariadbServer, views: Sequence[ViewSettings] = SETTINGS) -> Begun:
    """Start a pipeline of three tables with a row each, at the applied LSN 200."""
    sink = MysqlSink(server.dsn, "p", "mirror", views=tuple(views))
    sink.prepare(TARGETS, CHUNKS, IDENTITY, 100)
    begun = Begun(MysqlStore(server), sink, sink.take_epoch("test"))
    for target, chunk in zip(TARGETS, CHUNKS, strict=True):
        begun.copy(chunk, ("0", "1", "2", "3"), target=target)
    begun.unit(100, 200)
    return begun


def build(begun: Begun, everything: bool = False) -> None:
    """Work on the views until nothing is left to do."""
    assert isinstance(begun.sink, MysqlSink)
    keeper = begun.sink.view_keeper(begun.epoch)
    while keeper.step(everything):
        pass


def assert_equal(server: MariadbServer, views: Sequence[ViewSettings] = SETTINGS) -> None:
    """Check that the views equal their SELECTs."""
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        for view in views:
            cursor.execute(f"SELECT * FROM {view.schema}.{view.name}")
            found = cursor.fetchall()
            cursor.execute(view.sql.replace("shop.", "copy."))
            assert sorted(map(str, found)) == sorted(map(str, cursor.fetchall())), view.name


def test_views_equal_their_selects_after_every_unit(mariadb: MariadbServer) -> None:
    begun = begin(mariadb)
    build(begun)
    rnd, lsn = random.Random(1), 200
    for _ in range(100):
        pieces = [begun.piece(*random_effects(rnd), index=index) for index in range(rnd.randint(1, 2))]
        assert begun.sink.commit(begun.epoch, lsn, lsn + 10, pieces)
        lsn += 10
        assert_equal(mariadb)
