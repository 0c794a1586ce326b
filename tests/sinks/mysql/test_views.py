"""Views in a MySQL mirror: after every unit they equal their SELECTs."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.comparison.compare import Difference
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import CannotFollow, Failpoint, ForeignTable
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sinks.mysql import view_store as mysql_view_store
from airflow_cdc_provider.engine.sinks.mysql import views as mysql_views
from airflow_cdc_provider.engine.sinks.mysql.checks import check
from airflow_cdc_provider.engine.sinks.mysql.settings import MysqlSettings
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.transactional import view_upkeep
from airflow_cdc_provider.engine.sinks.transactional import views as transactional_views
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.mariadb import MariadbServer
from tests.conftest import MARIADB_PRIVILEGES, PIPELINE_ROLE
from tests.sinks.begun_sink import IDENTITY, WATERMARK, Begun, batch
from tests.sinks.mysql.prepared_sink import query
from tests.sinks.view_cases import CHUNKS, SETTINGS, TARGETS, Row, effect, random_effects
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


def test_views_equal_their_selects_after_every_unit(mariadb: MariadbServer) -> None:
    begun, rnd = begin(mariadb), random.Random(1)
    build(begun)
    for _ in range(100):
        commit_random(begun, rnd)
        assert_equal(mariadb)
    assert [(each.view, each.difference_count) for each in compared(begun)] == [(each.label, 0) for each in SETTINGS]


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


def test_rows_that_are_read_again_move_the_views(mariadb: MariadbServer) -> None:
    begun, rnd = begin(mariadb), random.Random(2)
    build(begun)
    for n in range(30):
        commit_random(begun, rnd)
        target = rnd.choice(TARGETS)
        keys = [str(key) for key in rnd.sample(range(12), 5)]
        rows = [(int(key), rnd.randint(0, 11), rnd.randint(0, 7), None) for key in keys if rnd.random() < 0.7]
        if n % 5 == 4:
            reread(begun, target, None, rows)
            build(begun)
        else:
            reread(begun, target, keys, rows)
        assert_equal(mariadb)


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


@pytest.mark.parametrize("how", [{"max_rows": 2}, {"refresh": 3600.0}])
def test_what_takes_too_long_is_queued(mariadb: MariadbServer, how: dict[str, Any]) -> None:
    views = [replace(view, **how) for view in SETTINGS]
    begun, rnd = begin(mariadb, views), random.Random(4)
    build(begun)
    assert isinstance(begun.sink, MysqlSink)
    queued = 0
    for _ in range(20):
        commit_random(begun, rnd)
        queued += sum(version.behind is not None for version in begun.sink.view_versions())
        if rnd.random() < 0.5:
            build(begun, everything=True)
            assert all(version.behind is None for version in begun.sink.view_versions())
            assert_equal(mariadb)
    assert queued > 20
    build(begun, everything=True)
    assert_equal(mariadb)


KEY = ("name", "n")
KINDS = {
    "name": "text",
    "n": "bigint",
    "word": "text",
    "price": "numeric(10,2)",
    "size": "double precision",
    "at": "timestamp without time zone",
    "flag": "boolean",
    "data": "bytea",
    "doc": "jsonb",
    "body": "text",
}
VALUES = {
    "name": ["a", "A", "a ", "ä", 'it\'s \\ "quoted" %s'],
    "n": ["1", "2", "-9223372036854775808"],
    "word": ["a", "A", "a ", "", "%", None],
    "body": ["x" * 1100 + "y", "x" * 1100 + "z", None],
    "price": ["1.00", "1.10", "-0.01", None],
    "size": ["0.1", "1e+100", "0.30000000000000004", None],
    "at": ["2020-01-01 00:00:00", "2020-01-01 00:00:00.000001", None],
    "flag": ["t", "f", None],
    "data": ["\\x", "\\x00", "\\x41", None],
    "doc": ['{"a": 1}', '{"a": 1.0}', None],
}
TYPED = Target(
    Table(
        9,
        "shop",
        "typed",
        tuple(
            Column(name, kind, 0, None, name in KEY, True, attnum=n) for n, (name, kind) in enumerate(KINDS.items(), 1)
        ),
        KEY,
        "d",
        None,
        (Leaf(9, "shop", "typed"),),
        "r",
    ),
    "copy",
    "typed",
)
COUNTS = "count(*) AS m, min(t.data) AS d, group_concat(t.n ORDER BY t.n, t.name) AS s FROM shop.typed t GROUP BY"
SELECTS = {
    "plain": f"SELECT {', '.join(f't.{name}' for name in KINDS)} FROM shop.typed t",
    "pairs": "SELECT t.name, t.n, t.word, u.price AS p, u.doc AS d, u.body FROM shop.typed t"
    " JOIN shop.typed u ON u.word = t.word",
    "two": "SELECT t.word AS w, t.price AS p, sum(t.size) AS s, max(upper(t.name)) AS m FROM shop.typed t"
    " LEFT JOIN shop.typed u ON u.n = t.n AND u.flag <> t.flag GROUP BY t.word, t.price",
    # The server groups by the beginning of long texts.
    **{f"by_{name}": f"SELECT t.{name} AS k, {COUNTS} t.{name}" for name in KINDS if name != "body"},
}
OF_TYPES = tuple(ViewSettings("dwd", name, text) for name, text in SELECTS.items())


def typed_effect(rnd: random.Random) -> Effect:
    rows: dict[tuple[str | None, ...], dict[str, str | None] | None] = {}
    for _ in range(rnd.randint(1, 6)):
        row = {name: rnd.choice(values) for name, values in VALUES.items()}  # type: ignore[arg-type]
        rows[row["name"], row["n"]] = None if rnd.random() < 0.3 else row
    columns = {"erased": pa.array([row is None for row in rows.values()])}
    for place, name in enumerate(KINDS):
        cells = [dict(zip(KEY, key, strict=True)).get(name) if row is None else row[name] for key, row in rows.items()]
        columns[f"c{place}"] = pa.array(cells, pa.large_string())
    return Effect(TYPED.table.label, False, pa.table(columns))


def test_values_of_all_types_are_compared_exactly(mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are long, or differ in case and spaces; views are built in small ranges while units are applied."""
    monkeypatch.setattr(transactional_views, "FIRST_PORTION", 2)
    sink = MysqlSink(mariadb.dsn, "p", "mirror", views=OF_TYPES)
    chunk = Chunk(TYPED.table.label, 0, None, None)
    sink.prepare([TYPED], [chunk], IDENTITY, 100)
    begun = Begun(MysqlStore(mariadb), sink, sink.take_epoch("test"))
    begun.copy(chunk, target=TYPED)
    begun.unit(100, 200)
    rnd = random.Random(5)

    def unit() -> None:
        lsn = committed(begun)
        assert begun.unit(lsn, lsn + 10, typed_effect(rnd))

    for _ in range(4):
        unit()
    keeper = sink.view_keeper(begun.epoch)
    while keeper.step():
        monkeypatch.setattr(keeper, "_portions", {})
        if rnd.random() < 0.2:
            unit()
    assert_equal(mariadb, OF_TYPES)
    for _ in range(25):
        unit()
        assert_equal(mariadb, OF_TYPES)
    assert {each.view: each.difference_count for each in compared(begun)} == {each.label: 0 for each in OF_TYPES}


PLACES = sorted(
    name
    for file in (view_upkeep, transactional_views, mysql_view_store, mysql_views)
    for name in re.findall(r'\bfailpoint\("([^"]+)"\)', Path(file.__file__).read_text(encoding="utf-8"))
)


CHANGES = {"left3": ("b.v AS bv", "b.v + 1 AS bv"), "many": ("min(c.v)", "max(c.v)"), "grp": ("sum(a.v)", "min(a.v)")}
CHANGED = tuple(
    replace(view, sql=view.sql.replace(*CHANGES[view.name]), max_rows=2) for view in SETTINGS if view.name in CHANGES
)
"""The views with other definitions, queues for more than two rows, and without one of them."""


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
