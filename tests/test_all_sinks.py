"""All kinds of sinks at once, fed from one slot by real Spark jobs, each in a store that the demo would start."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from airflow_cdc_provider.demo.warehouse import WAREHOUSES
from tests.conftest import Databases
from tests.delta_spark import FOLDER, HOME, delta_jars
from tests.pipelines import SPARK_CONF, PipelineUnderTest

PATIENCE = 300.0  # seconds: four sinks, of which one is filled by a Spark that has to warm up

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def test_every_kind_of_sink_is_filled_and_equal(
    databases: Databases, tmp_path: Path, server_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 400})
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, name text, price numeric(10,2), at timestamptz, big text)",
        "INSERT INTO public.t SELECT n, 'name ' || n, n / 7.0, now(),"
        " CASE WHEN n % 9 = 0 THEN repeat(md5(n::text), 200) END FROM generate_series(1, 1000) n",
    )
    monkeypatch.setenv(*HOME)
    with ExitStack() as started:
        sinks = []
        for kind, start in WAREHOUSES.items():
            warehouse = start(started, server_directory / f"{tmp_path.name}-{kind}")
            sinks.append(yaml.safe_load(warehouse.section))
            for name, uri in warehouse.connections.items():
                monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", uri)
        pipeline.change(sink=sinks, spark={"conf": {**SPARK_CONF, "spark.jars.ivy": str(FOLDER)}})
        delta_jars()
        assert pipeline.start("run").wait(PATIENCE).code == 0
        pipeline.source(
            "UPDATE public.t SET name = upper(name) WHERE id % 3 = 0",
            "UPDATE public.t SET id = id + 5000 WHERE id % 90 = 0",
            "DELETE FROM public.t WHERE id % 5 = 1",
            "ALTER TABLE public.t ADD COLUMN more int",
            "INSERT INTO public.t (id, name, more) SELECT n, 'new', n FROM generate_series(2001, 2100) n",
        )
        assert pipeline.start("stream", "--until", "caught-up").wait(PATIENCE).code == 0
        verified = pipeline.json("verify")
        assert [table["equal"] for table in verified["tables"]] == [True] * len(WAREHOUSES), verified
        assert {table["source_rows"] for table in verified["tables"]} == {900}
        status = pipeline.json("status")
        assert {sink["applied_lsn"] for sink in status["sinks"]} == {status["applied_lsn"]}
        assert all(sink["consistent"] for sink in status["sinks"])
