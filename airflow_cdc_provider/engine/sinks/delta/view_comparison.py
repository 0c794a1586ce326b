"""Compares the rows of a view in Delta with its SELECT, at the versions of the tables that the view has reached.

The record tells these versions, so the comparison is exact while a stream runs. Rows are compared as bags. Sums of
floating-point numbers depend on the order of the rows, so floating-point columns of a grouped view may differ by a
relative error of 1e-9. After a crash, the table may have reached the next moment without a record of that; then it must
equal the SELECT there.
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
from airflow_cdc_provider.engine.sinks.delta.view_rows import ViewRows
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents, targets_of

_STEP_SECONDS = 10.0
"""Seconds that a step of a running stream is awaited; after that it was interrupted by a crash."""


def compare_view(
    spark: SparkSession, layout: Layout, contents: Callable[[], Contents], label: str
) -> ViewResult | None:
    """Compare a view with its SELECT.

    :param contents: returns the present contents of the log.
    :param label: the view's label.
    :returns: ``None`` if the view is not recorded any more.
    :raises UnknownTable: if its table does not exist, or versions that it was computed from.
    """
    found: list[ViewResult | None] = []

    def compared() -> bool:
        view = _recorded(contents(), label)
        if view is None or view.reached is None:
            found.append(None if view is None else ViewResult(label))
            return True
        if view.next is not None:
            await_condition(lambda: _recorded(contents(), label) != view, _STEP_SECONDS)
            now = _recorded(contents(), label)
            if now != view:
                return False
        try:
            results = _compare(spark, layout, contents, view)
        except SPARK_ERRORS as e:
            raise (_gone(label) if is_gone(e) else examination_failure(e)) from e
        except VersionGone as e:
            raise _gone(label) from e
        if results is not None:
            found.append(results)
        return bool(found)

    if not await_condition(compared, PASS_TIMEOUT):
        raise _gone(label)
    return found[0]


def _gone(label: str) -> UnknownTable:
    return UnknownTable(
        f"view {label}: its table, or a version of a table that it was computed from, does not exist in the sink",
        "Start the stream, which builds the view again if necessary, and compare again.",
    )


def _recorded(contents: Contents, label: str) -> DeltaView | None:
    """Return the version of a view that readers see if it is built, or the newest."""
    versions = [view for view in views_of(contents) if view.view.label == label]
    return next((view for view in reversed(versions) if view.reached is not None), versions[-1] if versions else None)


def _compare(
    spark: SparkSession, layout: Layout, contents: Callable[[], Contents], view: DeltaView
) -> ViewResult | None:
    """Compare with the moment that the view has reached, or has been about to reach.

    :returns: ``None`` if the view has moved on meanwhile.
    """
    if not table_exists(lambda: spark, layout, view.view):
        raise _gone(view.view.label)
    table = TableVersions(spark, layout, view.view)
    pin = table.current()
    if _recorded(contents(), view.view.label) != view:
        return None
    stored = table.rows(pin)
    rows = ViewRows(spark, layout, targets_of(contents()), view.view)
    results = [_result(view, rows, moment, stored) for moment in (view.reached, view.next) if moment is not None]
    return min(results, key=lambda result: result.difference_count)


def _result(view: DeltaView, rows: ViewRows, moment: Moment, stored: DataFrame) -> ViewResult:
    outputs = [output.name for output in view.view.outputs]
    columns = [f"o{n}" for n in range(len(outputs))]
    anchor = [columns[outputs.index(each.output)] for each in view.view.anchor]
    wanted = rows.at(moment)
    floats = {f"o{n}" for n, (_, kind) in enumerate(wanted.dtypes) if kind in ("float", "double")} - set(anchor)
    apart = _apart(wanted.toDF(*columns), stored.select(*map(quoted, outputs)).toDF(*columns), columns, anchor)
    if view.view.grouped and floats:
        apart = _close(
            wanted.toDF(*columns), stored.select(*map(quoted, outputs)).toDF(*columns), columns, anchor, floats
        )
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


def _apart(wanted: DataFrame, stored: DataFrame, columns: Sequence[str], anchor: Sequence[str]) -> DataFrame:
    """Return the anchors whose bags of rows differ, with the numbers of their rows on both sides."""
    sides = wanted.withColumns({"w": f.lit(1), "s": f.lit(0)}).union(stored.withColumns({"w": f.lit(0), "s": f.lit(1)}))
    bags = sides.groupBy(*columns).agg(f.sum("w").alias("w"), f.sum("s").alias("s"))
    return _summed(bags, anchor, f.col("w") != f.col("s"))


def _close(
    wanted: DataFrame, stored: DataFrame, columns: Sequence[str], anchor: Sequence[str], floats: set[str]
) -> DataFrame:
    """Return the anchors whose rows, at most one on each side, differ by more than a rounding error."""
    match = [f.col(f"a.{name}").eqNullSafe(f.col(f"b.{name}")) for name in anchor]
    both = wanted.withColumn("w", f.lit(1)).alias("a").join(stored.withColumn("s", f.lit(1)).alias("b"), match, "full")
    equal = f.lit(True)
    for name in columns:
        one, other = f.col(f"a.{name}"), f.col(f"b.{name}")
        same = one.eqNullSafe(other)
        if name in floats:
            largest = f.greatest(f.abs(one), f.abs(other))
            same = same | f.coalesce(f.abs(one - other) <= largest * 1e-9, f.lit(False))
        equal = equal & same
    sides = both.select(
        *(f.coalesce(f.col(f"a.{name}"), f.col(f"b.{name}")).alias(name) for name in anchor),
        f.coalesce("w", f.lit(0)).alias("w"),
        f.coalesce("s", f.lit(0)).alias("s"),
        (~equal).alias("unequal"),
    )
    return _summed(sides, anchor, f.col("unequal"))


def _summed(sides: DataFrame, anchor: Sequence[str], differs: Column) -> DataFrame:
    found = sides.withColumn("differs", differs).groupBy(*anchor)
    summed = found.agg(f.sum("w").alias("wanted"), f.sum("s").alias("stored"), f.bool_or("differs").alias("differs"))
    return summed.where("differs")
