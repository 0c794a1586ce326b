"""A Delta table and the statements that change it; each statement is one commit of the table's log.

A commit that writes rows records the number of its step in the table, as the version of an application. The application
is the pipeline. Delta skips a commit whose number is not greater than the recorded one, and refuses a commit that runs
concurrently with another one of the same application. So a step is applied once, however many processes try it and
however often. A late commit of an overtaken run does nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from airflow_cdc_provider.engine.core.effect import ERASED
from airflow_cdc_provider.engine.core.errors import ForeignTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.typed_values import arrow_type
from airflow_cdc_provider.engine.sinks.delta.net_effect import latest
from airflow_cdc_provider.engine.sinks.delta.staging_files import EVENT_COLUMNS, effect_schema, event_schema, row_schema
from airflow_cdc_provider.engine.sinks.delta.table_layout import (
    Layout,
    Named,
    location,
    names_of,
    quoted,
    sql_type,
    table_columns,
)
from airflow_cdc_provider.engine.sinks.delta.table_work import Alteration, StagedFiles, TableWork
from airflow_cdc_provider.engine.sinks.lake.storage import Storage

LOG = "_delta_log"
"""The directory of a table's log."""

_APPLICATION = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
# A statement's number must not carry over to the next statement of the session.
_RESET = "spark.databricks.delta.write.txnVersion.autoReset.enabled"

_COMMIT = re.compile(r"\d{20}\.(json|checkpoint\..+)")
"""Files of a table's log. Without one of them there is no table, because the directory is created first."""


@dataclass(frozen=True)
class DeltaTable:
    """A target table.

    :param spark: a session that is used for nothing else.
    :param home: the directory of staged files.
    """

    spark: SparkSession
    layout: Layout
    target: Target
    mode: Mode
    home: Storage

    @cached_property
    def _name(self) -> str:
        return self.layout.sql_name(self.target)

    @property
    def _columns(self) -> list[str]:
        return [column.name for column in self.target.table.columns]

    @property
    def key(self) -> list[int]:
        """Return the numbers of the key's columns."""
        return [self._columns.index(name) for name in self.target.table.key]

    def exists(self) -> bool:
        """Return whether the table exists."""
        if self.layout.catalog is not None:
            return self.spark.catalog.tableExists(self._name)
        return has_log(self.layout, self.target)

    def create(self) -> None:
        """Create the table, empty, unless it exists."""
        if self.layout.catalog is not None:
            self.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {quoted(self.layout.catalog)}.{quoted(self.target.schema)}")
        columns = ", ".join(f"{quoted(n)} {kind}" for n, kind in table_columns(self.target, self.mode).items())
        partitions = names_of(self.layout.partitions(self.target))
        properties = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in self.layout.properties)
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self._name} ({columns}) USING delta"
            + (f" PARTITIONED BY ({partitions})" if partitions else "")
            + (f" TBLPROPERTIES ({properties})" if properties else "")
        )

    def read(self) -> DataFrame:
        """Return the current rows."""
        return self.spark.table(self._name)

    def columns(self) -> dict[str, str]:
        """Return names and types of the table's columns."""
        return {field.name: field.dataType.simpleString().upper() for field in self.read().schema}

    def schema(self) -> StructType:
        """Return the columns as in the table's log, which marks generated columns; readers cannot see that.

        :raises ForeignTable: when the table is in a catalog and not a Delta table.
        """
        (detail,) = self.spark.sql(f"DESCRIBE DETAIL {self._name}").collect()
        if detail["format"] != "delta":
            name = f"{self.target.schema}.{self.target.name}"
            raise ForeignTable(
                f"the target table {name} exists, but has the format {detail['format']} instead of Delta",
                "Drop the table, so that it is created correctly, or give the pipeline another target schema"
                " (`sink.schema`).",
            )
        of_delta = self.spark._jvm.org.apache.spark.sql.delta  # type: ignore[union-attr]
        log = of_delta.DeltaLog.forTable(self.spark._jsparkSession, detail["location"])
        return StructType.fromJson(json.loads(log.unsafeVolatileSnapshot().metadata().schemaString()))

    def properties(self) -> dict[str, str]:
        """Return the properties of the table."""
        return {row["key"]: row["value"] for row in self.spark.sql(f"SHOW TBLPROPERTIES {self._name}").collect()}

    def empty(self) -> bool:
        """Return whether the table has no rows."""
        return self.read().isEmpty()

    # -- writing ------------------------------------------------------------------------------------

    def write(self, work: TableWork, application: str, number: int, is_open: Callable[[], bool]) -> None:
        """Apply the work of a step, except for the parts that are applied already.

        :param application: the application under which the table records the step.
        :param number: number of the step.
        :param is_open: returns whether the step still has to be done; alterations do not record a number.
        """
        if (work.create or work.alterations) and not is_open():
            return
        if work.create:
            self.create()
        if work.alterations or work.kind == "replace":
            self._allow_types()
        for alteration in work.alterations:
            if is_open():
                self._alter(alteration)
                failpoint("after-column-altered")
        if work.kind == "alter":
            return
        number_next_write(self.spark, application, number)
        if work.kind == "merge":
            self._merge(work)
        elif work.kind == "append":
            self._append(work)
        elif work.kind == "replace":
            self._replace(work)
        else:
            self._fill(work.values)

    def _merge(self, work: TableWork) -> None:
        if not work.parts:
            self.spark.sql(f"DELETE FROM {self._name}")
            return
        effects = self.effects([part.files for part in work.parts])
        # Minus zero and zero are different texts, but equal keys.
        several = len(effects) > 1 or any(
            pa.types.is_floating(arrow_type(column)) for column in self.target.table.key_columns
        )
        (latest(effects, self.key) if several else effects[0]).createOrReplaceTempView("effects")
        names = self._columns
        match = " AND ".join(f"t.{quoted(names[i])} = s.c{i}" for i in self.key)
        values = [f"s.c{i}" for i in range(len(names))]
        assignments = ", ".join(f"t.{quoted(name)} = {value}" for name, value in zip(names, values, strict=True))
        self.spark.sql(
            f"MERGE INTO {self._name} t USING effects s ON {match}"
            f" WHEN MATCHED AND s.{ERASED} THEN DELETE"
            f" WHEN MATCHED THEN UPDATE SET {assignments}"
            f" WHEN NOT MATCHED AND NOT s.{ERASED} THEN INSERT ({names_of(names)}) VALUES ({', '.join(values)})"
            + (" WHEN NOT MATCHED BY SOURCE THEN DELETE" if work.emptied else "")
        )

    def _append(self, work: TableWork) -> None:
        self._rows(work.parts).createOrReplaceTempView("rows")
        columns = names_of(self._written)
        self.spark.sql(f"INSERT INTO {self._name} ({columns}) SELECT {columns} FROM rows")

    def _replace(self, work: TableWork) -> None:
        """Replace all rows, and remove columns that the source lacks, in the same commit."""
        writer = self._rows(work.parts).write.format("delta").mode("overwrite").option("overwriteSchema", "true")
        if partitions := self.layout.partitions(self.target):
            writer = writer.partitionBy(*partitions)
        if self.layout.catalog is None:
            writer.save(location(self.layout.place(self.target)))
        else:
            writer.saveAsTable(self._name)

    def _fill(self, values: Mapping[str, str]) -> None:
        """Fill columns with a value in all existing rows; in a changelog, except in events without values."""
        kinds = {column.name: arrow_type(column) for column in self.target.table.columns}
        assignments = ", ".join(f"{quoted(name)} = {_literal(text, kinds[name])}" for name, text in values.items())
        where = " WHERE _op NOT IN ('d', 't')" if self.mode == "changelog" else ""
        self.spark.sql(f"UPDATE {self._name} SET {assignments}{where}")

    def _alter(self, alteration: Alteration) -> None:
        present = {name.lower(): kind for name, kind in self.columns().items()}
        name, to = alteration.name, alteration.to
        there = name.lower() in present
        if alteration.kind == "rename":
            if there and (to.lower() not in present or to.lower() == name.lower()):
                self._change(f"RENAME COLUMN {quoted(name)} TO {quoted(to)}")
        elif alteration.kind == "drop":
            if there:
                self._change(f"DROP COLUMN {quoted(name)}")
        elif alteration.kind == "add":
            if not there:
                self._change(f"ADD COLUMN ({quoted(name)} {to})")
        elif present.get(name.lower()) != to:
            self._change("SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
            self._change(f"ALTER COLUMN {quoted(name)} TYPE {to}")

    def _allow_types(self) -> None:
        """Enable a type that the table does not support yet; Delta does this automatically when a table is created."""
        wanted, present = (set(columns.values()) for columns in (table_columns(self.target, self.mode), self.columns()))
        if "TIMESTAMP_NTZ" in wanted - present:
            self._change("SET TBLPROPERTIES ('delta.feature.timestampNtz' = 'supported')")

    def _change(self, what: str) -> None:
        self.spark.sql(f"ALTER TABLE {self._name} {what}")

    # -- staged files -------------------------------------------------------------------------------

    def effects(self, files: Iterable[Sequence[str]]) -> list[DataFrame]:
        """Return staged effects."""
        return [self._staged(each, effect_schema(self.target.table)) for each in files]

    @property
    def _written(self) -> list[str]:
        events = [f"_{name}" for name in EVENT_COLUMNS] if self.mode == "changelog" else []
        return self._columns + events

    def _rows(self, parts: Sequence[StagedFiles]) -> DataFrame:
        """Return staged rows or events under the columns' names; the constants of a part supply missing values."""
        return reduce(DataFrame.unionByName, map(self._part, parts))

    def _part(self, part: StagedFiles) -> DataFrame:
        table = self.target.table
        names = {f"c{i}": name for i, name in enumerate(self._columns)}
        if self.mode == "mirror":
            staged = self._staged(part.files, row_schema(table))
            return staged.select(*(f.col(c).alias(name) for c, name in names.items()))
        # Files of rows that were read lack an event's columns.
        events = self._staged(part.files, event_schema(table))
        kinds = {name: sql_type(kind) for name, kind in EVENT_COLUMNS.items()}
        constants = {
            name: f.timestamp_micros(f.lit(value)) if name == "commit_ts" else f.lit(value).cast(kinds[name])
            for name, value in part.constants.items()
        }
        own = [f.coalesce(f.col(name), constants[name]) if name in constants else f.col(name) for name in kinds]
        return events.select(
            *(f.col(c).alias(name) for c, name in names.items()),
            *(column.alias(f"_{name}") for column, name in zip(own, kinds, strict=True)),
        )

    def _staged(self, files: Sequence[str], schema: pa.Schema) -> DataFrame:
        """Return the rows of staged files; missing columns are null."""
        paths = [location(self.home / name) for name in files]
        types = ", ".join(f"{field.name} {sql_type(field.type)}" for field in schema)
        return self.spark.read.schema(types).parquet(*paths)


def number_next_write(spark: SparkSession, application: str, number: int) -> None:
    """Let the next write of a session record a number, and do nothing if the table has it or a greater one."""
    for name, value in {_APPLICATION: application, _VERSION: str(number), _RESET: "true"}.items():
        spark.conf.set(name, value)


def has_log(layout: Layout, table: Named) -> bool:
    """Return whether a path table exists with at least one log entry."""
    return any(map(_COMMIT.fullmatch, (layout.place(table) / LOG).names()))


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _literal(text: str, kind: pa.DataType) -> str:
    """Return a value in the text format of Postgres as an SQL expression."""
    if pa.types.is_large_binary(kind):
        return f"unhex({_text(text[2:])})"
    return f"CAST({_text(text)} AS {sql_type(kind)})"
