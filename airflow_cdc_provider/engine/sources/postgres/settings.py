"""The section ``source`` of a pipeline file whose source is Postgres."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.section_values import as_postgres_uri, database_of
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.sql_condition import find_syntax_problem

_SLOT = re.compile(r"[a-z0-9_]{1,63}")


@dataclass(frozen=True)
class PostgresSourceSettings:
    """The settings of the source; DSNs are libpq URIs with their variables and connection ids resolved.

    :param replication_dsn: for the slot and the log, which take REPLICATION; ``""`` to use ``dsn``.
    """

    dsn: str = field(repr=False)
    tables: tuple[TableRule, ...]
    slot: str
    publication: str
    type: Literal["postgres"] = "postgres"
    replication_dsn: str = field(default="", repr=False)

    @classmethod
    def parse(cls, section: Section, pipeline: str) -> Self:
        """See :meth:`.SourceSettings.parse`."""
        return cls(
            dsn=section.dsn(as_postgres_uri, "postgresql", "Postgres"),
            tables=section.take("tables", as_table_rules),
            slot=section.take("slot", as_slot_name, f"airflow_cdc_{pipeline}"),
            publication=section.take("publication", as_publication_name, f"airflow_cdc_{pipeline}"),
            replication_dsn=section.dsn(as_postgres_uri, "postgresql", "Postgres", prefix="replication_"),
        )

    @property
    def captured(self) -> tuple[str, ...]:
        """Return the patterns of the captured tables."""
        return tuple(rule.pattern for rule in self.tables)

    @property
    def columns_key(self) -> str:
        """See :attr:`.SourceSettings.columns_key`."""
        return "source.tables"

    @property
    def database(self) -> str | None:
        """See :attr:`.SourceSettings.database`."""
        return database_of(self.dsn)

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return no settings, since tables are read without the JVM."""
        return {}

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """Return the namespace and name of a table for OpenLineage."""
        from airflow_cdc_provider.engine.postgres.connection import dataset  # late: reading Dags must not load a driver

        return [dataset(self.dsn, table.schema, table.name)]

    @property
    def log_dsn(self) -> str:
        """Return the DSN of the role that reads the log."""
        return self.replication_dsn or self.dsn

    @property
    def secrets(self) -> Sequence[str]:
        """Return the texts that no log may show."""
        from airflow_cdc_provider.engine.postgres.connection import (
            passwords,  # late: reading Dags must not load a driver
        )

        return [*passwords(self.dsn), *passwords(self.replication_dsn)]


def as_slot_name(value: object) -> str:
    if not isinstance(value, str) or not _SLOT.fullmatch(value):
        raise ValueError("1 to 63 of the characters a-z, 0-9 and _, as Postgres requires of slot names")
    return value


def as_publication_name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= 63 or "\0" in value:
        raise ValueError("a name of 1 to 63 bytes")
    return value


def as_table_rules(value: object) -> tuple[TableRule, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of `schema.table` entries")
    return tuple(as_table_rule(entry) for entry in value)


def as_table_rule(entry: object) -> TableRule:
    if isinstance(entry, str):
        return TableRule(_pattern(entry))
    if not isinstance(entry, dict) or not set(entry) <= {"table", "columns", "where"}:
        raise ValueError("entries `schema.table` or {table: …, columns: […], where: …}")
    columns = entry.get("columns")
    if columns is not None and not (isinstance(columns, list) and columns and all(isinstance(c, str) for c in columns)):
        raise ValueError("columns as a list of names")
    where = entry.get("where")
    if where is not None and not isinstance(where, str):
        raise ValueError("where as an SQL condition")
    if where is not None and (trouble := find_syntax_problem(where)):
        raise ValueError(f"where as one SQL condition ({trouble})")
    return TableRule(_pattern(entry.get("table")), tuple(columns) if columns else None, where)


def _pattern(value: object) -> str:
    if not isinstance(value, str) or "." not in value:
        raise ValueError('tables as `schema.table`, for example public.orders or "sales.*"')
    return value


def has_slot(pipeline: Pipeline) -> bool:
    """Return whether a pipeline reads from a replication slot, and so has :func:`postgres_settings`."""
    return isinstance(pipeline.source, PostgresSourceSettings)


def postgres_settings(pipeline: Pipeline) -> PostgresSourceSettings:
    """Return the source of a pipeline that copies tables of Postgres.

    :raises ConfigError: when the pipeline reads something else.
    """
    if not isinstance(pipeline.source, PostgresSourceSettings):
        raise ConfigError(
            f"pipeline {pipeline.name!r} reads from {pipeline.source.type}: it has no replication slot, nor tables at"
            " a source",
            "Use what asks for them with pipelines whose source.type is postgres.",
        )
    return pipeline.source
