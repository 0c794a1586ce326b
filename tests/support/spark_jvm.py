"""Sessions of Spark in this process, and their one JVM, which knows no jars but those of the session it started for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark import SparkContext
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.spark.session import python_chosen

_PATIENCE_SECONDS = 30.0


@contextmanager
def local_session(conf: Mapping[str, str], cores: int = 1) -> Iterator[SparkSession]:
    """A session of this process, of which commands that it starts are told nothing.

    :param conf: as for :class:`SparkSession.Builder`.
    """
    with python_chosen(here=True):
        spark = SparkSession.builder.master(f"local[{cores}]").config(map=dict(conf)).getOrCreate()
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it tells of its end when nobody listens any more
    try:
        yield spark
    finally:
        spark.stop()


def end_jvm() -> None:
    """End the JVM of sessions in this process, so that the next one starts another; it must not have died before."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    code = gateway.proc.poll()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_PATIENCE_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None
    assert code is None, f"Spark's JVM, process {gateway.proc.pid}, had ended before with exit code {code}"
