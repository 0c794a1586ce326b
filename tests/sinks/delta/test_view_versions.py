"""Versions of Delta tables that a view reads: rearranged, described again, and gone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.delta.begun_views import Lake, rows, values
from tests.sinks.view_cases import effect
from tests.support.delta_spark import delta_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SHARES = ViewSettings(
    "dwd", "shares", "SELECT a.id, count(b.v) AS n FROM shop.a LEFT JOIN shop.b ON b.fk = a.fk GROUP BY a.id"
)
"""Two rows of b may be equal in the columns that it reads."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


def test_entries_that_rearrange_rows_or_describe_them_again(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = Lake(tmp_path, [SHARES])
    a, b = (f"delta.`{lake.root}/copy/{name}`" for name in "ab")
    lake.unit(effect("shop.a", values(1, 2)), effect("shop.b", {7: (7, 1, 5, None), 8: (8, 1, 5, None)}))
    lake.drain()
    assert rows(spark, lake, "shares") == [(1, 2), (2, 0)]

    # A file that OPTIMIZE has made is touched before the view moves.
    lake.unit(effect("shop.a", values(4)))
    spark.sql(f"OPTIMIZE {a}").collect()
    lake.unit(effect("shop.a", values(2, v=9)))
    lake.drain()
    assert rows(spark, lake, "shares") == [(1, 2), (2, 0), (4, 2)]

    # Files that are there are added again, with numbers of their rows.
    spark.sql(f"ALTER TABLE {b} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')")
    lake.unit(effect("shop.b", {8: None}))
    lake.drain()
    assert rows(spark, lake, "shares") == [(1, 1), (2, 0), (4, 1)]

    # Columns get other names in the files.
    lake.unit(effect("shop.a", {1: None}))
    spark.sql(f"ALTER TABLE {a} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'none')")
    lake.unit(effect("shop.b", {9: (9, 1, 5, None)}))
    lake.drain()
    assert rows(spark, lake, "shares") == [(2, 0), (4, 2)]
    lake.verify()
    assert "is built again" not in caplog.text

    # The view's table is dropped while the run goes on.
    shutil.rmtree(lake.root / "dwd" / "shares")
    lake.unit(effect("shop.b", {9: None}))
    lake.drain()
    assert rows(spark, lake, "shares") == [(2, 0), (4, 1)]
    assert "is built again: the table does not exist" in caplog.text
