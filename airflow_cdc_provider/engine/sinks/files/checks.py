"""What can be checked of a files sink. A probe is written below the path and removed; nothing else is changed."""

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
    """See :meth:`.SinkPlugin.check`."""

    def writable() -> str:
        sink.root.require_create()
        return f"Files can be created below {settings.place}, each only if it is absent."

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
            f"pyarrow {pa.__version__} lacks the codec {CODEC}", "Install pyarrow's own wheel, on executors, too."
        )
    return f"Parquet files can be compressed with {CODEC}."


def _column_names(tables: Sequence[Table]) -> str:
    for table in tables:
        counts = Counter(column.name.lower() for column in table.columns)
        twice = [column.name for column in table.columns if counts[column.name.lower()] > 1]
        if twice:
            raise Caution(
                f"{table.label} has columns that differ only in the case of letters ({', '.join(twice)}): DuckDB, and"
                " Spark unless spark.sql.caseSensitive is true, take them for one."
            )
    return "Every reader tells the columns apart."


def _folders(sink: FilesSink, targets: Sequence[Target]) -> str:
    sink.check_targets(targets)
    return "No target folder has files of others."
