"""The classes that Spark loads at its start, archived: JVMs that map the archive start in a third of the time.

Java calls it application class-data sharing. The archive is written once, before the first test that starts Spark, and
kept among the caches of the repository. A JVM ignores it when its own version or its jars are others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""A small heap's collector and one compiler: with them starting Spark is what costs least."""


def _find_java() -> Path:
    home = os.environ.get("JAVA_HOME")
    return Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")


def _name() -> str:
    java = _find_java().resolve()
    changed = java.stat().st_mtime_ns if java.exists() else 0
    return hashlib.sha256(f"{java} {changed} {sys.prefix} {version('pyspark')}".encode()).hexdigest()[:12]


ARCHIVE = Path(__file__).parents[2] / ".cache" / f"spark-{_name()}.jsa"


@cache
def write_archive() -> None:
    """Write the archive unless there is one; of two processes the second waits."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with ARCHIVE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ARCHIVE.exists():
            written = ARCHIVE.with_suffix(".new")
            # To read its output is to wait for the JVM, which writes when Python has ended. Tests do without, too.
            subprocess.run([sys.executable, __file__, str(written)], capture_output=True, check=False)
            if written.exists():
                written.rename(ARCHIVE)


def _start_spark(archive: str) -> None:
    """Start a session that archives its classes at its end, and do a little of what jobs do."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    options = f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={archive}"
    builder = SparkSession.builder.master("local[2]").config("spark.driver.extraJavaOptions", options)
    spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
    spark.range(10).mapInArrow(lambda batches: batches, "id long").collect()
    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda batch, n: batch.count()).start()
    stream.processAllAvailable()
    stream.stop()
    spark.stop()


if __name__ == "__main__":
    _start_spark(sys.argv[1])
