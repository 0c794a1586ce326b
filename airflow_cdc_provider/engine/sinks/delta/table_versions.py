"""Reads versions of Delta tables, and the rows in files that differ between two versions.

A file of a table never changes. Its deletion vector, which hides rows, may; the log then removes the file and adds it
again. So rows in files that no entry of the log between two versions names are the same in both versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
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
_OF_FILE = ("path", "partitionValues", "size", "dataChange", "deletionVector")

_File = dict[str, Any]
"""A file as the log describes it."""
_Name = tuple[str, str]
"""The path of a file, and its deletion vector."""


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
        """Return the rows of a version.

        Its files are listed here and once. A query by name would list them again for each mention of the table, which
        takes longer than everything else in a small step.

        :raises VersionGone: when it is gone.
        """
        snapshot = self._snapshot(pin)
        return self._rows(snapshot, snapshot.filesForScan(self._sequence(()), False).files())

    def differing(self, before: Pin, after: Pin) -> tuple[DataFrame, DataFrame] | None:
        """Return the rows of each of two versions in files in which they may differ; ``None`` if they do not.

        Both have the columns of the later version.

        :raises VersionGone: when one is gone.
        """
        later = self._snapshot(after)
        if before.id != after.id:
            raise VersionGone(f"the table was created again since version {before.version}")
        removed, added = self._changed_files(before.version, after.version)
        if not removed and not added:
            return None
        old, new = (self._rows(later, self._sequence(map(self._file, files))) for files in (removed, added))
        return old, new

    def _changed_files(self, before: int, after: int) -> tuple[list[_File], list[_File]]:
        """Return the files of one version that another may lack, and those that it may have gained.

        They come from the entries of the log between the versions, which is faster than to compare two lists of all
        files. There are none if entries only rearrange rows.
        """
        removed: dict[_Name, _File] = {}
        added: dict[_Name, _File] = {}
        changes_rows = False
        for kind, file in self._entries(before, after):
            changes_rows = changes_rows or file["dataChange"]
            name = (file["path"], json.dumps(file.get("deletionVector"), sort_keys=True))
            if kind == "add":
                if removed.pop(name, None) is None:
                    added[name] = file
            else:
                former = added.pop(name, None)
                # Such an entry may add a file that is there already, for example to supplement statistics.
                if former is None or not former["dataChange"]:
                    removed[name] = file
        return ([*removed.values()], [*added.values()]) if changes_rows else ([], [])

    def _entries(self, before: int, after: int) -> Iterator[tuple[str, _File]]:
        """Yield the files that entries add and remove, in order, with "add" or "remove".

        :raises VersionGone: when an entry is gone.
        """
        try:
            entries = self._log.getChanges(before + 1, after, self._default("getChanges", 2), True)
            while entries.hasNext():
                actions = entries.next()._2().iterator()
                while actions.hasNext():
                    ((kind, values),) = json.loads(actions.next().json()).items()
                    if kind in ("add", "remove"):
                        yield kind, values
        except Py4JJavaError as e:
            if is_gone(e) or "IllegalState" in str(e):
                raise VersionGone(f"entries after version {before} are gone") from e
            raise

    def _file(self, file: _File) -> Any:
        """Return a file, also one that has been removed, as one of a version."""
        if "partitionValues" not in file or "size" not in file:
            raise VersionGone("another writer has removed a file without a description")
        values = {name: file[name] for name in _OF_FILE if name in file}
        text = json.dumps({"add": {"modificationTime": 0, **values}})
        return self._jvm.org.apache.spark.sql.delta.actions.Action.fromJson(text)

    def _sequence(self, values: Iterable[Any]) -> Any:
        """Return a sequence of Scala."""
        found = self._jvm.java.util.ArrayList()
        for value in values:
            found.add(value)
        return self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(found).toSeq()

    def _rows(self, snapshot: Any, files: Any) -> DataFrame:
        """Return the rows in some files, read as those of a version."""
        found = self._log.createDataFrame(snapshot, files, False, self._default("createDataFrame", 4))
        # Delta gives it the session that is active in the thread; its plan is needed in ours.
        dataset = self._jvm.org.apache.spark.sql.classic.Dataset
        return DataFrame(dataset.ofRows(self._spark._jsparkSession, found.logicalPlan()), self._spark)
