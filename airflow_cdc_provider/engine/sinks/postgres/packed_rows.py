"""Packs rows with more columns than a table or a statement of Postgres can hold in staging.

A table has at most 1,600 columns, a query 1,664, and a row must fit on a page, where each value takes up to 18 bytes
even if it is stored elsewhere. A staging table has additional columns and the old row. If that is too much, the values
of one kind are staged as one array of texts. They are converted to the target's types when they are applied, as in
shared staging tables; see :mod:`.shared_staging`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.core.record import CHANGELOG_NAMES, Mode, Target
from airflow_cdc_provider.engine.postgres.array_text import array_texts

MOST_COLUMNS = 1600
_MOST_TEXTS = 100  # of the old row in addition to the new one, because a row must fit on a page

NEW, OLD = "c", "b"
"""Names of the packed columns, in place of ``c0`` … (the row) and ``b0`` … (the old row)."""


def pack(rows: pa.Table) -> pa.Table:
    """Pack the columns of staged rows if there are too many."""
    if len(_numbered(OLD, rows)) > _MOST_TEXTS:
        rows = _packed(OLD, rows)
    return _packed(NEW, rows) if rows.num_columns > MOST_COLUMNS else rows


def _numbered(letter: str, rows: pa.Table) -> list[str]:
    return [name for name in rows.column_names if re.fullmatch(rf"{letter}\d+", name)]


def _packed(letter: str, rows: pa.Table) -> pa.Table:
    names = _numbered(letter, rows)
    columns = [rows[name].combine_chunks().cast(pa.large_string()) for name in names]
    return rows.drop_columns(names).append_column(letter, array_texts(columns))


def unpacked(
    relation: sql.Composable, columns: Sequence[str], types: Mapping[str, str], names: Sequence[str]
) -> sql.Composable:
    """Return a relation, in parentheses, whose packed rows have the same columns as others.

    :param columns: the staged columns.
    :param types: types of the target's columns by name, without modifiers; an assignment converts the values, or fails.
    :param names: names of the target's columns, in order.
    """
    others = [sql.Identifier(name) for name in columns if name != NEW]
    values = [
        sql.SQL(f"{NEW}[{i + 1}]::{{}} AS {NEW}{i}").format(sql.SQL(types.get(name, "text")))
        for i, name in enumerate(names)
    ]
    return sql.SQL("(SELECT ctid, {} FROM {})").format(sql.SQL(", ").join([*others, *values]), relation)


def require_width(target: Target, mode: Mode) -> None:
    """Refuse a table whose target would have more columns than Postgres allows.

    :raises LimitExceeded: naming the limit.
    """
    ours = len(CHANGELOG_NAMES) if mode == "changelog" else 0
    count = len(target.table.columns)
    if count + ours > MOST_COLUMNS:
        message = (
            f"{target.table.label} has {count} columns, and its changelog {ours} more, but a Postgres table can have"
            f" at most {MOST_COLUMNS:,}"
        )
        raise LimitExceeded(
            message,
            "Leave columns out with `columns` in the pipeline file, or use a mirror (`sink.mode`). Then start again.",
            message,
        )
