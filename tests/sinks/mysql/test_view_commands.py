"""Views in MySQL as commands show, check, compare and drop them, and the privileges that they need."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from airflow_cdc_provider.engine.comparison.compare import Difference
from airflow_cdc_provider.engine.core.errors import ForeignTable
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sinks.mysql.checks import check
from airflow_cdc_provider.engine.sinks.mysql.settings import MysqlSettings
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.mariadb import MariadbServer
from tests.conftest import MARIADB_PRIVILEGES, PIPELINE_ROLE
from tests.sinks.begun_sink import Begun
from tests.sinks.mysql.begun_views import (
    CHANGED,
    assert_equal,
    begin,
    build,
    commit_random,
    compared,
)
from tests.sinks.mysql.prepared_sink import query
from tests.sinks.view_cases import SETTINGS, TARGETS, effect


def test_differences_are_found_and_named(mariadb: MariadbServer) -> None:
    begun = begin(mariadb)
    build(begun)
    assert begun.unit(200, 210, effect("shop.a", {n: (n, 0, n, 0) for n in range(1, 5)}))
    query(mariadb, "UPDATE dwd.left3 SET v = 7 WHERE k = 1")
    query(mariadb, "DELETE FROM dwd.left3 WHERE k = 2")
    query(mariadb, "INSERT INTO dwd.left3 (k, v) VALUES (9, NULL)")
    query(mariadb, "INSERT INTO dwd.multi (k, v) SELECT k, v FROM dwd.multi LIMIT 1")
    found = {each.view: each for each in compared(begun)}
    assert found["dwd.left3"].differences == (
        Difference({"k": "1"}, "different"),
        Difference({"k": "2"}, "missing"),
        Difference({"k": "9"}, "extra"),
    )
    assert (found["dwd.left3"].rows, found["dwd.left3"].difference_count) == (5, 3)
    assert found["dwd.multi"].difference_count in (0, 1)
    assert found["dwd.many"].difference_count == 0


def test_queued_anchors_and_those_that_are_not_built_are_left_out(mariadb: MariadbServer) -> None:
    views = [replace(view, refresh=3600.0) for view in SETTINGS]
    begun = begin(mariadb, views)
    build(begun)
    assert begun.unit(200, 210, effect("shop.a", {n: (n, 0, n, 0) for n in range(1, 5)}))
    found = {each.view: each for each in compared(begun)}
    assert (found["dwd.left3"].queued, found["dwd.left3"].difference_count) == (5, 0)  # the row 0 names the row 3
    assert isinstance(begun.sink, KeepsViews)
    recorded = begun.sink.recorded_views()
    assert recorded is not None
    assert recorded.applied == 210
    assert {version.view.name: recorded.queued.get(version.number) for version in recorded.versions}["left3"] == 5


def test_a_view_is_explained_and_dropped(mariadb: MariadbServer) -> None:
    begun = begin(mariadb)
    assert isinstance(begun.sink, MysqlSink)
    assert isinstance(begun.sink, KeepsViews)
    before = begun.sink.explain_view(SETTINGS[0], TARGETS)
    assert [index.partition(" ON ")[2] for index in before.indexes] == [
        "`copy`.`a` (`fk`)",
        "`copy`.`b` (`fk`)",
        "`copy`.`a` (`me`)",
    ]
    build(begun)
    after = begun.sink.explain_view(SETTINGS[0], TARGETS)
    assert after.indexes == ()
    assert all(rows is not None for rows in after.rows_per_change.values())
    sink = MysqlSink(mariadb.dsn, "p", "mirror", views=SETTINGS[1:])
    assert sink.drop_views() == ["dwd.left3"]
    assert sink.drop_views() == []
    assert query(mariadb, "SHOW TABLES FROM dwd LIKE 'left3'") == []
    sink.drop()
    assert sink.view_versions() == []
    assert len(query(mariadb, "SHOW TABLES FROM dwd")) == 3


def findings(server: MariadbServer, user: str = "root", **view: Any) -> dict[str, str]:
    """Return what a check of the sink finds about its privileges and views."""
    settings = MysqlSettings(server.dsn.replace("//root@", f"//{user}@"), views=(ViewSettings("dwd", "v", **view),))
    checks = Checks(convert_driver_errors)
    check(settings, checks, "p", TARGETS)
    named = [each for each in checks.findings if each.check in ("sink privileges", "view dwd.v")]
    return {each.check: f"{each.message} {each.error.solution if each.error else ''}" for each in named}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SELECT a.id, a.v FROM shop.a", r"can be kept equal"),
        ("SELECT a.id, b.v FROM shop.a JOIN shop.b ON b.fk = a.fk", r"2 indexes will be created"),
        ("SELECT a.v, a.fk, count(*) AS n FROM shop.a GROUP BY a.v", r"refuses its SQL: .*GROUP BY"),
        ("SELECT a.id, dwd.twice(a.v) AS w FROM shop.a", r"dwd\.twice is not allowed"),
        ("SELECT a.id, dwd.pure(a.v) AS w FROM shop.a", r"can be kept equal"),
        ("SELECT a.id, unknown_function(a.v) AS w FROM shop.a", r"refuses its SQL"),
        ("SELECT id, `a`.v AS w FROM a -- comment\n WHERE a.v % 2 = 0 OR a.v IN (1, 2);", r"can be kept equal"),
        (
            "SELECT a.id, a.v DIV 2 AS w, a.v / 2 AS q, concat(a.v, '%', \"s\") AS s, a.v || a.fk AS o, a.v ^ 2 AS x,"
            " date_format('2020-01-02' + interval a.v day, '%M') AS m, if(a.v <=> NULL, 1, 2) AS i, !a.v AS n,"
            " cast(a.v AS char(3)) AS c, convert(a.v, decimal(5,2)) AS d, b.v > ifnull(a.v, 0) AS y,"
            " date_add(DATE '2020-01-02', interval 1 day) AS t, a.v REGEXP '1$' AS r, 1 = (a.v RLIKE '^1') AS r2,"
            " a.v NOT REGEXP concat(b.v, '1') AS r3"
            " FROM shop.a LEFT JOIN shop.b ON b.id = a.fk WHERE NOT a.v BETWEEN 3 AND 4",
            r"can be kept equal",
        ),
        ("SELECT a.id, space(a.v) AS w FROM shop.a", r"was not understood: it was read as .*REPEAT"),
        ("SELECT a.fk AS k, count(DISTINCT a.v) AS n FROM shop.a GROUP BY k HAVING n > 1", r"can be kept equal"),
        ("SELECT b.id, a.v FROM shop.a RIGHT JOIN shop.b ON a.id = b.fk", r"can be kept equal"),
        ("SELECT a.id, @x AS w FROM shop.a", r"has a variable"),
        ("SELECT a.id, group_concat(a.v) AS w FROM shop.a GROUP BY a.id", r"depends on the order"),
        *(
            (f"SELECT a.id, {call} AS w FROM shop.a", r"is not allowed, because it depends on")
            for call in (
                "now()",
                "rand()",
                "uuid()",
                "sysdate()",
                "connection_id()",
                "user()",
                "sys_guid()",
                "curtime(6)",
            )
        ),
    ],
)
def test_what_the_check_says_of_a_view(mariadb: MariadbServer, text: str, said: str) -> None:
    begin(mariadb, ())
    query(mariadb, "CREATE DATABASE dwd")
    query(mariadb, "CREATE FUNCTION dwd.twice(n INT) RETURNS INT RETURN 2 * n")
    query(mariadb, "CREATE FUNCTION dwd.pure(n INT) RETURNS INT DETERMINISTIC NO SQL RETURN 2 * n")
    assert re.search(said, findings(mariadb, sql=text)["view dwd.v"])


def test_a_table_that_is_not_there_yet_is_checked_later(mariadb: MariadbServer) -> None:
    found = findings(mariadb, sql="SELECT a.id, a.v FROM shop.a")
    assert "when its tables exist" in found["view dwd.v"]


def test_lacking_privileges_are_named(mariadb: MariadbServer) -> None:
    found = findings(mariadb, PIPELINE_ROLE, sql="SELECT a.id, a.v FROM shop.a")
    assert "CREATE TEMPORARY TABLES ON `airflow_cdc`.*" in found["sink privileges"]
    assert "TRIGGER ON `dwd`.*" in found["sink privileges"]
    assert "view dwd.v" not in found


def test_a_name_that_is_taken_is_refused(mariadb: MariadbServer) -> None:
    query(mariadb, "CREATE DATABASE dwd")
    query(mariadb, "CREATE TABLE dwd.multi (id INT)")
    with pytest.raises(ForeignTable, match=r"view dwd\.multi: the sink has a table of this name"):
        begin(mariadb)
    assert query(mariadb, "SELECT COUNT(*) FROM airflow_cdc.pipelines") == [(0,)]


@pytest.fixture
def restricted(mariadb: MariadbServer) -> Iterator[MariadbServer]:
    """Return the server for a user that has only the documented privileges."""
    grants = {"airflow_cdc": f"{MARIADB_PRIVILEGES}, CREATE TEMPORARY TABLES", "dwd": MARIADB_PRIVILEGES}
    for name, privileges in grants.items():
        query(mariadb, f"GRANT {privileges} ON {name}.* TO {PIPELINE_ROLE}@'127.0.0.1'")
    yield mariadb
    query(mariadb, f"REVOKE {MARIADB_PRIVILEGES} ON dwd.* FROM {PIPELINE_ROLE}@'127.0.0.1'")
    query(mariadb, f"REVOKE CREATE TEMPORARY TABLES ON airflow_cdc.* FROM {PIPELINE_ROLE}@'127.0.0.1'")


def test_the_documented_privileges_suffice(restricted: MariadbServer) -> None:
    def as_user(views: Sequence[ViewSettings]) -> MysqlSink:
        dsn = restricted.dsn.replace("//root@", f"//{PIPELINE_ROLE}@")
        return MysqlSink(dsn, "p", "mirror", views=tuple(views))

    begun = begin(restricted, sink=as_user(SETTINGS))
    build(begun)
    sink = as_user(CHANGED)
    begun = Begun(begun.store, sink, sink.take_epoch("next"))
    build(begun)
    rnd = random.Random(8)
    for _ in range(5):
        commit_random(begun, rnd)
    build(begun, everything=True)
    assert_equal(restricted, CHANGED)
    assert not sum(each.difference_count for each in compared(begun))
    assert sink.drop_views() == ["dwd.multi"]
