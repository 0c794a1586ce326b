"""The ``sink`` section of a pipeline file for Delta Lake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import as_flag, as_mapping, as_text, one_of
from airflow_cdc_provider.engine.sinks.lake.paths import as_path, folder

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section

PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Delta for the Spark that the engine needs, as Maven Central has it."""

_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"


@dataclass(frozen=True)
class DeltaSettings:
    """See :class:`.SinkSettings`.

    :param path: the folder of the tables and of the commit record: a local path, or a URL that fsspec knows.
    :param catalog: of Spark, in which the tables are; ``None`` where they are folders below ``path``.
    :param partition_by: by label of a source table, columns by which its target is partitioned.
    :param properties: of tables that are made, beyond ours.
    :param spark: see :meth:`with_spark`; by default what Delta needs, and no more.
    """

    path: str
    catalog: str | None = None
    partition_by: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deletion_vectors: bool = True
    properties: tuple[tuple[str, str], ...] = ()
    mode: Mode = "mirror"
    schema: str = "{schema}"
    type: Literal["delta"] = "delta"
    spark: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, section: Section) -> Self:
        """See :meth:`.SinkSettings.parse`."""
        return cls(
            path=section.take("path", _as_path),
            catalog=section.take("catalog", as_text, "") or None,
            partition_by=section.take("partition_by", _as_columns, ()),
            deletion_vectors=section.take("deletion_vectors", as_flag, True),
            properties=section.take("properties", _as_properties, ()),
            mode=cast(Mode, section.take("mode", one_of("mirror", "changelog"), "mirror")),
            schema=section.take("schema", as_text, "{schema}"),
        )

    @property
    def place(self) -> str:
        """See :attr:`.SinkSettings.place`."""
        return self.path if self.catalog is None else f"catalog {self.catalog}, record in {self.path}"

    @property
    def secrets(self) -> Sequence[str]:
        """See :attr:`.SinkSettings.secrets`: stores are reached with what their clients find in the environment."""
        return ()

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """See :attr:`.SinkSettings.spark_conf`."""
        conf = {
            "spark.jars.packages": PACKAGE,
            "spark.sql.extensions": _EXTENSION,
            # A table's log is read by as many tasks: fifty by default, which is much for the log of most tables.
            "spark.databricks.delta.snapshotPartitions": "4",
            # A task that shuffles into as many as 200 partitions would write a file for each of them.
            "spark.shuffle.sort.bypassMergeThreshold": "8",
        }
        if self.catalog in (None, "spark_catalog"):
            conf["spark.sql.catalog.spark_catalog"] = _CATALOG
        return conf

    def with_spark(self, conf: Mapping[str, str]) -> Self:
        """See :meth:`.SparkBound.with_spark`."""
        return replace(self, spark=tuple(conf.items()))

    @property
    def table_properties(self) -> tuple[tuple[str, str], ...]:
        """Of tables that are made."""
        ours = {
            "delta.enableDeletionVectors": str(self.deletion_vectors).lower(),
            "delta.columnMapping.mode": "name",
        }
        return tuple({**ours, **dict(self.properties)}.items())

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """See :meth:`.SinkSettings.dataset`."""
        if self.catalog is not None:
            return self.catalog, f"{schema}.{name}"
        return self.path, folder(schema, name)


def _as_path(value: object) -> str:
    path = as_path(value)
    if path.startswith("webhdfs://"):
        raise ValueError("a path that Spark reads: it lacks a class that webhdfs:// needs")
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
