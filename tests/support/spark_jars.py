"""Jars of Delta Lake and Kafka on the class path of every Spark under test: ``python -m tests.support.spark_jars``
fetches them.

Users name packages in ``spark.jars.packages``. Spark then looks into every Maven repository at each start, copies the
jars for each session, and loads their classes without the archive of :mod:`.class_archive`. On the class path they cost
nothing, and one JVM can serve all sessions of a process.
"""

from __future__ import annotations

import sys

import pytest

from airflow_cdc_provider.engine.sinks.delta import settings as delta
from airflow_cdc_provider.engine.sources.kafka import settings as kafka
from local_servers.jars import HOME, JARS, JarsMissing, fetch

DELTA = ("io.delta", "io.unitycatalog")
KAFKA = (
    "org.apache.spark_spark-sql-kafka",
    "org.apache.spark_spark-token-provider-kafka",
    "org.apache.kafka_kafka-clients",
    "org.apache.commons_commons-pool2",
)


def _fetched(prefixes: tuple[str, ...]) -> list[str]:
    return sorted(str(jar) for jar in HOME.glob(JARS) if jar.name.startswith(prefixes))


CLASS_PATH = ":".join(_fetched((*DELTA, *KAFKA)))
"""What has been fetched, for ``spark.driver.extraClassPath``."""


def require_jars(prefixes: tuple[str, ...]) -> None:
    """Skip the test if jars are not on the class path."""
    if not all(prefix in CLASS_PATH for prefix in prefixes):
        pytest.skip("Spark's jars are missing: run `make jars`")


if __name__ == "__main__":
    try:
        fetch(delta.PACKAGE)
        fetch(kafka.PACKAGE)
    except JarsMissing as e:
        sys.exit(e.message)
