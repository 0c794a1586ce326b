"""Checks a files sink. A probe file is written below the path and removed; nothing else is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.core.findings import Caution, Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.files.row_format import CODEC
from airflow_cdc_provider.engine.sinks.files.settings import FilesSettings
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink


def check(settings: FilesSettings, sink: FilesSink, checks: Checks, targets: Sequence[Target] | None) -> None:
    """Check the sink, and whether it can have the targets."""

    def writable() -> str:
        sink.root.require_create()
        return f"Files can be created below {settings.place}, and only if they are absent."

    checks.run("sink", writable)
    if settings.format == "parquet":
        checks.run("codec", _codec)
    if targets is not None:
        checks.run("column names", partial(_column_names, [target.table for target in targets]))
        if checks.passed("sink"):
            checks.run("target folders", partial(_folders, sink, targets))


def _codec() -> str:
    if not pa.Codec.is_available(CODEC):
        raise SparkUnusable(
            f"pyarrow {pa.__version__} lacks the codec {CODEC}", "Install pyarrow's own wheel, also on executors."
        )
    return f"Parquet files can be compressed with {CODEC}."


def _column_names(tables: Sequence[Table]) -> str:
    for table in tables:
        counts = Counter(column.name.lower() for column in table.columns)
        twice = [column.name for column in table.columns if counts[column.name.lower()] > 1]
        if twice:
            raise Caution(
                f"{table.label} has columns that differ only in the case of letters ({', '.join(twice)}). DuckDB"
                " treats them as the same column, and so does Spark unless spark.sql.caseSensitive is true."
            )
    return "Every reader can distinguish the columns."


def _folders(sink: FilesSink, targets: Sequence[Target]) -> str:
    sink.check_targets(targets)
    return "No target directory contains foreign files."
