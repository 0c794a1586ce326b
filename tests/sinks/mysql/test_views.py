"""Views in a MySQL mirror: after every unit they equal their SELECTs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.transactional import views as transactional_views
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import IDENTITY, Begun
from tests.sinks.mysql.begun_views import (
    assert_equal,
    begin,
    build,
    commit_random,
    committed,
    compared,
    reread,
)
from tests.sinks.view_cases import SETTINGS, TARGETS, WHOLE_SETTINGS
from tests.support.mysql_store import MysqlStore

SETS = [
    pytest.param(SETTINGS, id="parts"),
    pytest.param(WHOLE_SETTINGS, id="whole"),
    pytest.param((*SETTINGS, *WHOLE_SETTINGS), id="both"),
]


@pytest.mark.parametrize("views", SETS)
def test_views_equal_their_selects_after_every_unit(mariadb: MariadbServer, views: tuple[ViewSettings, ...]) -> None:
    begun, rnd = begin(mariadb, views), random.Random(1)
    build(begun)
    for _ in range(100):
        commit_random(begun, rnd)
        assert_equal(mariadb, views)
    assert [(each.view, each.difference_count) for each in compared(begun)] == [(each.label, 0) for each in views]


@pytest.mark.parametrize("views", SETS)
def test_rows_that_are_read_again_move_the_views(mariadb: MariadbServer, views: tuple[ViewSettings, ...]) -> None:
    begun, rnd = begin(mariadb, views), random.Random(2)
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
        assert_equal(mariadb, views)


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
