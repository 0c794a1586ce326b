"""A started MySQL sink with views, for the tests of views."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import IDENTITY, WATERMARK, Begun, batch
from tests.sinks.view_cases import CHUNKS, SETTINGS, TARGETS, Row, random_effects
from tests.support.given_rows import GivenRows
from tests.support.mysql_store import MysqlStore


def begin(server: MariadbServer, views: Sequence[ViewSettings] = SETTINGS, sink: MysqlSink | None = None) -> Begun:
    """Start a pipeline of three tables with a row each, at the applied LSN 200."""
    sink = sink or MysqlSink(server.dsn, "p", "mirror", views=tuple(views))
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


def committed(begun: Begun) -> int:
    """Return the applied LSN."""
    return int(begun.record.applied)


def commit_random(begun: Begun, rnd: random.Random) -> None:
    """Commit a random unit of one or two pieces."""
    lsn = committed(begun)
    pieces = [begun.piece(*random_effects(rnd), index=index) for index in range(rnd.randint(1, 2))]
    assert begun.sink.commit(begun.epoch, lsn, lsn + 10, pieces)


def compared(begun: Begun) -> list[ViewResult]:
    assert isinstance(begun.sink, KeepsViews)
    return list(begun.sink.compare_views())


def reread(
    begun: Begun, target: Target, keys: Sequence[str] | None, rows: Sequence[Row], before: Target | None = None
) -> None:
    """Read rows of a table again."""
    texts = [tuple(None if cell is None else str(cell) for cell in row) for row in rows]
    watermark = replace(WATERMARK, high=committed(begun))
    chosen = None if keys is None else frozenset((key,) for key in keys)
    batches = [batch(*texts)] if texts else []
    begun.sink.replace(begun.epoch, target, chosen, GivenRows(batches, lambda: watermark), before or target)


CHANGES = {"left3": ("b.v AS bv", "b.v + 1 AS bv"), "many": ("min(c.v)", "max(c.v)"), "grp": ("sum(a.v)", "min(a.v)")}
CHANGED = tuple(
    replace(view, sql=view.sql.replace(*CHANGES[view.name]), max_rows=2) for view in SETTINGS if view.name in CHANGES
)
"""The views with other definitions, queues for more than two rows, and without one of them."""
