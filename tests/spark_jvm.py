"""The one JVM of a process's Sparks, which knows no jars but those of the session that it was started for."""

from __future__ import annotations

from pyspark import SparkContext


def renew_jvm_without(class_name: str) -> None:
    """End a JVM that earlier tests have left if it lacks a class, so that the next session starts another.

    :param class_name: one that the session's ``spark.jars`` bring.
    """
    gateway, jvm = SparkContext._gateway, SparkContext._jvm
    if gateway is None or jvm is None or jvm.org.apache.spark.util.Utils.classIsLoadable(class_name):
        return
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None
