"""The demo of views: its pipeline file, its summary, and its comparisons, on a small shop without Spark."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from demo import shop, shop_writers
from demo.__main__ import main
from demo.screen import Comparison
from demo.tables import PIPELINE
from demo.wide import VIEWS, Comparer, section, view_summary
from demo.work_directory import write_pipeline
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, SparklessRun


def test_the_pipeline_file_has_the_views(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, "shop", PIPELINE, sink=f"  conn_id: shop_target\n{section(VIEWS)}")
    connections = {f"AIRFLOW_CONN_SHOP_{name}": "postgresql://a@127.0.0.1:1/d" for name in ("SOURCE", "TARGET")}

    pipeline = Pipeline.load(path, connections)

    assert {view.label: view.sql for view in pipeline.sink.views} == VIEWS


def test_the_summary_shows_the_views_and_what_they_cost() -> None:
    comparer = Comparer("", VIEWS, 12, {"0/1", "0/2"}, [], [Comparison("dwd.lines_wide", 1234, 1234, True)])
    cost = {"view": "dwd.lines_wide", "units": 4, "anchors": 1000, "milliseconds_per_unit": 125.0}

    lines = view_summary(comparer, [cost]).splitlines()

    assert ["dwd.lines_wide", "1,234", "1,234", "yes"] in [line.split() for line in lines]
    assert lines[-2:] == [
        "comparisons 12 of each view, in 2 states of the copy, 0 with differences",
        "lines_wide  4 units with 1,000 anchors, 125.0 ms a unit",
    ]


def test_the_views_are_in_postgres(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--pipeline", "wide", "--sink", "delta"])

    assert "the wide table is in Postgres" in capsys.readouterr().err


@pytest.mark.slow
def test_the_views_are_their_selects_while_customers_buy_and_move(databases: Databases, tmp_path: Path) -> None:
    views = {name: {"sql": text} for name, text in VIEWS.items()}
    pipeline = PipelineUnderTest(tmp_path, databases, ["shop.*"], sink={"views": views})
    with psycopg.connect(databases.source) as connection:
        shop.create_schema(connection)
    shop.load(databases.source, scale=0.002)
    with psycopg.connect(databases.source) as connection:
        connection.execute(shop.PRODUCTS_AND_CITIES)
    copied = SparklessRun(pipeline.file)
    assert (copied.wait(), copied.message) == (DONE, "")

    comparer = Comparer(databases.target, VIEWS)
    writers = shop_writers.Writers(databases.source, transactions=shop.WIDE_TRANSACTIONS)
    with comparer.repeating(), writers:
        for goal in (300, 600):
            assert await_condition(lambda goal=goal: writers.transactions >= goal, SECONDS)
            followed = SparklessRun(pipeline.file)
            assert (followed.wait(), followed.message) == (DONE, "")
    comparer.compare()

    assert comparer.different == []
    assert len(comparer.states) > 1
    assert all(each.found > 0 for each in comparer.latest)
    with psycopg.connect(databases.target) as connection:
        connection.execute(
            "UPDATE dws.city_sales SET orders = orders + 1 WHERE city = (SELECT min(city) FROM dws.city_sales)"
        )
    comparer.compare()
    (problem,) = comparer.different
    assert problem.startswith("2 rows of dws.city_sales differ from its SELECT at ")
