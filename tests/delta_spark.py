"""A Spark with Delta for the tests of a module, with jars that are fetched once: ``python -m tests.delta_spark``.

Users name the package in ``spark.jars.packages``, which looks into every Maven repository at each start. Tests
take the jars from a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE, DeltaSettings

FOLDER = Path(__file__).parents[1] / ".jars"
# Another Maven's folder in the home may know of jars that it does not have, which Spark's resolver takes ill.
HOME = ("JAVA_TOOL_OPTIONS", f"-Duser.home={FOLDER}")
_FETCH = """
import sys
from pyspark.sql import SparkSession
folder, package = sys.argv[1:]
conf = {"spark.jars.packages": package, "spark.jars.ivy": folder, "spark.ui.enabled": "false"}
SparkSession.builder.master("local[1]").config(map=conf).getOrCreate().stop()
"""


def delta_jars() -> str:
    """The jars that Spark does not have, fetched if need be, as ``spark.jars`` takes them."""
    done = FOLDER / f"{PACKAGE.replace(':', '_')}.fetched"
    if not done.exists():
        command = [sys.executable, "-c", _FETCH, str(FOLDER), PACKAGE]
        if subprocess.run(command, env=os.environ | dict([HOME]), timeout=300).returncode:
            pytest.skip("the jars of Delta cannot be fetched from Maven Central")
        done.touch()
    found = [jar for jar in (FOLDER / "jars").glob("*.jar") if jar.name.startswith(("io.delta", "io.unitycatalog"))]
    return ",".join(map(str, sorted(found)))


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
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.python.unix.domain.socket.enabled": "true",
    }


@contextmanager
def delta_session(cores: int = 2) -> Iterator[SparkSession]:
    """A session, which sinks in this process find."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(f"local[{cores}]").config(map=delta_conf()).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


if __name__ == "__main__":
    try:
        delta_jars()
    except pytest.skip.Exception as e:
        sys.exit(str(e))
