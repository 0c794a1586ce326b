"""Reads versions of Delta tables, and the rows in files that differ between two versions.

A file of a table never changes. Its deletion vector, which hides rows, may; the log then removes the file and adds it
again. So rows in files that no entry of the log between two versions names are the same in both versions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.sinks.delta.spark_errors import is_one_of
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, Named, location
from airflow_cdc_provider.engine.sinks.delta.view_record import Pin

_GONE = (
    "DELTA_VERSION_NOT_FOUND",
    "DELTA_TRUNCATED_TRANSACTION_LOG",
    "DELTA_LOG_FILE_NOT_FOUND",
    "non-existent version",
    "VersionNotFoundException",
    "DELTA_STATE_RECOVER_ERROR",
    "DELTA_FILE_NOT_FOUND",
    "FAILED_READ_FILE",
    "FileNotFoundException",
    "DELTA_TABLE_NOT_FOUND",
    "PATH_NOT_FOUND",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_MISSING_TRANSACTION_LOG",
    "DELTA_UNSUPPORTED_TIME_TRAVEL_BEYOND_DELETED_FILE_RETENTION_DURATION",
)
_NAMED_FILES = 2000
"""Files up to which only those are looked up in a table's log."""


class VersionGone(Exception):
    """A version of a table can no longer be read: its files were removed, or the table is another one."""


def is_gone(error: Exception) -> bool:
    """Return whether an error of Spark means that a version, or a file of it, no longer exists."""
    return is_one_of(_GONE, error)


class TableVersions:
    """The versions of a Delta table.

    :param spark: the session in which rows are read.
    """

    def __init__(self, spark: SparkSession, layout: Layout, table: Named) -> None:
        self._spark = spark
        self._jvm = cast(Any, spark._jvm)
        self._name = layout.sql_name(table)
        if layout.catalog is None:
            place = location(layout.place(table))
        else:
            (detail,) = spark.sql(f"DESCRIBE DETAIL {self._name}").collect()
            place = detail["location"]
        self._log = self._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, place)

    def _default(self, method: str, number: int) -> Any:
        """Return the default of a parameter of a Scala method."""
        return getattr(self._log, f"{method}$default${number}")()

    def current(self) -> Pin:
        """Return the current version."""
        snapshot = self._log.update(False, self._default("update", 2), self._default("update", 3))
        return Pin(snapshot.metadata().id(), snapshot.version())

    def _snapshot(self, pin: Pin) -> Any:
        """Return the state of the table at a version.

        :raises VersionGone: when it is gone.
        """
        try:
            defaults = (self._default("getSnapshotAt", n) for n in (2, 3, 4))
            found = self._log.getSnapshotAt(pin.version, *defaults)
            if found.metadata().id() != pin.id:
                raise VersionGone(f"the table was created again since version {pin.version}")
        except Py4JJavaError as e:
            if is_gone(e) or "IllegalState" in str(e):
                raise VersionGone(f"version {pin.version} is gone") from e
            raise
        return found

    def number(self, pin: Pin, application: str) -> int | None:
        """Return the number that an application's last write to a version has, see :func:`.number_next_write`.

        :raises VersionGone: when it is gone.
        """
        found = self._snapshot(pin).transactions().get(application)
        return int(found.get()) if found.isDefined() else None

    def rows(self, pin: Pin) -> DataFrame:
        """Return the rows of a version."""
        self._snapshot(pin)
        return self._spark.sql(f"SELECT * FROM {self._name} VERSION AS OF {pin.version}")

    def differing(self, before: Pin, after: Pin) -> tuple[DataFrame, DataFrame] | None:
        """Return the rows of each of two versions in files in which they may differ; ``None`` if they do not."""
        old, new = self._snapshot(before), self._snapshot(after)
        files = self._changed_files(before.version, after.version)
        if not files:
            return None
        return self._rows(old, files), self._rows(new, files)

    def _changed_files(self, before: int, after: int) -> Collection[str]:
        """Return the files that entries after one version up to another name; none if they only rearrange rows."""
        found, changes_rows = set(), False
        try:
            entries = self._log.getChanges(before + 1, after, self._default("getChanges", 2), True)
            while entries.hasNext():
                actions = entries.next()._2().iterator()
                while actions.hasNext():
                    action = actions.next()
                    if action.getClass().getSimpleName() in ("AddFile", "RemoveFile"):
                        found.add(action.path())
                        changes_rows = changes_rows or action.dataChange()
        except Py4JJavaError as e:
            if is_gone(e) or "IllegalState" in str(e):
                raise VersionGone(f"entries after version {before} are gone") from e
            raise
        return found if changes_rows else ()

    def _rows(self, snapshot: Any, files: Collection[str]) -> DataFrame:
        """Return the rows of a version in some of its files."""
        there = snapshot.allFiles()
        if len(files) <= _NAMED_FILES:
            names = ", ".join("'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'" for name in sorted(files))
            there = there.filter(f"path IN ({names})")
        chosen = self._jvm.java.util.ArrayList()
        for file in there.collectAsList():
            if file.path() in files:
                chosen.add(file)
        sequence = self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(chosen).toSeq()
        found = self._log.createDataFrame(snapshot, sequence, False, self._default("createDataFrame", 4))
        # Delta gives it the session that is active in the thread; its plan is needed in ours.
        dataset = self._jvm.org.apache.spark.sql.classic.Dataset
        return DataFrame(dataset.ofRows(self._spark._jsparkSession, found.logicalPlan()), self._spark)
