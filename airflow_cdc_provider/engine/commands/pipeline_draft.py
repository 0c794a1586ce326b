"""The text of a first pipeline file: the tables of a source, each with a comment on its size and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.table_rule import plain_pattern
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.core.workload import Workload


@dataclass(frozen=True)
class PipelineDraft:
    """The contents of a first pipeline file.

    :param tables: the tables to copy, with their sizes.
    :param left_out: the reasons why other tables cannot be captured, by label.
    """

    pipeline: str
    source_conn_id: str
    tables: Sequence[tuple[Table, Workload]]
    left_out: Mapping[str, CdcError]
    sink_conn_id: str
    mode: str
    state: str

    def text(self) -> str:
        """Return the file's YAML."""
        entries = [
            (_scalar(plain_pattern(table.schema, table.name)), _line(_remark(table, size)))
            for table, size in self.tables
        ]
        width = max(len(entry) for entry, _ in entries)
        excluded = [f"    # {_line(f'{error.message}. {error.solution}')}" for error in self.left_out.values()]
        return "\n".join([
            "# Written by `airflow-cdc init`; sizes are those of that moment.",
            f"pipeline: {_scalar(self.pipeline)}",
            "source:",
            f"  conn_id: {_scalar(self.source_conn_id)}",
            "  tables:",
            *(f"    - {entry:{width}}  # {remark}" for entry, remark in entries),
            *(["    # Left out, because their changes cannot be captured:"] if excluded else []),
            *excluded,
            "sink:",
            f"  conn_id: {_scalar(self.sink_conn_id)}",
            f"  mode: {self.mode}",
            f"state: {_scalar(self.state)}",
            "",
        ])  # fmt: skip


def _remark(table: Table, size: Workload) -> str:
    key = f"key {', '.join(table.key)}" if table.key else "no key"
    return f"about {size.rows:,} rows, {human_bytes(size.bytes)}, {key}"


def _scalar(text: str) -> str:
    """Return a text as YAML on one line, quoted if needed."""
    style = None if text.isprintable() else '"'  # which escapes line breaks
    dumped: str = yaml.safe_dump(text, default_style=style, allow_unicode=True, width=float("inf"))
    return dumped.removesuffix("\n...\n").rstrip("\n")


def _line(text: str) -> str:
    """Return a text for a comment; a line break in a name must not end it."""
    return "".join(each if each.isprintable() else " " for each in text)
