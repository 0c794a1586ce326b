"""Determines the location, names, columns and properties of a Delta sink's tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ConfigError, UncapturableTable
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.typed_values import arrow_type
from airflow_cdc_provider.engine.sinks.delta.staging_files import EVENT_COLUMNS
from airflow_cdc_provider.engine.sinks.lake.paths import folder
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.views.settings import ViewSettings

_SCHEMES = {"s3": "s3a", "gcs": "gs", "local": "file"}
"""Hadoop's names of schemes whose fsspec names differ."""

_SESSION_CATALOG = "spark_catalog"
_IN_SESSION_CATALOG = re.compile("[A-Za-z0-9_]+")

_NOT_IN_FILES = frozenset(" ,;{}()\n\t=")
"""Characters that column names must not contain, unless columns are mapped."""


# Statements of Delta and Spark add these columns to a table, in any case of letters, and would then find them twice.
_RESERVED = frozenset({"_metadata", "deletionvectorid", "_row_dropped_", "_source_row_present_", "__condition__"})
_RESERVED_PREFIX = "__delta_internal_"
_CHANGE_FEED = frozenset({"_change_type", "_commit_version", "_commit_timestamp"})


class Named(Protocol):
    """A table: a target, or a view."""

    @property
    def schema(self) -> str:
        """Return its schema."""

    @property
    def name(self) -> str:
        """Return its name."""


@dataclass(frozen=True)
class Layout:
    """The settings of a Delta sink for its tables.

    :param root: parent directory of path tables.
    :param catalog: the Spark catalog of the tables; ``None`` for path tables.
    :param partition_by: by label, the columns by which a table is partitioned.
    :param properties: properties of created tables.
    """

    root: Storage
    catalog: str | None = None
    partition_by: tuple[tuple[str, tuple[str, ...]], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()

    def place(self, table: Named) -> Storage:
        """Return the directory of a path table."""
        return self.root / folder(table.schema, table.name)

    def known_as(self, schema: str, name: str) -> tuple[str, str]:
        """Return the identity of a table; a catalog ignores the case of letters."""
        return (schema, name) if self.catalog is None else (schema.lower(), name.lower())

    def sql_name(self, table: Named) -> str:
        """Return the name of a table in statements."""
        if self.catalog is None:
            return f"delta.{quoted(location(self.place(table)))}"
        return ".".join(map(quoted, (self.catalog, table.schema, table.name)))

    def partitions(self, target: Target) -> tuple[str, ...]:
        """Return the columns by which a table is partitioned."""
        return dict(self.partition_by).get(target.table.label, ())


def quoted(name: str) -> str:
    """Return a quoted name for a statement."""
    return "`" + name.replace("`", "``") + "`"


def location(place: Storage) -> str:
    """Return the location of a place, as a URL for Hadoop."""
    if place.local:
        return f"file://{place.path()}"
    scheme, colon, rest = place.url.partition("://")
    return f"{_SCHEMES.get(scheme, scheme)}{colon}{rest}".rstrip("/")


def table_columns(target: Target, mode: Mode) -> dict[str, str]:
    """Return names and SQL types of a table's columns."""
    columns = {column.name: sql_type(arrow_type(column)) for column in target.table.columns}
    if mode == "changelog":
        columns |= {f"_{name}": sql_type(kind) for name, kind in EVENT_COLUMNS.items()}
    return columns


def sql_type(kind: pa.DataType) -> str:
    """Return the Spark type for a type of :func:`.column_values.arrow_type`."""
    if pa.types.is_list(kind):
        return f"ARRAY<{sql_type(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP_NTZ" if kind.tz is None else "TIMESTAMP"
    names = {
        pa.bool_(): "BOOLEAN",
        pa.int16(): "SMALLINT",
        pa.int32(): "INT",
        pa.int64(): "BIGINT",
        pa.float32(): "FLOAT",
        pa.float64(): "DOUBLE",
        pa.date32(): "DATE",
        pa.large_binary(): "BINARY",
    }
    return names.get(kind, "STRING")


def require_possible(layout: Layout, target: Target, mode: Mode) -> None:
    """Refuse a table that Delta cannot hold.

    :raises UncapturableTable: when the table has no key to merge by, or when names of columns differ only in case, are
        reserved, or are impossible in files.
    :raises ConfigError: when its partition columns do not exist or are unusable for Spark, or when the catalog cannot
        have the names of its target.
    """
    label = target.table.label
    if layout.catalog == _SESSION_CATALOG and not all(map(_IN_SESSION_CATALOG.fullmatch, (target.schema, target.name))):
        raise ConfigError(
            f"the target of {label} would be {target.schema}.{target.name}, but names in {_SESSION_CATALOG} consist of"
            " letters from A to Z, digits and _",
            "Remove sink.catalog, so that tables are directories with any name. Or name another catalog, or a"
            " sink.schema without {schema}; or do not capture the table.",
        )
    if mode == "mirror" and not target.table.key:
        raise UncapturableTable(
            f"{label} has no key by which rows can be merged into a Delta table",
            "Give it a primary key or a replica identity index, do not capture it, or use mode: changelog.",
        )
    seen: dict[str, str] = {}
    for name in table_columns(target, mode):
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise UncapturableTable(
                f"{label} has columns {other} and {name}, which are the same column to Delta",
                "Rename one, or leave it out with `columns` in source.tables.",
            )
    reserved = [name for name in seen.values() if is_reserved(layout, name)]
    if reserved:
        raise UncapturableTable(
            f"{label} has columns ({', '.join(reserved)}) whose names are reserved by Delta or Spark",
            "Rename them at the source, or leave them out with `columns` in source.tables.",
        )
    if dict(layout.properties).get("delta.columnMapping.mode") == "none":
        refused = [name for name in seen.values() if _NOT_IN_FILES & set(name)]
        if refused:
            raise UncapturableTable(
                f"{label} has columns ({', '.join(refused)}) with a space or one of ,;{{}}()= in their names, which"
                " files of a Delta table do not allow",
                "Remove delta.columnMapping.mode from sink.properties, or leave the columns out with `columns` in"
                " source.tables.",
            )
    lacking = [name for name in layout.partitions(target) if name not in table_columns(target, mode)]
    if lacking:
        raise ConfigError(
            f"sink.partition_by: {label} has no column {', '.join(lacking)}",
            f"Name columns that are captured: {', '.join(table_columns(target, mode))}.",
        )
    parsed = [name for name in layout.partitions(target) if "." in name or "`" in name]
    if parsed:
        raise ConfigError(
            f"sink.partition_by: Spark cannot use the names of these columns of {label}: {', '.join(parsed)}",
            "Partition by columns whose names have no dots and backquotes.",
        )


def is_reserved(layout: Layout, name: str) -> bool:
    """Return whether Delta or Spark use the name of a column internally."""
    lower = name.lower()
    feeds = dict(layout.properties).get("delta.enableChangeDataFeed", "").lower() == "true"
    return lower in _RESERVED or lower.startswith(_RESERVED_PREFIX) or (feeds and lower in _CHANGE_FEED)


def require_apart(layout: Layout, targets: Sequence[Target], views: Sequence[ViewSettings] = ()) -> None:
    """Refuse tables and views that would be the same table; a catalog ignores the case of letters.

    :raises ConfigError: naming two of them.
    """
    taken = {layout.known_as(target.schema, target.name): target.table.label for target in targets}
    for view in views:
        name = layout.known_as(view.schema, view.name)
        if name in taken:
            raise ConfigError(
                f"view {view.label}: {taken[name]} has a table of this name in the sink", "Give the view another name."
            )
        taken[name] = f"view {view.label}"
    seen: dict[tuple[str, str], Target] = {}
    for target in targets if layout.catalog is not None else ():
        other = seen.setdefault(layout.known_as(target.schema, target.name), target)
        if other is not target:
            raise ConfigError(
                f"the targets of {other.table.label} and {target.table.label} would be one table of the catalog"
                f" {layout.catalog}, which ignores the case of letters",
                "Remove sink.catalog, so that tables are directories; or capture one of them in another pipeline with"
                " another sink.schema.",
            )


def names_of(columns: Sequence[str]) -> str:
    """Return quoted names, separated by commas."""
    return ", ".join(map(quoted, columns))
