"""A Spark with Delta for the tests of a module, with jars that are fetched once: ``python -m
tests.support.delta_spark``.

Users name the package in ``spark.jars.packages``, which looks into every Maven repository at each start. Tests
take the jars from a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE, DeltaSettings
from local_servers.jars import JarsMissing, fetch
from tests.support.class_archive import ARCHIVE, JVM_OPTIONS
from tests.support.spark_jvm import local_session


def delta_jars() -> str:
    """The jars that Spark does not have, fetched if need be, as ``spark.jars`` takes them."""
    try:
        jars = fetch(PACKAGE)
    except JarsMissing as e:
        pytest.skip(e.message)
    return ",".join(str(jar) for jar in jars if jar.name.startswith(("io.delta", "io.unitycatalog")))


def delta_conf() -> dict[str, str]:
    """Spark's configuration for a test's Delta."""
    needed = {name: value for name, value in DeltaSettings("").spark_conf.items() if name != "spark.jars.packages"}
    return needed | {
        "spark.jars": delta_jars(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "1",
        # For a handful of rows, compiling costs more than it saves.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.driver.extraJavaOptions": f"{JVM_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}",
        "spark.python.unix.domain.socket.enabled": "true",
    }


@contextmanager
def delta_session(cores: int = 2) -> Iterator[SparkSession]:
    """A session, which sinks in this process find."""
    with local_session(delta_conf(), cores) as spark:
        yield spark


if __name__ == "__main__":
    try:
        delta_jars()
    except pytest.skip.Exception as e:
        sys.exit(str(e))
