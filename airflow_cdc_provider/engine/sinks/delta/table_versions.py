"""Reads versions of Delta tables, and the rows in files that differ between two versions.

A file of a table never changes. Its deletion vector, which hides rows, may; the log then removes the file and adds it
again. So rows in files that no entry of the log between two versions names are the same in both versions.

An entry may also rearrange rows, such as that of OPTIMIZE: the files that it adds have the rows of those that it
removes. Or it describes files again that are there already; then it removes none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
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
_OF_FILE = (
    "path",
    "partitionValues",
    "size",
    "dataChange",
    "deletionVector",
    "baseRowId",
    "defaultRowCommitVersion",
)
"""What the log says of files that it adds, and of those that it removes."""

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
        self._action = self._jvm.org.apache.spark.sql.delta.actions.Action
        self._snapshots: dict[Pin, Any] = {}
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
        """Return the current version.

        :raises VersionGone: when the table does not exist.
        """
        snapshot = self._log.update(False, self._default("update", 2), self._default("update", 3))
        pin = Pin(snapshot.metadata().id(), snapshot.version())
        if pin.version < 0:
            raise VersionGone("the table does not exist")
        self._snapshots[pin] = snapshot
        return pin

    def _snapshot(self, pin: Pin) -> Any:
        """Return the state of the table at a version.

        :raises VersionGone: when it is gone.
        """
        if pin in self._snapshots:
            return self._snapshots[pin]
        try:
            defaults = (self._default("getSnapshotAt", n) for n in (2, 3, 4))
            found = self._log.getSnapshotAt(pin.version, *defaults)
            if found.metadata().id() != pin.id:
                raise VersionGone(f"the table was created again since version {pin.version}")
        except Py4JJavaError as e:
            if is_gone(e) or "IllegalState" in str(e):
                raise VersionGone(f"version {pin.version} is gone") from e
            raise
        self._snapshots[pin] = found
        return found

    def number(self, pin: Pin, application: str) -> int | None:
        """Return the number that an application's last write to a version has, see :func:`.number_next_write`.

        :raises VersionGone: when it is gone.
        """
        found = self._snapshot(pin).transactions().get(application)
        return int(found.get()) if found.isDefined() else None

    def rows(self, pin: Pin) -> DataFrame:
        """Return the rows of a version.

        :raises VersionGone: when it is gone.
        """
        self._snapshot(pin)
        return self._spark.sql(f"SELECT * FROM {self._name} VERSION AS OF {pin.version}")

    def listed_rows(self, pin: Pin) -> DataFrame:
        """Return the rows of a version, of which all files are listed now.

        Of :meth:`rows`, each query lists those that it needs, once for each mention of the table. In a small step of a
        view that takes longer than everything else.

        :raises VersionGone: when it is gone.
        """
        snapshot = self._snapshot(pin)
        return self._in_files(snapshot, snapshot.filesForScan(self._sequence(()), False).files())

    def differing(self, before: Pin, after: Pin) -> tuple[DataFrame, DataFrame] | None:
        """Return the rows of each of two versions in files in which they may differ; ``None`` if they do not.

        :raises VersionGone: when one is gone.
        """
        later = self._snapshot(after)
        if before.id != after.id:
            raise VersionGone(f"the table was created again since version {before.version}")
        removed, added, redescribed = self._changed_files(before.version, after.version)
        if not removed and not added:
            return None
        # To read the state of the earlier version takes as long as a small step.
        earlier = self._snapshot(before) if redescribed else later
        old, new = self._sequence(map(self._file, removed)), self._sequence(map(self._file, added))
        return self._in_files(earlier, old), self._in_files(later, new)

    def _changed_files(self, before: int, after: int) -> tuple[Collection[_File], Collection[_File], bool]:
        """Return the files that only the earlier version has, those that only the later one has, and whether entries
        between them change the table's columns or protocol.

        There are no files if entries only rearrange rows.
        """
        removed: dict[_Name, _File] = {}
        added: dict[_Name, _File] = {}
        changes_rows = redescribed = False
        for entry in self._entries(before, after):
            kinds = {kind for kind, _ in entry}
            redescribed = redescribed or not kinds.isdisjoint(("metaData", "protocol"))
            for kind, file in entry:
                if kind not in ("add", "remove") or not ("remove" in kinds or file["dataChange"]):
                    continue
                changes_rows = changes_rows or file["dataChange"]
                name = (file["path"], json.dumps(file.get("deletionVector"), sort_keys=True))
                gained, lost = (added, removed) if kind == "add" else (removed, added)
                if lost.pop(name, None) is None:
                    gained[name] = file
        return (removed.values(), added.values(), redescribed) if changes_rows else ((), (), False)

    def _entries(self, before: int, after: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Yield the actions of each entry of the log after one version up to another, with their kinds.

        :raises VersionGone: when an entry is gone.
        """
        try:
            entries = self._log.getChanges(before + 1, after, self._default("getChanges", 2), True)
            while entries.hasNext():
                actions, found = entries.next()._2().iterator(), []
                while actions.hasNext():
                    found += json.loads(actions.next().json()).items()
                yield found
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
        return self._action.fromJson(text)

    def _sequence(self, values: Iterable[Any]) -> Any:
        """Return a sequence of Scala."""
        found = self._jvm.java.util.ArrayList()
        for value in values:
            found.add(value)
        return self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(found).toSeq()

    def _in_files(self, snapshot: Any, files: Any) -> DataFrame:
        """Return the rows in some files, read as those of a version."""
        found = self._log.createDataFrame(snapshot, files, False, self._default("createDataFrame", 4))
        # Delta gives it the session that is active in the thread; its plan is needed in ours.
        dataset = self._jvm.org.apache.spark.sql.classic.Dataset
        return DataFrame(dataset.ofRows(self._spark._jsparkSession, found.logicalPlan()), self._spark)
