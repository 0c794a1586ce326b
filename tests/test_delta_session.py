"""The Spark that a Delta sink starts where none runs, as under ``verify``, ``maintain`` and ``resnapshot``."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.errors import SparkUnusable
from airflow_cdc_provider.engine.session import DEFAULTS
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.spark import session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SECRETS = {"spark.hadoop.fs.s3a.secret.key": "s3cret", "spark.sql.catalog.unity.token": "s3cret"}


def test_a_spark_has_the_engine_s_defaults_and_one_without_delta_is_refused_without_secrets() -> None:
    own = {"spark.master": "local[1]", "spark.ui.enabled": "false", "spark.speculation": "true"}
    with pytest.raises(SparkUnusable):
        session(own)
    spark = SparkSession._instantiatedSession
    assert spark is not None
    try:
        found = spark.sparkContext.getConf()
        assert {name: found.get(name) for name in DEFAULTS} == DEFAULTS | {"spark.speculation": "true"}
        with pytest.raises(SparkUnusable) as refused:
            session(dict(DeltaSettings("").spark_conf) | SECRETS)
    finally:
        spark.stop()
    assert "s3cret" not in refused.value.solution
    assert "spark.jars.packages=io.delta:" in refused.value.solution
    assert "spark.sql.catalog.spark_catalog=" in refused.value.solution
