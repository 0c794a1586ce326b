"""The one JVM of a process's Sparks, which knows no jars but those of the session that it was started for."""

from __future__ import annotations

from pyspark import SparkContext

_PATIENCE_SECONDS = 30.0


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
