"""A Spark with Delta Lake for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from tests.support.class_archive import JVM_CONF
from tests.support.spark_jars import DELTA, require_jars
from tests.support.spark_jvm import local_session


def delta_conf() -> dict[str, str]:
    """Return Spark's configuration for a test's Delta Lake."""
    needed = {name: value for name, value in DeltaSettings("").spark_conf.items() if name != "spark.jars.packages"}
    return needed | {
        **JVM_CONF,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "1",
        # For a handful of rows, compiling costs more than it saves.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.python.unix.domain.socket.enabled": "true",
    }


@contextmanager
def delta_session(cores: int = 2) -> Iterator[SparkSession]:
    """Start a session that sinks in this process find."""
    require_jars(DELTA)
    with local_session(delta_conf(), cores) as spark:
        yield spark
