"""The tables that a pipeline file names, with the columns and rows to capture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.table import quote_identifier


@dataclass(frozen=True)
class TableRule:
    """One entry of ``source.tables``.

    :param pattern: ``schema.table``; shell globs are allowed, and double quotes protect a dot or a glob character.
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


def plain_pattern(schema: str, name: str) -> str:
    """Return the pattern that matches only this table."""
    return ".".join(quote_identifier(part) if re.search(r'[.*?["]', part) else part for part in (schema, name))
