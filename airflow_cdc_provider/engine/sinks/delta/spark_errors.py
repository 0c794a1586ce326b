"""The sessions of Spark that a Delta sink works with, on the driver, and what Delta says there."""

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
"""What is said of a table that another process of the run is about to make, or was when it died: its folder is there,
and no entry yet."""
_PAUSE_SECONDS = 0.2

# The rest of a configuration is nobody's business; options of catalogs, whose names go on, may be secrets.
_NEEDED = re.compile(r"spark\.(jars\.packages|sql\.extensions|sql\.catalog\.[^.]+)")

_REFUSALS = ("CONSTRAINT", "InvariantViolation", "AnalysisException", "DELTA_EXCEED_CHAR_VARCHAR_LIMIT")

T = TypeVar("T")


def session(conf: Mapping[str, str]) -> SparkSession:
    """A session of its own, with views and settings that no other has: of the job's Spark, or of one that is started.

    :param conf: for one that is started.
    :raises SparkUnusable: when it does not start, or has no Delta.
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


def insistently(step: Callable[[], T], *further: str, at_last: Callable[[], None] = lambda: None) -> T:
    """Take a step again as long as another commit to the same table, such as OPTIMIZE's, comes in between.

    :param further: names of errors that pass by, too.
    :param at_last: is done before the last attempt.
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
def looking() -> Iterator[None]:
    """Look at tables, to decide what is to be done: what Spark fails with then is no reason not to try again.

    :raises StreamFailed: for any error of Spark.
    """
    try:
        yield
    except SPARK_ERRORS as e:
        raise not_looked_at(e) from e


def not_looked_at(error: Exception) -> StreamFailed:
    """What is raised when Spark fails at a look at a table."""
    return StreamFailed(
        f"a target table could not be looked at: {first_line(error)}",
        "Start again: nothing has been decided. If this comes again, see whether Spark can read the table.",
    )


def is_one_of(names: Sequence[str], error: Exception) -> bool:
    """Whether an error of Spark has one of some names."""
    return any(name in str(error) for name in names)


def stands_in_the_way(error: Exception) -> bool:
    """Whether a table was not written for what it is, its constraints or columns: trying again does not help."""
    return isinstance(error, AnalysisException) or is_one_of(_REFUSALS, error)


def first_line(error: Exception) -> str:
    """What Spark says, without its stacks: the error, and what it comes of in the end."""
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
