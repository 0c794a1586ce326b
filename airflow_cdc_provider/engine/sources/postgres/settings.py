"""The section ``source`` of a pipeline file whose source is Postgres."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble

_SLOT = re.compile(r"[a-z0-9_]{1,63}")


@dataclass(frozen=True)
class TableRule:
    """One entry of ``source.tables``.

    :param pattern: ``schema.table``, shell globs allowed, double quotes protect a dot or a glob character.
    :param columns: the columns to capture, ``None`` for all.
    :param where: an SQL condition on the rows to capture, ``None`` for all.
    """

    pattern: str
    columns: tuple[str, ...] | None = None
    where: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableRule:
        """Read a rule from its fields as JSON values."""
        columns = values["columns"]
        return cls(values["pattern"], None if columns is None else tuple(columns), values["where"])


@dataclass(frozen=True)
class Source:
    """Where changes come from; DSNs are libpq URIs with their variables and connection ids resolved.

    :param replication_dsn: for what takes REPLICATION, the slot and the log; ``""`` to use ``dsn`` for it.
    """

    dsn: str = field(repr=False)
    tables: tuple[TableRule, ...]
    slot: str
    publication: str
    type: Literal["postgres"] = "postgres"
    replication_dsn: str = field(default="", repr=False)

    @property
    def log_dsn(self) -> str:
        """As whom the log is read."""
        return self.replication_dsn or self.dsn

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that no log may show."""
        from airflow_cdc_provider.engine.postgres.connection import (
            passwords,  # late: reading Dags must not load a driver
        )

        return [*passwords(self.dsn), *passwords(self.replication_dsn)]


def as_slot_name(value: object) -> str:
    if not isinstance(value, str) or not _SLOT.fullmatch(value):
        raise ValueError("1 to 63 of the characters a-z, 0-9 and _, as Postgres demands of slot names")
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
    if where is not None and (trouble := find_trouble(where)):
        raise ValueError(f"where as one SQL condition ({trouble})")
    return TableRule(_pattern(entry.get("table")), tuple(columns) if columns else None, where)


def _pattern(value: object) -> str:
    if not isinstance(value, str) or "." not in value:
        raise ValueError('tables as `schema.table`, for example public.orders or "sales.*"')
    return value
