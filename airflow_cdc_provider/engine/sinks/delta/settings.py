"""The ``sink`` section of a pipeline file for Delta Lake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import as_flag, as_mapping, as_text, one_of
from airflow_cdc_provider.engine.sinks.lake.paths import as_path, folder
from airflow_cdc_provider.engine.views.settings import ViewSettings, require_mirror, take_views

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section

PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Maven coordinates of Delta, for the Spark version that the engine needs."""

_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"


@dataclass(frozen=True)
class DeltaSettings:
    """Settings of a Delta sink.

    :param path: directory of the tables and of the commit record: a local path, or a URL for fsspec.
    :param catalog: the Spark catalog of the tables; ``None`` if they are directories below ``path``.
    :param partition_by: by label of a source table, the columns by which its target is partitioned.
    :param properties: further properties of created tables.
    :param views: the views over the mirror.
    :param spark: see :meth:`with_spark`; by default only what Delta needs.
    """

    path: str
    catalog: str | None = None
    partition_by: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deletion_vectors: bool = True
    properties: tuple[tuple[str, str], ...] = ()
    mode: Mode = "mirror"
    schema: str = "{schema}"
    views: tuple[ViewSettings, ...] = ()
    type: Literal["delta"] = "delta"
    spark: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Parse the section."""
        mode = cast(Mode, section.take("mode", one_of("mirror", "changelog"), "mirror"))
        return cls(
            path=section.take("path", _as_path),
            catalog=section.take("catalog", as_text, "") or None,
            partition_by=section.take("partition_by", _as_columns, ()),
            deletion_vectors=section.take("deletion_vectors", as_flag, True),
            properties=section.take("properties", _as_properties, ()),
            mode=mode,
            schema=section.take("schema", as_text, "{schema}"),
            views=require_mirror(mode, take_views(section)),
        )

    @property
    def place(self) -> str:
        """Return the location of the tables, for messages."""
        return self.path if self.catalog is None else f"catalog {self.catalog}, record in {self.path}"

    @property
    def secrets(self) -> Sequence[str]:
        """Return no secrets: clients of the stores find credentials in the environment."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return the Spark configuration that Delta needs."""
        conf = {
            "spark.jars.packages": PACKAGE,
            "spark.sql.extensions": _EXTENSION,
            # Number of tasks that read a table's log. The default is fifty, too many for most tables.
            "spark.databricks.delta.snapshotPartitions": "4",
            # Otherwise a task that shuffles into up to 200 partitions would write a file for each of them.
            "spark.shuffle.sort.bypassMergeThreshold": "8",
        }
        if self.catalog in (None, "spark_catalog"):
            conf["spark.sql.catalog.spark_catalog"] = _CATALOG
        return conf

    def with_spark(self, conf: Mapping[str, str]) -> Self:
        """Return the settings with a configuration for Spark."""
        return replace(self, spark=tuple(conf.items()))

    @property
    def table_properties(self) -> tuple[tuple[str, str], ...]:
        """Return the properties of created tables."""
        ours = {
            "delta.enableDeletionVectors": str(self.deletion_vectors).lower(),
            "delta.columnMapping.mode": "name",
        }
        return tuple({**ours, **dict(self.properties)}.items())

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the dataset of a target table."""
        if self.catalog is not None:
            return self.catalog, f"{schema}.{name}"
        return self.path, folder(schema, name)


def _as_path(value: object) -> str:
    path = as_path(value)
    if path.startswith("webhdfs://"):
        raise ValueError("a path that Spark can read; it lacks a class for webhdfs://")
    return path


def _as_properties(value: object) -> tuple[tuple[str, str], ...]:
    return tuple(as_mapping(value).items())


def _as_columns(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    wanted = "a mapping of source tables, as schema.table, to lists of columns"
    if not isinstance(value, dict):
        raise ValueError(wanted)
    for columns in value.values():
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise ValueError(wanted)
    return tuple((str(label), tuple(columns)) for label, columns in value.items())
