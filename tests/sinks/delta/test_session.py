"""The Spark that a Delta sink starts if none is running, as under ``verify``, ``maintain`` and ``resnapshot``."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.spark_errors import session
from airflow_cdc_provider.engine.spark.session import DEFAULTS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

OWN = {"spark.master": "local[1]", "spark.ui.enabled": "false", "spark.speculation": "true"}
SECRETS = {"spark.hadoop.fs.s3a.secret.key": "s3cret", "spark.sql.catalog.unity.token": "s3cret"}


def started_without_delta() -> tuple[dict[str, str | None], str]:
    """Return the configuration of the Spark that is started, and its messages."""
    with pytest.raises(SparkUnusable):
        session(OWN)
    spark = SparkSession._instantiatedSession
    assert spark is not None
    found = {name: spark.sparkContext.getConf().get(name) for name in DEFAULTS}
    assert spark.sparkContext.getConf().get("spark.python.unix.domain.socket.dir")
    with pytest.raises(SparkUnusable) as refused:
        session(dict(DeltaSettings("").spark_conf) | SECRETS)
    spark.stop()
    return found, refused.value.solution


@pytest.mark.thorough
def test_a_spark_has_the_engine_s_defaults_and_one_without_delta_is_refused_without_secrets() -> None:
    # In a separate process, because a JVM that has once loaded Delta keeps it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found, solution = pool.submit(started_without_delta).result()
    assert found == DEFAULTS | {"spark.speculation": "true"}
    assert "s3cret" not in solution
    assert "spark.jars.packages=io.delta:" in solution
    assert "spark.sql.catalog.spark_catalog=" in solution
