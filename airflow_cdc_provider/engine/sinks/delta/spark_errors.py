"""Creates the Spark sessions of a Delta sink on the driver, and classifies the errors of Delta."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.errors import SparkUnusable, StreamFailed
from airflow_cdc_provider.engine.spark.jvm import start_jvm
from airflow_cdc_provider.engine.spark.local_spark import local_address
from airflow_cdc_provider.engine.spark.session import defaults_on, python_chosen
from airflow_cdc_provider.engine.spark.settings import runs_locally

SPARK_ERRORS = (PySparkException, Py4JJavaError)

_ATTEMPTS = 20
_CONFLICTS = (
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "ConcurrentModification",
)
BEGUN = ("DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION", "DELTA_TABLE_NOT_FOUND")
"""Errors for a table that another process of the run is about to create, or was creating when it died: the directory
exists, but no log entry yet.
"""
_PAUSE_SECONDS = 0.2

# Only these settings may be shown; further options of catalogs may be secrets.
_NEEDED = re.compile(r"spark\.(jars\.packages|sql\.extensions|sql\.catalog\.[^.]+)")

_REFUSALS = ("CONSTRAINT", "InvariantViolation", "AnalysisException", "DELTA_EXCEED_CHAR_VARCHAR_LIMIT")

T = TypeVar("T")


def session(conf: Mapping[str, str]) -> SparkSession:
    """Return a new session with separate views and settings, on the job's Spark or on a started one.

    :param conf: configuration of a started Spark.
    :raises SparkUnusable: when Spark does not start, or has no Delta.
    """
    builder, master = SparkSession.builder, conf.get("spark.master", "local")
    options = {"spark.app.name": "airflow-cdc", **defaults_on(master), **conf}
    if SparkSession._instantiatedSession is None:
        for name, value in options.items():
            builder = builder.config(name, value)
    try:
        local = runs_locally(master)
        with python_chosen(local, local_address(conf) if local else {}):
            start_jvm(options, "delta")
            spark = builder.getOrCreate()
        found = spark.sparkContext.getConf().get("spark.sql.extensions", "")
    except SparkUnusable:
        raise
    except Exception as e:
        raise SparkUnusable(
            f"Spark does not start: {str(e).splitlines()[0]}",
            "Check that Java 17 or newer is installed, and that Spark can fetch the package of Delta: see"
            " `spark.jars.packages` in docs/sinks/delta.md.",
        ) from e
    if "DeltaSparkSessionExtension" not in (found or ""):
        raise SparkUnusable(
            "Spark runs without Delta",
            f"Start it with {', '.join(f'{name}={conf[name]}' for name in filter(_NEEDED.fullmatch, conf))}.",
        )
    return spark.newSession()


def retry_on_conflict(step: Callable[[], T], *further: str, at_last: Callable[[], None] = lambda: None) -> T:
    """Retry a step while other commits to the same table, such as that of OPTIMIZE, conflict with it.

    :param further: names of further temporary errors.
    :param at_last: called before the last attempt.
    """
    for attempt in range(_ATTEMPTS):
        if attempt == _ATTEMPTS - 1:
            at_last()
        try:
            return step()
        except SPARK_ERRORS as e:
            if attempt == _ATTEMPTS - 1 or not is_one_of((*_CONFLICTS, *further), e):
                raise
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError


@contextmanager
def examining_tables() -> Iterator[None]:
    """Examine tables before a decision; the caller can retry after any error of Spark.

    :raises StreamFailed: for any error of Spark.
    """
    try:
        yield
    except SPARK_ERRORS as e:
        raise examination_failure(e) from e


def examination_failure(error: Exception) -> StreamFailed:
    """Return the error to raise when Spark fails to examine a table."""
    return StreamFailed(
        f"could not examine a target table: {first_line(error)}",
        "Start again: nothing was changed. If the error recurs, check that Spark can read the table.",
    )


def is_one_of(names: Sequence[str], error: Exception) -> bool:
    """Return whether an error of Spark contains one of the names."""
    return any(name in str(error) for name in names)


def is_refused_by_table(error: Exception) -> bool:
    """Return whether a table refused a write because of its constraints or columns, so that a retry cannot help."""
    return isinstance(error, AnalysisException) or is_one_of(_REFUSALS, error)


def first_line(error: Exception) -> str:
    """Return Spark's error without stack traces: the error, and its innermost cause."""
    if not isinstance(error, Py4JJavaError):
        return _short(str(error))
    cause = error.java_exception
    outermost = _short(str(cause))
    while cause.getCause() is not None:
        cause = cause.getCause()
    innermost = _short(str(cause))
    return outermost if innermost == outermost else f"{outermost}; {innermost}"


def _short(text: str) -> str:
    return " ".join(text.split("\n\tat ")[0].splitlines()[0].split())
