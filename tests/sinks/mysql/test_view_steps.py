"""Steps of views in MySQL: kills at each of them, and changes of the tables' definitions."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.errors import CannotFollow, Failpoint
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.mysql import view_store as mysql_view_store
from airflow_cdc_provider.engine.sinks.mysql import views as mysql_views
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.transactional import view_upkeep
from airflow_cdc_provider.engine.sinks.transactional import views as transactional_views
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import Begun
from tests.sinks.mysql.begun_views import (
    CHANGED,
    assert_equal,
    begin,
    build,
    commit_random,
    committed,
    reread,
)
from tests.sinks.mysql.prepared_sink import query
from tests.sinks.view_cases import SETTINGS, TARGETS, effect
from tests.support.mysql_store import MysqlStore


def test_views_follow_a_changed_definition(mariadb: MariadbServer) -> None:
    begun = begin(mariadb)
    build(begun)
    assert isinstance(begun.sink, MysqlSink)
    numbers = [version.number for version in begun.sink.view_versions()]
    a = TARGETS[0]
    more = replace(a, table=replace(a.table, columns=(*a.table.columns, column("more", "text", 5))))
    begun.sink.redefine(begun.epoch, a, more)
    assert [version.number for version in begun.sink.view_versions()] == numbers  # no view reads the column
    wider = replace(
        a, table=replace(more.table, columns=(*a.table.columns[:2], column("v", "bigint", 3), *more.table.columns[3:]))
    )
    begun.sink.redefine(begun.epoch, more, wider)
    build(begun)
    assert_equal(mariadb)
    changed = [version.view.name for version in begun.sink.view_versions() if version.number not in numbers]
    assert sorted(changed) == ["grp", "left3", "many"]
    assert dict(described(mariadb, "left3"))["v"].startswith("bigint")
    lacking = replace(a, table=replace(wider.table, columns=tuple(c for c in wider.table.columns if c.name != "me")))
    with pytest.raises(CannotFollow, match=r"view dwd\.left3 cannot follow a change of shop\.a"):
        begun.sink.redefine(begun.epoch, wider, lacking)
    whole = replace(
        a,
        table=replace(
            a.table, columns=tuple(replace(c, type="text") if c.name == "v" else c for c in wider.table.columns)
        ),
    )
    reread(begun, whole, None, [(1, 2, 3, 4, None)], wider)
    build(begun)
    assert_equal(mariadb)
    assert dict(described(mariadb, "left3"))["v"] == "longtext"


def column(name: str, kind: str, attnum: int) -> Column:
    return Column(name, kind, 0, None, False, True, attnum=attnum)


def described(server: MariadbServer, view: str) -> list[tuple[str, str]]:
    return [(str(row[0]), str(row[1])) for row in query(server, f"SHOW COLUMNS FROM dwd.{view}")]


PLACES = sorted(
    name
    for file in (view_upkeep, transactional_views, mysql_view_store, mysql_views)
    for name in re.findall(r'\bfailpoint\("([^"]+)"\)', Path(file.__file__).read_text(encoding="utf-8"))
)


def drop_indexes(server: MariadbServer, table: str) -> None:
    """Drop the indexes that the upkeep of views needs."""
    found = query(server, f"SHOW INDEX FROM copy.{table} WHERE Key_name LIKE 'airflow_cdc%'")
    for name in {row[2] for row in found}:
        query(server, f"DROP INDEX {name} ON copy.{table}")


def work(server: MariadbServer, place: str) -> None:
    """Exchange views for others and drain their queues, until the process is killed."""
    os.environ[VARIABLE] = f"{place}:kill"
    sink = MysqlSink(server.dsn, "p", "mirror", views=CHANGED)
    begun = Begun(MysqlStore(server), sink, sink.take_epoch("other"))
    rnd = random.Random(6)
    build(begun)
    for _ in range(5):
        commit_random(begun, rnd)
        build(begun, everything=True)


@pytest.mark.parametrize("place", PLACES)
def test_another_keeper_continues_after_a_kill(mariadb: MariadbServer, place: str) -> None:
    build(begin(mariadb))
    for table in ("a", "b", "c") if place == "after-view-index" else ():
        drop_indexes(mariadb, table)
    process = multiprocessing.get_context("fork").Process(target=work, args=(mariadb, place))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    sink = MysqlSink(mariadb.dsn, "p", "mirror", views=CHANGED)
    begun = Begun(MysqlStore(mariadb), sink, sink.take_epoch("next"))
    sink.sweep(begun.epoch)
    rnd = random.Random(7)
    commit_random(begun, rnd)
    build(begun, everything=True)
    assert_equal(mariadb, CHANGED)
    commit_random(begun, rnd)
    build(begun, everything=True)
    assert_equal(mariadb, CHANGED)
    left = [
        str(name)
        for (name,) in query(
            mariadb, "SELECT table_name FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
        )
    ]
    assert not [name for name in left if name.startswith("view_")]
    assert sum(name.startswith("queue_") for name in left) == len(sink.view_versions())
    assert not query(mariadb, "SELECT * FROM airflow_cdc.pending")


@pytest.mark.parametrize("place", ["before-alteration", "after-alteration"])
def test_views_follow_an_alteration_only_if_it_is_made(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The file already has the definition for a column that is about to be renamed, and that has an index."""
    begun = begin(mariadb)
    build(begun)
    a = TARGETS[0]
    columns = tuple(replace(each, name="other", type="text") if each.name == "fk" else each for each in a.table.columns)
    after = replace(a, table=replace(a.table, columns=columns))
    views = tuple(replace(view, sql=view.sql.replace("a.fk", "a.other")) for view in SETTINGS)
    sink = MysqlSink(mariadb.dsn, "p", "mirror", views=views)
    begun = Begun(MysqlStore(mariadb), sink, sink.take_epoch("other"))
    build(begun)  # the new definitions do not fit yet
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        sink.redefine(begun.epoch, a, after)
    monkeypatch.undo()
    made = place == "after-alteration"
    begun = Begun(MysqlStore(mariadb), sink, sink.take_epoch("next"))
    build(begun)
    assert begun.record.targets[0].table.columns[1].name == ("other" if made else "fk")
    assert_equal(mariadb, views if made else SETTINGS)
    if not made:
        sink.redefine(begun.epoch, a, after)
        build(begun)
    assert_equal(mariadb, views)
    lsn = committed(begun)
    changes = {5: (5, 0, 1, None), 0: (0, 3, 2, 5)}
    assert begun.unit(lsn, lsn + 10, effect("shop.a", changes), effect("shop.b", {0: (0, 0, 2, 5)}))
    assert_equal(mariadb, views)
