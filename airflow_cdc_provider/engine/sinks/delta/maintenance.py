"""Maintains Delta tables: joins small files, and removes files that no retained version needs.

The stream can run meanwhile. If joining files and merging rows touch the same files, one of the two commits fails and
is repeated on the result of the other; rows are never lost. Removed files do not affect the stream, only readers of
versions older than the retention.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import GateClosed, TargetConflict
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.delta.spark_errors import SPARK_ERRORS, first_line, retry_on_conflict, session
from airflow_cdc_provider.engine.sinks.delta.table_layout import Named
from airflow_cdc_provider.engine.sinks.delta.view_check import table_exists

RETAINED_HOURS = 168.0
"""One week; Delta refuses less."""


@dataclass(frozen=True)
class MaintainedTable:
    """The result for a table.

    :param table: label of the source table, or of the view.
    :param added: number of files written.
    :param removed: number of files that were joined.
    """

    table: str
    added: int
    removed: int


def maintain(
    sink: DeltaSink, tables: Collection[str] = (), retained_hours: float = RETAINED_HOURS
) -> list[MaintainedTable]:
    """Join the small files of a pipeline's target tables and views, then remove files beyond the retention.

    :param tables: labels of source tables; by default all tables and views of the pipeline.
    :param retained_hours: hours for which old versions stay readable. Delta refuses less than a week, or less than the
        table property ``delta.deletedFileRetentionDuration``.
    :returns: results in the order of the record.
    :raises GateClosed: when the pipeline has no commit record.
    :raises TargetConflict: when Delta refuses.
    """
    record = sink.record()
    if record is None:
        raise GateClosed(f"pipeline {sink.pipeline} has no commit record", "Run `airflow-cdc provision` first.")
    chosen = [target for target in record.targets if not tables or target.table.label in tables]
    views = {version.view.label: version.view for version in sink.view_versions() if version.in_place}
    there: list[tuple[str, Named]] = [(target.table.label, target) for target in chosen if sink.is_there(target)]
    there += [
        (label, view) for label, view in views.items() if not tables and table_exists(sink.spark, sink.layout, view)
    ]
    return [_maintain_table(sink, label, table, retained_hours) for label, table in there]


def _maintain_table(sink: DeltaSink, label: str, table: Named, retained_hours: float) -> MaintainedTable:
    spark, name = session(dict(sink.conf)), sink.layout.sql_name(table)
    # VACUUM lists directories in this many tasks; the default is ten thousand, even for few directories.
    spark.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.parallelism", 4 * spark.sparkContext.defaultParallelism
    )
    try:
        metrics = retry_on_conflict(lambda: spark.sql(f"OPTIMIZE {name}").select("metrics.*").collect())[0]
        retry_on_conflict(lambda: spark.sql(f"VACUUM {name} RETAIN {retained_hours:g} HOURS").collect())
    except SPARK_ERRORS as e:
        raise TargetConflict(
            f"{table.schema}.{table.name} could not be maintained: {first_line(e)}",
            "Its rows have not changed. Try again; if Delta refuses the retention, use a longer one.",
        ) from e
    return MaintainedTable(label, metrics["numFilesAdded"], metrics["numFilesRemoved"])
