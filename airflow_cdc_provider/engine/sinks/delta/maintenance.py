"""What Delta tables need from time to time: small files are joined, and those that no version in reach has are removed.

A stream may go on meanwhile. Joining files and merging rows may want the same files: one of the two commits then fails,
and is done again on what the other has left; rows are never lost. Removing files is of no concern to the stream, but to
readers of versions that are older than the time that is retained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import GateClosed, TargetConflict
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.delta.spark_errors import SPARK_ERRORS, first_line, insistently, session

RETAINED_HOURS = 168.0
"""A week, less than which Delta refuses."""


@dataclass(frozen=True)
class Maintained:
    """What was done to a table.

    :param table: label of the source table.
    :param added: files that others were joined into.
    :param removed: files that were joined.
    """

    table: str
    added: int
    removed: int


def maintain(sink: DeltaSink, tables: Collection[str] = (), retained_hours: float = RETAINED_HOURS) -> list[Maintained]:
    """Join the small files of a pipeline's target tables, then remove files that are out of reach.

    :param tables: labels of source tables; all of the pipeline's by default.
    :param retained_hours: how far back versions can be read afterwards. Delta refuses less than a week, or than the
        table's property ``delta.deletedFileRetentionDuration`` says.
    :returns: in the order of the record.
    :raises GateClosed: when the pipeline has no commit record.
    :raises TargetConflict: when Delta refuses.
    """
    record = sink.record()
    if record is None:
        raise GateClosed(f"pipeline {sink.pipeline} has no commit record", "Run `airflow-cdc provision` first.")
    chosen = [target for target in record.targets if not tables or target.table.label in tables]
    return [_maintained(sink, target, retained_hours) for target in chosen if sink.is_there(target)]


def _maintained(sink: DeltaSink, target: Target, retained_hours: float) -> Maintained:
    spark, name = session(dict(sink.conf)), sink.layout.sql_name(target)
    # VACUUM lists folders in so many tasks: ten thousand by default, however few there are.
    spark.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.parallelism", 4 * spark.sparkContext.defaultParallelism
    )
    try:
        metrics = insistently(lambda: spark.sql(f"OPTIMIZE {name}").select("metrics.*").collect())[0]
        insistently(lambda: spark.sql(f"VACUUM {name} RETAIN {retained_hours:g} HOURS").collect())
    except SPARK_ERRORS as e:
        raise TargetConflict(
            f"{target.schema}.{target.name} could not be maintained: {first_line(e)}",
            "Nothing of its rows has changed. Try again, with a longer retention if that is what it says.",
        ) from e
    return Maintained(target.table.label, metrics["numFilesAdded"], metrics["numFilesRemoved"])
