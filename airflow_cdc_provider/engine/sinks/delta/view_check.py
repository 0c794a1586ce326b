"""Lets Spark analyze the SELECT of a view, which has the last word on types and functions.

It is analyzed over empty relations with the columns that the parser has found, so neither tables nor rows are needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import sqlglot
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from sqlglot import exp

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.delta_table import has_log
from airflow_cdc_provider.engine.sinks.delta.spark_errors import SPARK_ERRORS, examining_tables, first_line
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, Named, is_reserved, quoted, table_columns
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.dialects import CommonSpark
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings

# Aggregates whose result depends on the order of the rows, which Spark does not promise.
_UNORDERED = {"first", "first_value", "last", "last_value", "any_value", "collect_list", "array_unique_agg", "mode"}
# Texts of which Spark computes the moment when it plans the query, as its plan shows them; a column has a number.
_MOMENTS = re.compile(
    r"\b(?:cast|date|timestamp|(?:try_)?to_(?:date|timestamp)\w*)\(\s*(now|today|tomorrow|yesterday)\b(?!#)",
    re.IGNORECASE,
)
_INCOMPARABLE = ("void", "map<", "variant", "interval")


def checked_view(spark: SparkSession, layout: Layout, settings: ViewSettings, targets: Mapping[str, Target]) -> View:
    """Parse a view, and let Spark analyze it.

    :param targets: the targets by label.
    :raises ConfigError: when it cannot be maintained; says what to write instead.
    """
    _check_texts(settings)
    view = parse_view(settings, {label: target.table for label, target in targets.items()}, "spark")
    relations = {label: f"cdc_probe_{n}" for n, label in enumerate(view.columns)}
    for label, columns in view.columns.items():
        empty_relation(spark, targets[label], columns).createOrReplaceTempView(relations[label])
    try:
        found = spark.sql(view.select(relations))
    except SPARK_ERRORS as e:
        raise ConfigError(f"view {view.label}: the sink refuses its SQL: {first_line(e)}", "Correct the SELECT.") from e
    for function in sqlglot.parse_one(settings.sql, read=CommonSpark).find_all(exp.Func):
        name = (function.name if isinstance(function, exp.Anonymous) else function.sql_name()).lower()
        if name in _UNORDERED:
            raise ConfigError(
                f"view {view.label}: the result of {name} depends on the order of the rows",
                "Use min, max, or min_by and max_by with a column that distinguishes the rows.",
            )
    analyzed = found._jdf.queryExecution().analyzed()
    if moment := _MOMENTS.search(analyzed.toString()):
        raise ConfigError(
            f"view {view.label}: {moment[1]!r} is a moment, which the sink would compute only once",
            "Compare with the current time where the view is read.",
        )
    if not analyzed.deterministic():
        raise ConfigError(
            f"view {view.label}: it uses a random value, or another function whose result may change without a change"
            " of a row",
            "Compute it where the view is read.",
        )
    _check_columns(view, layout, found.schema)
    return view


def _check_texts(settings: ViewSettings) -> None:
    """Refuse texts that the parser understands otherwise than Spark, for which two quotes in them are one."""
    for one, other in pairwise(CommonSpark().tokenize(settings.sql)):
        strings = one.token_type.name == other.token_type.name == "STRING"
        if strings and other.start == one.end + 1 and settings.sql[other.start] == '"':
            raise ConfigError(
                f"view {settings.label}: {settings.sql[one.start : other.end + 1]} has two quotes in a text",
                "Write the text in single quotes.",
            )


def _check_columns(view: View, layout: Layout, schema: StructType) -> None:
    seen: set[str] = set()
    for column in schema:
        kind = column.dataType.simpleString()
        if kind.startswith(_INCOMPARABLE) or any(f":{each}" in kind or f"<{each}" in kind for each in _INCOMPARABLE):
            raise ConfigError(
                f"view {view.label}: the column {column.name} has the type {kind}, whose values a Delta table cannot"
                " hold or compare",
                "Cast it, for example to STRING.",
            )
        if is_reserved(layout, column.name) or column.name.lower() in seen:
            raise ConfigError(
                f"view {view.label}: its column {column.name} has a name that is reserved by Delta or Spark, or that"
                " differs from another one in case only",
                "Name it differently with AS.",
            )
        seen.add(column.name.lower())


def empty_relation(spark: SparkSession, target: Target, columns: Sequence[str]) -> DataFrame:
    """Return a relation without rows, with some columns of a mirror table."""
    kinds = table_columns(target, "mirror")
    values = ", ".join(f"CAST(NULL AS {kinds[name]}) AS {quoted(name)}" for name in columns)
    return spark.sql(f"SELECT {values or '1 AS none'} WHERE false")


def table_exists(spark: Callable[[], SparkSession], layout: Layout, table: Named) -> bool:
    """Return whether a table exists; Spark is not needed for a path table."""
    if layout.catalog is None:
        return has_log(layout, table)
    with examining_tables():
        return spark().catalog.tableExists(layout.sql_name(table))
