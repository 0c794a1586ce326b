"""Spark alone with its JDBC source: reads two partitions of the key, and writes by JDBC or to Parquet.

The settings follow the manuals of Spark and the driver: rows are fetched 10,000 at a time and written in batches of the
same size, which the driver rewrites into multi-row inserts.
"""

from __future__ import annotations

import shutil
import time
from urllib.parse import urlsplit

from pyspark.sql import DataFrame

from benchmarks.backlog import sums, total
from benchmarks.lab import Lab
from benchmarks.peers.copies import target
from benchmarks.report import check
from benchmarks.shapes import Shape

JDBC, PARQUET = "spark-jdbc", "spark-jdbc-parquet"
_ROWS = "10000"
_PARTITIONS = 2


def copy(lab: Lab, database: str, shape: Shape, rows: int) -> float:
    """Copy the table into an empty one with its primary key, and return the seconds that it takes."""
    with target(lab, database, shape, JDBC) as into:
        options = _options(into) | {"batchsize": _ROWS}
        options["url"] += "&reWriteBatchedInserts=true"
        started = time.monotonic()
        read = _read(lab, database, rows)
        read.write.format("jdbc").options(**options).mode("append").save()
        return time.monotonic() - started


def to_parquet(lab: Lab, database: str, shape: Shape, rows: int) -> float:
    """Write the table to Parquet, and return the seconds that it takes."""
    folder = lab.directory / f"jdbc-{database}"
    lab.settle()
    started = time.monotonic()
    _read(lab, database, rows).write.parquet(str(folder))
    seconds = time.monotonic() - started
    found = lab.spark.read.parquet(str(folder)).selectExpr(*shape.row.sums).collect()[0]
    check(sums(lab.source.dsn(database), shape, mirror=True), total(iter([tuple(found)])), f"{PARQUET}: sums")
    shutil.rmtree(folder)
    return seconds


def _read(lab: Lab, database: str, rows: int) -> DataFrame:
    options = {
        "fetchsize": _ROWS,
        "partitionColumn": "id",
        "lowerBound": "1",
        "upperBound": str(rows + 1),
        "numPartitions": str(_PARTITIONS),
    }
    return lab.spark.read.format("jdbc").options(**_options(lab.source.dsn(database)), **options).load()


def _options(dsn: str) -> dict[str, str]:
    parts = urlsplit(dsn)
    url = f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?user={parts.username}"
    return {"url": url, "driver": "org.postgresql.Driver", "dbtable": "public.t"}
