"""A pipeline into Delta tables with a view, whose runs are killed with their Spark at the steps of the view."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine import commands
from tests.conftest import Databases
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.delta_spark import delta_session
from tests.support.pipelines import PipelineUnderTest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SELECT = """
SELECT t.id, t.body, length(t.big) AS size, g.name FROM public.t AS t LEFT JOIN public.g AS g ON g.id = t.grp
"""
PLACES = ("after-view-pinned", "before-view-written", "after-view-written:kill:2")
"""Pinned but not built; not built again; built but not recorded, moved but not recorded."""


LONG = 300.0
"""Seconds that a run may take: its Spark starts, and warms up."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


@pytest.mark.thorough
def test_a_view_is_right_whatever_is_killed(spark: SparkSession, databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t", "public.g"], snapshot={"chunk_rows": 2000})
    pipeline.change(sink=None)
    lake = tmp_path / "lake"
    pipeline.change(sink={"type": "delta", "path": str(lake), "views": {"dwd.wide": {"sql": SELECT}}})
    pipeline.source(
        AUDITED,
        "CREATE TABLE public.g (id int PRIMARY KEY, name text)",
        "INSERT INTO public.g SELECT n, 'g' || n % 5 FROM generate_series(0, 29) n",
        "ALTER TABLE public.t ADD grp int DEFAULT 3",
        "UPDATE public.t SET grp = id % 31",
    )
    program = [sys.executable, "-m", "tests.support.delta_run", str(pipeline.file)]
    ours = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with writing(databases.source, LONG_PAUSE):
        for number, place in enumerate(PLACES):
            pipeline.source(f"UPDATE public.g SET name = 'named {number}' WHERE id = {number}")
            armed = place if ":" in place else f"{place}:kill"
            killed = pipeline.start_program(f"run killed {place}", program, armed, ours).wait(LONG)
            assert killed.code == -9, killed.stderr[-2000:]
    pipeline.source("DELETE FROM public.g WHERE id = 7", "UPDATE public.t SET grp = 8 WHERE id < 20")
    commands.provision(pipeline.pipeline, takeover=True)
    pipeline.apply()
    verified = commands.verify(pipeline.pipeline)
    assert verified["equal"], verified
    copies = {name: f"delta.`{lake}/public/{name}`" for name in ("t", "g")}
    select = SELECT.replace("public.t", copies["t"]).replace("public.g", copies["g"])
    found = spark.sql(f"SELECT * FROM delta.`{lake}/dwd/wide` ORDER BY ALL").collect()
    assert found == spark.sql(f"{select} ORDER BY ALL").collect()
    assert [tuple(row) for row in found if row["id"] < 20] == pipeline.source_rows(
        f"{SELECT} WHERE t.id < 20 ORDER BY 1"
    )
