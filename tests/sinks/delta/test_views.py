"""Views of a Delta mirror, on real tables: moved after random units, redefined, interrupted, overtaken and rebuilt."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    ConfigError,
    Failpoint,
    Fenced,
    ForeignTable,
    TargetConflict,
    ViewRefused,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.delta.maintenance import maintain
from airflow_cdc_provider.engine.sinks.delta.plugin import DeltaPlugin
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.view_keeper import DeltaViewKeeper
from airflow_cdc_provider.engine.sinks.delta.view_record import views_of
from airflow_cdc_provider.engine.sinks.delta.view_rows import ViewRows
from airflow_cdc_provider.engine.sinks.record_log.record_contents import targets_of
from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.begun_sink import IDENTITY
from tests.sinks.delta.begun_views import JOINED, START, Lake, rows, states, values, versions, view
from tests.sinks.view_cases import TARGETS, effect, random_effects
from tests.support.delta_spark import delta_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


@pytest.mark.thorough
def test_random_units_move_views_of_all_kinds(spark: SparkSession, tmp_path: Path) -> None:
    rnd = random.Random(7)
    lake = Lake(tmp_path)
    lake.unit(
        *(
            effect(target.table.label, {key: (key, key % 5, key % 4, key % 3) for key in range(12)})
            for target in TARGETS
        )
    )
    lake.drain()
    assert min(lake.verify().values()) > 0
    for emptied in (False, True):
        for _ in range(3):
            lake.unit(*random_effects(rnd))
        if emptied:
            lake.unit(effect("shop.b", values(1, 2), truncate=True))
        lake.drain()
        lake.verify()
    assert {version.behind for version in lake.sink.view_versions()} == {None}


def test_a_step_that_fails_is_done_once_by_the_next_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other units are applied before the step is repeated, which happens at the versions that it has pinned.

    Delta would not read these by default, because they are older than removed files are kept.
    """
    retention = {"delta.deletedFileRetentionDuration": "interval 0 hours"}
    lake = Lake(tmp_path, [view("multi")], **retention)
    lake.unit(effect("shop.a", values(1, 2, 3)), effect("shop.b", values(1, 2, 3)))
    places = (
        *("after-view-reconciled", "after-view-written"),  # of the build
        *("after-view-pinned", "before-view-written", "after-view-written", "after-view-moved"),
    )
    for n, place in enumerate(places):
        monkeypatch.setenv(VARIABLE, f"{place}:error")
        with pytest.raises(Failpoint):
            lake.work()
        monkeypatch.delenv(VARIABLE)
        lake.start()
        lake.unit(
            effect("shop.a", {**values(n, n + 3, v=n), 1: None if n % 2 else (1, 2, n, 1)}),
            effect("shop.b", {2: None, **values(n, v=n)}),
        )
    lake.drain()
    assert lake.verify()["dwd.multi"] > 0
    assert [version.number for version in lake.sink.view_versions()] == [1]
    assert "is built again" not in caplog.text

    # If the view leaves the file meanwhile, it stays as the step has left it.
    lake.unit(effect("shop.a", values(1, 2, v=6)), effect("shop.b", values(1, 2, v=6)))
    monkeypatch.setenv(VARIABLE, "after-view-written:error")
    with pytest.raises(Failpoint):
        lake.work()
    monkeypatch.delenv(VARIABLE)
    lake.open([])
    lake.start()
    lake.keeper.reconcile()
    lake.unit(effect("shop.a", {1: None}))
    assert lake.verify()["dwd.multi"] > 0


@pytest.mark.thorough
def test_an_overtaken_run_that_writes_late_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path, [view("multi")])
    lake.unit(effect("shop.a", values(1, 2)), effect("shop.b", values(1, 2)))
    lake.drain()
    lake.unit(effect("shop.a", {1: None, **values(3, v=3)}))
    sink, former, epoch = lake.sink, lake.keeper, lake.epoch
    (recorded,) = views_of(sink.view_contents())
    pinned = sink.pin_view(epoch, recorded, rebuild=False)
    assert pinned is not None
    assert pinned.reached is not None
    assert pinned.next is not None
    lake.start()
    lake.unit(effect("shop.a", values(1, v=9)))
    lake.drain()
    before = rows(spark, lake, "multi"), versions(spark, lake, "multi")
    late = ViewRows(sink.spark(), sink.layout, targets_of(sink.view_contents()), pinned.view)
    assert late.move(pinned.reached, pinned.next, sink.application) == 2
    late.build(pinned.next, sink.application)
    assert (rows(spark, lake, "multi"), versions(spark, lake, "multi")) == before
    for step in (former.step, lambda: sink.record_view(epoch, pinned, 1, 0.0), lambda: former.reached(0)):
        with pytest.raises(Fenced):
            step()
    lake.verify()


def test_changed_definitions_and_tables(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path, [JOINED, view("grp")])
    lake.unit(effect("shop.a", values(1, 2)), effect("shop.b", values(1, 2, v=5)))
    lake.drain()
    as_of = lake.applied

    # The file has a wider view, and no longer has the other one.
    wider = replace(JOINED, sql=JOINED.sql.replace("b.v AS bv", "b.v AS bv, b.me AS town"))
    lake.open([wider])
    lake.start()
    lake.unit(effect("shop.a", values(3)))
    lake.keeper.reconcile()
    shown = {version.view.label: version for version in lake.sink.view_versions()}
    assert not shown["dwd.joined"].in_place
    assert (shown["dwd.grp"].kept, shown["dwd.grp"].behind) == (False, as_of)
    lake.drain()
    assert rows(spark, lake) == [(1, 1, 5, 1), (2, 1, 5, 0), (3, 1, None, None)]
    assert list(lake.sink.drop_views()) == ["dwd.grp"]
    assert not (lake.root / "dwd" / "grp").exists()
    assert [version.view.label for version in lake.sink.view_versions()] == ["dwd.joined"]

    # A column that no view reads is dropped; one that a view reads stops the stream.
    before = TARGETS[1]
    id_, _, v, me = before.table.columns
    without = replace(before, table=replace(before.table, columns=(id_, v, me)))
    lake.sink.redefine(lake.epoch, before, without)
    renamed = replace(before, table=replace(before.table, columns=(id_, v, replace(me, name="place"))))
    with pytest.raises(CannotFollow, match=r"view dwd.joined cannot follow a change of shop.b: .*b.me"):
        lake.sink.redefine(lake.epoch, without, renamed)
    lake.drain()
    assert [version.number for version in lake.sink.view_versions()] == [3]

    # A definition that fits the changed table may be in the file before.
    lake.open([replace(wider, sql=wider.sql.replace("b.me", "b.place"))])
    lake.start()
    lake.drain()
    lake.sink.redefine(lake.epoch, without, renamed)
    lake.drain()
    assert rows(spark, lake)[0] == (1, 1, 5, 1)
    lake.verify()

    # A dropped table is built again; a view over a table that leaves the pipeline stays as it is.
    shutil.rmtree(lake.root / "dwd" / "joined")
    lake.start()
    lake.drain()
    assert len(rows(spark, lake)) == 3
    lake.sink.forget(lake.epoch, ["shop.b"])
    assert [(version.in_place, version.kept) for version in lake.sink.view_versions()] == [(True, False)]
    assert not lake.keeper.step(everything=True)


@pytest.mark.thorough
def test_a_view_is_built_again_when_a_version_is_gone_and_waits_while_tables_are_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(tmp_path, [replace(JOINED, refresh=60)], [Chunk("shop.b", 0, None, None)])
    lake.unit(effect("shop.a", values(1, 2)))
    assert not lake.keeper.step(everything=True)  # a chunk is not copied yet
    assert [state["state"] for state in states(lake)] == ["waiting"]
    lake.copy(TARGETS[1], Chunk("shop.b", 0, None, None), ("1", "0", "7", "0"))
    lake.drain()
    clock = [1000.0]
    lake.keeper = DeltaViewKeeper(lake.sink, lake.epoch, lambda: clock[0])
    lake.unit(effect("shop.a", values(2, v=2)))
    assert lake.keeper.step()
    lake.unit(effect("shop.a", values(3)))
    assert not lake.keeper.step()
    assert [(state["state"], state["as_of"]) for state in states(lake)] == [("queued", format_lsn(lake.applied - 10))]
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", 8)  # of VACUUM; by default 10,000
    name = f"delta.`{lake.root}/copy/a`"
    spark.sql(f"OPTIMIZE {name}").collect()
    spark.sql(f"VACUUM {name} RETAIN 0 HOURS").collect()
    clock[0] += 60
    assert lake.keeper.step()  # decides to build again
    lake.drain()
    assert rows(spark, lake) == [(1, 1, 7), (2, 2, None), (3, 1, None)]
    lake.verify()
    assert {table.table for table in maintain(lake.sink)} == {"shop.a", "shop.b", "dwd.joined"}

    # A table that has been dropped does not count as empty.
    lake.unit(effect("shop.a", values(4)))
    shutil.rmtree(lake.root / "copy" / "b")
    with pytest.raises(TargetConflict, match=r"copy\.b no longer exists"):
        lake.keeper.step(everything=True)
    assert len(rows(spark, lake)) == 3


def test_views_that_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    def refused(select: str, why: str, name: str = "dwd.v") -> None:
        schema, _, table = name.partition(".")
        with pytest.raises(ConfigError, match=f"view {name}: .*{why}"):
            Lake(tmp_path, [ViewSettings(schema, table, select)])

    refused("SELECT a.id, rand() AS r FROM shop.a", "random")
    refused("SELECT a.id, nothing(a.v) AS r FROM shop.a", "NOTHING")
    refused("SELECT a.id, first(b.v) AS r FROM shop.a JOIN shop.b ON b.fk = a.id GROUP BY a.id", "first depends")
    refused("SELECT a.id, map(a.id, 1) AS r FROM shop.a", "has the type map")
    refused("SELECT a.id, NULL AS r FROM shop.a", "has the type void")
    refused("SELECT a.id, 1 AS _metadata FROM shop.a", "reserved")
    refused("SELECT a.id FROM shop.a WHERE to_date('today') > DATE '2026-01-01'", "'today' is a moment")
    refused("SELECT a.id, timestamp 'Now' AS at FROM shop.a", "'Now' is a moment")
    refused('SELECT a.id, "a""b" AS text FROM shop.a', "two quotes")
    refused(JOINED.sql, "shop.a has a table of this name", "copy.a")
    given = {"path": str(tmp_path), "mode": "changelog", "views": {"dwd.v": {"sql": JOINED.sql}}}
    with pytest.raises(ConfigError, match="changelog"):
        DeltaSettings.parse(Section("sink", given, {}, False))
    assert not list(tmp_path.iterdir())

    spark.sql(f"CREATE TABLE delta.`{tmp_path}/dwd/joined` USING delta AS SELECT 1 AS id")
    with pytest.raises(ForeignTable, match=r"view dwd.joined: the sink has a table of this name"):
        Lake(tmp_path, [JOINED])

    lake = Lake(tmp_path, [ViewSettings("dwd", "share", "SELECT a.id, 100 / a.v AS share FROM shop.a")])
    lake.unit(effect("shop.a", values(1, 2)))
    lake.drain()
    lake.unit(effect("shop.a", values(2, v=0)))
    with pytest.raises(ViewRefused, match=r"view dwd.share cannot be brought up to date: .*DIVIDE_BY_ZERO"):
        lake.keeper.step(everything=True)
    lake.open([ViewSettings("dwd", "share", "SELECT a.id, 100 / nullif(a.v, 0) AS share FROM shop.a")])
    lake.start()
    lake.drain()
    assert rows(spark, lake, "share") == [(1, 100.0), (2, None)]

    other = DeltaPlugin().open(DeltaSettings(str(tmp_path), views=tuple(lake.sink.views)), "q")
    with pytest.raises(ForeignTable, match=r"view dwd.share: the table of this name belongs to pipeline 'p'"):
        other.prepare([replace(target, schema="copy2") for target in TARGETS], (), IDENTITY, START)


def test_types_and_names(spark: SparkSession, tmp_path: Path) -> None:
    """Zero and minus zero are equal in Spark, but a view may show the difference."""
    kinds = {
        "id": ("bigint", 20),
        "Ord er": ("text", 25),
        "ratio": ("double precision", 701),
        "at": ("timestamp", 1114),
    }
    columns = tuple(
        Column(name, kind, oid, None, name == "id", True, attnum=n)
        for n, (name, (kind, oid)) in enumerate(kinds.items(), 1)
    )
    table = Table(9, "Shop", "Line Items", columns, ("id",), "d", None, (Leaf(9, "Shop", "Line Items"),), "r")
    select = (
        "SELECT i.`Ord er` AS order_no, count(*) AS n, sum(i.ratio) AS total, max(CAST(i.ratio AS STRING)) AS shown,"
        " max(i.at) AS last, 'it''s' AS said FROM `Shop`.`Line Items` AS i GROUP BY 1"
    )
    views = [
        ViewSettings("d w", "Per Order", select),
        ViewSettings("d w", "each", "SELECT i.id, i.ratio FROM `Shop`.`Line Items` AS i WHERE i.ratio < 1"),
    ]
    lake = Lake(tmp_path, views, targets=[Target(table, "copy", "Line Items")])

    def items(*given: tuple[str | None, ...]) -> Effect:
        cells = zip(*given, strict=True)
        arrays = {f"c{n}": pa.array(column, pa.large_string()) for n, column in enumerate(cells)}
        return Effect(table.label, False, pa.table({"erased": pa.array([False] * len(given)), **arrays}))

    lake.unit(items(("1", "x", "0.0", "2026-01-01 00:00:00"), ("2", None, "NaN", None), ("3", "x", "-0.0", None)))
    lake.drain()
    lake.unit(items(("1", "x", "-0.0", "2026-01-02 00:00:00"), ("4", None, "1.5", None)))
    lake.drain()
    found = spark.sql(f"SELECT order_no, n, shown, said FROM delta.`{lake.root}/d w/Per Order` ORDER BY ALL").collect()
    assert [tuple(row) for row in found] == [(None, 2, "NaN", "it's"), ("x", 2, "-0.0", "it's")]
    single = spark.sql(f"SELECT id, CAST(ratio AS STRING) FROM delta.`{lake.root}/d w/each` ORDER BY 1").collect()
    assert [tuple(row) for row in single] == [(1, "-0.0"), (3, "-0.0")]
    lake.verify()

    # Sums may differ by their rounding only, and a group has one row.
    name = f"delta.`{lake.root}/d w/Per Order`"
    for tampered, kinds_found in {
        f"UPDATE {name} SET total = 5 WHERE order_no IS NULL": {(None, "different")},
        f"INSERT INTO {name} SELECT * FROM {name} WHERE order_no = 'x'": {(None, "different"), ("x", "different")},
        f"DELETE FROM {name} WHERE order_no IS NULL": {(None, "missing"), ("x", "different")},
    }.items():
        spark.sql(tampered).collect()
        result, _ = lake.sink.compare_views()
        assert {(each.key["order_no"], each.kind) for each in result.differences} == kinds_found
