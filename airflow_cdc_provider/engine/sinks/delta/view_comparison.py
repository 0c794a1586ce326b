"""Compares the rows of a view in Delta with its SELECT, at the versions of the tables that the view has reached.

The record tells these versions, so the comparison is exact while a stream runs. Rows are compared as bags. Sums of
floating-point numbers depend on the order of the rows, so floating-point columns of a grouped view may differ by a
relative error of 1e-9. A step writes the table before the record says so; the number of the table's last write tells
which moment it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.comparison.compare import NAMED, PASS_TIMEOUT, Difference, DifferenceKind
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.delta.spark_errors import SPARK_ERRORS, examination_failure
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, quoted
from airflow_cdc_provider.engine.sinks.delta.table_versions import TableVersions, VersionGone, is_gone
from airflow_cdc_provider.engine.sinks.delta.view_check import table_exists
from airflow_cdc_provider.engine.sinks.delta.view_record import DeltaView, Moment, views_of
from airflow_cdc_provider.engine.sinks.delta.view_rows import ViewRows, bags
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents, targets_of


def compare_view(
    spark: SparkSession, layout: Layout, contents: Callable[[], Contents], application: str, label: str
) -> ViewResult | None:
    """Compare a view with its SELECT.

    :param contents: returns the present contents of the log.
    :param application: the application under which the view's table records numbers of moments.
    :param label: the view's label.
    :returns: ``None`` if no recorded version can be compared: the view has been removed, or a table that it reads.
    :raises UnknownTable: if its table does not exist, or versions that it was computed from.
    """
    found: list[ViewResult | None] = []

    def compared() -> bool:
        try:
            found.extend(_compare_once(spark, layout, contents, application, label))
            return bool(found)
        except SPARK_ERRORS as e:
            raise (_gone(label) if is_gone(e) else examination_failure(e)) from e
        except VersionGone as e:
            raise _gone(label) from e

    if not await_condition(compared, PASS_TIMEOUT):
        raise _gone(label)
    return found[0]


def _gone(label: str) -> UnknownTable:
    return UnknownTable(
        f"view {label}: its table, or a version of a table that it was computed from, does not exist in the sink",
        "Start the stream, which builds the view again if necessary, and compare again.",
    )


def _compare_once(
    spark: SparkSession,
    layout: Layout,
    contents: Callable[[], Contents],
    application: str,
    label: str,
) -> Sequence[ViewResult | None]:
    """Compare with the moment that the table has; return the result, or nothing if the record has changed meanwhile."""
    recorded = contents()
    versions = [view for view in views_of(recorded) if view.view.label == label]
    targets = targets_of(recorded)
    readable = [view for view in versions if view.view.columns.keys() <= targets.keys()]
    if not readable:
        return [None]
    if not table_exists(lambda: spark, layout, readable[-1].view):
        if any(view.reached for view in readable):
            raise _gone(label)
        return [ViewResult(label)]
    table = TableVersions(spark, layout, readable[-1].view)
    pin = table.current()
    number = table.number(pin, application)
    if [view for view in views_of(contents()) if view.view.label == label] != versions:
        return []
    # A step writes the table before its end is recorded.
    written = [(view, view.next) for view in readable if view.next is not None and view.next.number == number]
    reached = [(view, view.reached) for view in reversed(readable) if view.reached is not None]
    for view, moment in [*written, *reached][:1]:
        return [_result(view, ViewRows(spark, layout, targets, view.view), moment, table.rows(pin))]
    return [ViewResult(label)]


def _result(view: DeltaView, rows: ViewRows, moment: Moment, stored: DataFrame) -> ViewResult:
    outputs = [output.name for output in view.view.outputs]
    columns = [f"o{n}" for n in range(len(outputs))]
    anchor = [columns[outputs.index(each.output)] for each in view.view.anchor]
    wanted = rows.at(moment)
    floats = {f"o{n}" for n, (_, kind) in enumerate(wanted.dtypes) if kind in ("float", "double")} - set(anchor)
    sides = wanted.toDF(*columns), stored.select(*map(quoted, outputs)).toDF(*columns)
    close = view.view.grouped and floats
    apart = _close(*sides, columns, anchor, floats) if close else _apart(*sides, anchor)
    found = apart.persist()
    try:
        count = found.count()
        named = found.orderBy(*anchor).limit(NAMED).collect()
    finally:
        found.unpersist()
    names = [each.output for each in view.view.anchor]
    differences = tuple(
        Difference(
            {
                name: None if (value := row[column]) is None else str(value)
                for name, column in zip(names, anchor, strict=True)
            },
            _kind(row["wanted"], row["stored"]),
        )
        for row in named
    )
    return ViewResult(view.view.label, stored.count(), differences=differences, difference_count=count)


def _kind(wanted: int, stored: int) -> DifferenceKind:
    return "missing" if not stored else "extra" if not wanted else "different"


def _apart(wanted: DataFrame, stored: DataFrame, anchor: Sequence[str]) -> DataFrame:
    """Return the anchors whose bags of rows differ, with the numbers of their rows on both sides."""
    counted = bags(wanted, stored).withColumnsRenamed({"ours": "w", "theirs": "s"})
    return _summed(counted, anchor, f.col("w") != f.col("s"))


def _close(
    wanted: DataFrame, stored: DataFrame, columns: Sequence[str], anchor: Sequence[str], floats: set[str]
) -> DataFrame:
    """Return the anchors whose rows differ by more than a rounding error; more than one row on a side differs, too."""
    match = [f.col(f"a.{name}").eqNullSafe(f.col(f"b.{name}")) for name in anchor]
    both = wanted.withColumn("w", f.lit(1)).alias("a").join(stored.withColumn("s", f.lit(1)).alias("b"), match, "full")
    equal = f.col("w").isNotNull() & f.col("s").isNotNull()
    for name in columns:
        one, other = f.col(f"a.{name}"), f.col(f"b.{name}")
        same = one.eqNullSafe(other)
        if name in floats:
            largest = f.greatest(f.abs(one), f.abs(other))
            near = (f.abs(one - other) <= largest * 1e-9) & (largest < float("inf"))  # nothing is near infinity or NaN
            same = same | f.coalesce(near, f.lit(False))
        equal = equal & same
    sides = both.select(
        *(f.coalesce(f.col(f"a.{name}"), f.col(f"b.{name}")).alias(name) for name in anchor),
        f.coalesce("w", f.lit(0)).alias("w"),
        f.coalesce("s", f.lit(0)).alias("s"),
        (~equal).alias("unequal"),
    )
    return _summed(sides, anchor, f.col("unequal"), "differs OR pairs > 1")


def _summed(sides: DataFrame, anchor: Sequence[str], differs: Column, chosen: str = "differs") -> DataFrame:
    counts = f.sum("w").alias("wanted"), f.sum("s").alias("stored"), f.count("*").alias("pairs")
    found = sides.withColumn("differs", differs).groupBy(*anchor)
    return found.agg(*counts, f.bool_or("differs").alias("differs")).where(chosen)
