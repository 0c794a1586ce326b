"""Sessions of Spark in this process, and the JVM that they share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark import SparkContext
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.spark.session import python_chosen
from tests.support.class_archive import JVM_CONF

_PATIENCE_SECONDS = 30.0
_LAUNCHER = ("spark.app.", "spark.master", "spark.submit.")
"""Properties that the launcher sets itself, and without which no session starts."""


@contextmanager
def local_session(conf: Mapping[str, str], cores: int = 1) -> Iterator[SparkSession]:
    """Start a session in this process. Commands that the process starts do not see it.

    :param conf: as for :class:`SparkSession.Builder`.
    """
    with python_chosen(here=True):
        spark = SparkSession.builder.master(f"local[{cores}]").config(map=dict(conf)).getOrCreate()
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it reports its end when no handler is left
    try:
        yield spark
    finally:
        spark.stop()


def end_jvm() -> None:
    """End the JVM of this process, if it has one, so that the next session starts another; it must not have died."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    code = gateway.proc.poll()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_PATIENCE_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None
    assert code is None, f"Spark's JVM, process {gateway.proc.pid}, had ended before with exit code {code}"


def reset_jvm() -> None:
    """Prepare the JVM of this process for the next module: end it if it is dead or lacks what all sessions need.

    Spark's launcher stores the configuration of the first session in system properties, from which all later sessions
    would take defaults.
    """
    gateway = SparkContext._gateway
    if gateway is None:
        return
    alive = gateway.proc.poll() is None
    if not alive or any(gateway.jvm.System.getProperty(name) != value for name, value in JVM_CONF.items()):
        end_jvm()
        return
    for name in gateway.jvm.System.getProperties().stringPropertyNames():
        if name.startswith("spark.") and not name.startswith(_LAUNCHER) and name not in JVM_CONF:
            gateway.jvm.System.clearProperty(name)
