"""Steps of views in MySQL: kills at each of them, and changes of the tables' definitions."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.errors import CannotFollow, Failpoint, Fenced, TargetConflict
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.mysql import view_store as mysql_view_store
from airflow_cdc_provider.engine.sinks.mysql import views as mysql_views
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.transactional import view_upkeep
from airflow_cdc_provider.engine.sinks.transactional import views as transactional_views
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import IDENTITY, Begun
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
from tests.sinks.view_cases import CHUNKS, SETTINGS, TARGETS, effect
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


def replacing(mariadb: MariadbServer) -> tuple[Begun, ViewKeeper]:
    """Return a pipeline whose views are in place, and the keeper of another run that has other definitions."""
    build(begin(mariadb))
    sink = MysqlSink(mariadb.dsn, "p", "mirror", views=CHANGED)
    begun = Begun(MysqlStore(mariadb), sink, sink.take_epoch("next"))
    return begun, sink.view_keeper(begun.epoch)


def test_an_exchange_waits_for_readers_while_units_go_on(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql_view_store, "_EXCHANGE_SECONDS", 1.0)
    begun, keeper = replacing(mariadb)
    rnd = random.Random(9)
    with closing(mariadb.connect()) as reader, reader.cursor() as cursor:
        cursor.execute("START TRANSACTION")
        for view in CHANGED:
            cursor.execute(f"SELECT * FROM dwd.{view.name}")
        while keeper.step():
            commit_random(begun, rnd)
        assert not query(mariadb, "SELECT * FROM airflow_cdc.pending")
        commit_random(begun, rnd)
        assert_equal(mariadb, SETTINGS[:3])  # the former versions still move
    monkeypatch.setattr(keeper, "_blocked_until", {})
    while keeper.step(everything=True):
        pass
    assert_equal(mariadb, CHANGED)


def test_a_trigger_that_an_exchange_would_lose_is_named(mariadb: MariadbServer) -> None:
    begun, _ = replacing(mariadb)
    query(mariadb, "CREATE TRIGGER dwd.mine BEFORE INSERT ON dwd.left3 FOR EACH ROW SET @x = 1")
    with pytest.raises(TargetConflict, match=r"view dwd\.left3: its table cannot be replaced: .*[Tt]rigger"):
        build(begun)
    assert not query(mariadb, "SELECT * FROM airflow_cdc.pending")
    commit_random(begun, random.Random(10))
    assert_equal(mariadb, SETTINGS[:1])
    query(mariadb, "DROP TRIGGER dwd.mine")
    build(begun, everything=True)
    assert_equal(mariadb, CHANGED)


def test_a_keeper_that_was_overtaken_changes_nothing(mariadb: MariadbServer) -> None:
    begun, keeper = replacing(mariadb)
    assert keeper.step()
    tables = MysqlStore(mariadb).names()
    assert isinstance(begun.sink, MysqlSink)
    versions = begun.sink.view_versions()
    begun.sink.take_epoch("another")
    with pytest.raises(Fenced):
        keeper.step()
    assert (MysqlStore(mariadb).names(), begun.sink.view_versions()) == (tables, versions)


def test_views_are_built_again_after_a_restart(mariadb: MariadbServer) -> None:
    begun = begin(mariadb)
    build(begun)
    assert isinstance(begun.sink, MysqlSink)
    begun.sink.restart(begun.epoch, TARGETS, IDENTITY, 500)
    build(begun)
    assert all(not version.complete for version in begun.sink.view_versions() if version.kept)  # nothing to build from
    for target, chunk in zip(TARGETS, CHUNKS, strict=True):
        begun.copy(chunk, ("4", "5", "6", "4"), ("5", "4", "3", "4"), target=target)
    commit_random(begun, random.Random(11))
    build(begun)
    assert_equal(mariadb)
