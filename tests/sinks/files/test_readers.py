"""Plain readers of a files sink: the examples of its documentation, as they are printed there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from tests.support.files_sink import AT, BODY, ID, SOURCE, change, column, effect, rows, table, unit, watermark
from tests.support.given_rows import GivenRows
from tests.support.pipelines import SPARK_CONF
from tests.support.spark_jvm import local_session

pytestmark = pytest.mark.spark

PAGE = (Path(__file__).parents[3] / "docs" / "sinks" / "files.md").read_text(encoding="utf-8")
ORDERS = Target(table(ID, BODY, AT, name="orders"), "public", "orders")
WIDER = Target(table(ID, BODY, AT, column("more", "integer", 4), name="orders"), "public", "orders")


def example(language: str, word: str) -> str:
    """Return the first example of the page that contains a word."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return inspect.cleandoc(next(text for text in found if word in text))


def run(word: str, **given: Any) -> dict[str, Any]:
    names = dict(given)
    exec(example("python", word), names)
    return names


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create files with two rows, of which one is changed, a deleted row, a row with a later column, and an orphan."""
    path = tmp_path_factory.mktemp("lake")
    sink = FilesSink(Storage(str(path)), "shop_lake", "changelog")
    sink.prepare([ORDERS], [], SOURCE, 50)
    epoch = sink.take_epoch("me")
    sink.replace(epoch, ORDERS, None, GivenRows(rows(("1", "one", None), ("2", "two", None)), watermark), ORDERS)
    unit(sink, epoch, 50, 60, effect(change("u", 60, "1", "uno", None), label="public.orders"))
    unit(sink, epoch, 60, 70, effect(change("d", 70, "2", None, None), label="public.orders"))
    sink.redefine(epoch, ORDERS, WIDER)
    unit(sink, epoch, 70, 80, effect(change("i", 80, "3", None, None, "7"), label="public.orders"))
    sink.stage(epoch, "never committed", [effect(change("i", 90, "4", None, None, "8"), label="public.orders")])
    return str(path)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session({**SPARK_CONF, "spark.sql.session.timeZone": "UTC"}) as session:
        yield session


EVENTS = [("r", 50, 1), ("r", 50, 2), ("u", 60, 1), ("d", 70, 2), ("i", 80, 3)]


def test_duckdb(lake: str) -> None:
    assert sorted(run("duckdb.sql", lake=lake)["counts"]) == [("d", 1), ("i", 1), ("r", 2), ("u", 1)]


def test_polars(lake: str) -> None:
    events = run("scan_parquet", lake=lake)["events"].collect()
    assert events.select("_op", "_commit_lsn", "id").rows() == EVENTS
    assert events.schema["_commit_ts"] == pl.Datetime("us", "UTC")


def test_spark(lake: str, spark: SparkSession) -> None:
    events = run("mergeSchema", lake=lake, spark=spark)["events"]
    found = events.orderBy("_commit_lsn", "_seq", "id").collect()
    assert [(row._op, row._commit_lsn, row.id) for row in found] == EVENTS
    assert [row.more for row in found] == [None] * 4 + [7]
    assert {"_date", "more", "_unchanged"} <= set(events.columns)
    assert dict(events.dtypes)["_commit_ts"] == "timestamp"


def test_a_glob_finds_what_is_not_committed(lake: str) -> None:
    """The page warns of this."""
    found = duckdb.sql(f"SELECT count(*) FROM read_parquet('{lake}/public/orders/**/*.parquet')").fetchall()
    assert found == [(len(EVENTS) + 1,)]


def test_the_manifest_tells_all_tables_as_of_one_moment(lake: str) -> None:
    names = run("json.load", lake=lake)
    assert names["upto"] == "0/50"
    listed = run("duckdb.sql", lake=lake)["paths"]
    assert names["files"] == {"public.orders": listed}


def test_the_changes_add_up_to_the_rows_that_there_are(lake: str) -> None:
    paths = run("duckdb.sql", lake=lake)["paths"]
    database = duckdb.connect()
    database.execute(f"CREATE VIEW changes AS FROM read_parquet({paths}, union_by_name = true)")
    found = database.sql(example("sql", "QUALIFY")).select("id, body, more").order("id").fetchall()
    assert found == [(1, "uno", None), (3, None, 7)]
