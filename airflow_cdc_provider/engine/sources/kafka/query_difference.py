"""Shows people how a query, or the table that it returns, differs from the provisioned one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import unified_diff

from airflow_cdc_provider.engine.core.table import Table

# Where to break a query into lines, because files often have it on a single line.
_CLAUSE = re.compile(
    r"\s+(?=(?:SELECT|FROM|WHERE|GROUP\s+BY|HAVING|UNION|(?:LEFT\s+|RIGHT\s+|INNER\s+|CROSS\s+|FULL\s+)?JOIN)\b)",
    re.IGNORECASE,
)


def text_difference(before: object, now: object) -> str:
    """Return the difference of two values of a key line by line, of a query clause by clause."""
    return _shown(_lines(before), _lines(now)) or "only white space has changed"


def table_difference(before: Table, now: Table) -> str:
    """Return the difference of the columns and keys of two tables."""
    return _shown(_columns(before), _columns(now))


def _lines(value: object) -> list[str]:
    return [line for text in str(value).splitlines() for line in _CLAUSE.split(text.strip()) if line]


def _columns(table: Table) -> list[str]:
    return [*(f"{column.name} {column.type}" for column in table.columns), f"key: {', '.join(table.key) or 'none'}"]


def _shown(before: Iterable[str], now: Iterable[str]) -> str:
    found = unified_diff([*before], [*now], "as provisioned", "in the file", lineterm="", n=1)
    return "\n".join(line for line in found if not line.startswith("@@"))
