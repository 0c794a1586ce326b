"""An archive of the classes that Spark, Delta Lake and Kafka's client load, with which a JVM starts three times faster.

Java calls this application class-data sharing. The archive is written once, before the first test that starts Spark,
and kept among the caches of the repository. A JVM ignores it when its own version or its class path differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.support.spark_jars import CLASS_PATH

_ROOT = Path(__file__).parents[2]
_MODULE = "tests.support.class_archive"

JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m -XX:+UseSerialGC -Xshare:auto"
)
"""Options with which the JVM of a test needs least CPU time: the collector of a small heap, and one compiler.

With one compiler Java reserves only 48 MB for compiled methods. When they are full, it drops and compiles methods again
and again, which took a quarter of the CPU time of Delta Lake's tests.
"""


def _find_java() -> Path:
    home = os.environ.get("JAVA_HOME")
    return Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")


def _name() -> str:
    java = _find_java().resolve()
    changed = java.stat().st_mtime_ns if java.exists() else 0
    parts = (java, changed, sys.prefix, version("pyspark"), CLASS_PATH, Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


ARCHIVE = _ROOT / ".cache" / f"spark-{_name()}.jsa"

JVM_CONF = {
    "spark.driver.extraJavaOptions": f"{JVM_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}",
    "spark.driver.extraClassPath": CLASS_PATH,
}
"""Configuration with which any session of a test can share its JVM with the others."""


@cache
def write_archive() -> None:
    """Write the archive unless it exists, or another process is writing it: a JVM starts without it, too."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with ARCHIVE.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not ARCHIVE.exists():
            written = ARCHIVE.with_suffix(".new")
            # The JVM writes after Python has ended, and ends when its output does. Without an archive tests run, too.
            subprocess.run([sys.executable, "-m", _MODULE, str(written)], cwd=_ROOT, capture_output=True, check=False)
            if written.exists():
                written.rename(ARCHIVE)


def _start_spark(archive: str) -> None:
    """Start a session that archives its classes at its end, and do a little of what jobs do."""
    from pyspark.sql import SparkSession

    from tests.support.delta_spark import delta_conf

    os.environ["PYSPARK_PYTHON"] = sys.executable
    options = {"spark.driver.extraJavaOptions": f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={archive}"}
    conf = (delta_conf() if CLASS_PATH else {"spark.ui.enabled": "false"}) | options
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    spark.range(10).mapInArrow(lambda batches: batches, "id long").collect()
    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda batch, n: batch.count()).start()
    stream.processAllAvailable()
    stream.stop()
    if CLASS_PATH:
        spark.readStream.format("kafka").options(**{"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t"}).load()
        with tempfile.TemporaryDirectory() as directory:
            spark.range(10).write.format("delta").save(directory)
            spark.sql(f"DELETE FROM delta.`{directory}` WHERE id < 5")
            spark.read.format("delta").load(directory).count()
    spark.stop()


if __name__ == "__main__":
    _start_spark(sys.argv[1])
