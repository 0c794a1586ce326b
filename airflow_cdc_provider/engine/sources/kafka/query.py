"""Analyzes the query of a pipeline file: its result, whether it keeps state, and the table that it corresponds to."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import Accumulator
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_cdc_provider.engine.core.errors import ConfigError, SparkUnusable
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.column_lineage import Lineage, lineage_of
from airflow_cdc_provider.engine.sources.kafka.message_order import nodes_of, require_order
from airflow_cdc_provider.engine.sources.kafka.message_view import OP
from airflow_cdc_provider.engine.sources.kafka.settings import VIEW, OutputMode, TopicSettings, topic_settings
from airflow_cdc_provider.engine.sources.kafka.unchanged_values import UNCHANGED

# Plan nodes that process each row separately. All others may keep state of earlier rows.
_STATELESS = frozenset(
    {"Project", "Filter", "SubqueryAlias", "View", "EventTimeWatermark", "MapInArrow", "Generate", "Union", "Sort"}
    | {
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
        "CTERelationRef",
        "WithCTE",
        "CTERelationDef",
        "ResolvedHint",
    }
)
_TYPES: dict[type[t.DataType], tuple[str, int]] = {
    t.BooleanType: ("boolean", 16),
    t.ByteType: ("smallint", 21),
    t.ShortType: ("smallint", 21),
    t.IntegerType: ("integer", 23),
    t.LongType: ("bigint", 20),
    t.FloatType: ("real", 700),
    t.DoubleType: ("double precision", 701),
    t.StringType: ("text", 25),
    t.BinaryType: ("bytea", 17),
    t.DateType: ("date", 1082),
    t.TimestampType: ("timestamp with time zone", 1184),
    t.TimestampNTZType: ("timestamp without time zone", 1114),
}
"""Types of Postgres, which sinks use for columns, with their oids."""
_NUMERIC = 1700


@dataclass(frozen=True)
class QueryResult:
    """The result of a query.

    :param table: its columns and key.
    :param stateful: it keeps state from one batch to the next.
    :param has_ops: the column :data:`.message_view.OP` of the result contains the operation on a row.
    :param partial: the column :data:`.unchanged_values.UNCHANGED` of the result names omitted values of a row.
    """

    table: Table
    stateful: bool
    has_ops: bool
    partial: bool = False


def query_result(spark: SparkSession, pipeline: Pipeline) -> QueryResult:
    """Return the result of a pipeline's query, without asking the cluster.

    :raises ConfigError: when Spark rejects the query, or its result cannot be a table.
    :raises SparkUnusable: when Spark cannot plan any query.
    """
    source = _source(pipeline)
    try:
        rows = result(spark, source, message_view.raw_nothing(spark))
        _check_output(spark, rows, output_of(pipeline))
    except PySparkException as e:
        raise _refused(e) from e
    except Py4JJavaError as e:
        raise SparkUnusable(
            f"Spark cannot plan source.sql: {str(e.java_exception).splitlines()[0]}",
            "Make the jars of Spark's Kafka source, and of Delta for such a sink, available on Spark's class path; an"
            " empty `spark.jars.packages` does not download them.",
        ) from e
    plan = rows._jdf.queryExecution().analyzed()
    if _reads(plan) > 1:
        raise ConfigError(
            f"source.sql reads {VIEW} more than once",
            "Name it once, because Spark would read the topics separately for each use, at different offsets. Instead"
            " of a union, use explode() of an array of structs.",
        )
    stateful = any(_keeps_state(node) for node in nodes_of(plan))
    names = [field.name for field in rows.schema]
    _check_names(pipeline, names, stateful)
    if keeps_last(pipeline, OP in names):
        require_order(rows, source.key, stateful)
    return QueryResult(_table(source, rows.schema), stateful, OP in names, UNCHANGED in names)


def result(
    spark: SparkSession, source: TopicSettings, raw: DataFrame, missed: Accumulator[frozenset[int]] | None = None
) -> DataFrame:
    """Return the result of the query over messages.

    :param missed: see :class:`.AvroTexts`.
    """
    lineage = lineage_in(spark, source)
    rows = _queried(spark, source, raw, lineage, missed)
    if UNCHANGED not in rows.columns or not lineage.passed:
        return rows
    names = [f.when(f.array_contains(UNCHANGED, theirs), f.lit(ours)) for ours, theirs in lineage.passed.items()]
    return rows.withColumn(UNCHANGED, f.when(f.col(UNCHANGED).isNotNull(), f.array_compact(f.array(*names))))


@lru_cache(maxsize=4)
def lineage_in(spark: SparkSession, source: TopicSettings) -> Lineage:
    """Return which columns of the messages the query passes on, and which columns it computes with.

    If the result lacks the names of omitted values, nothing counts as passed on.
    """
    names = frozenset(message_view.columns_of(source).names)
    if source.format != "debezium" and UNCHANGED not in names:
        return Lineage()
    rows = _queried(spark, source, message_view.raw_nothing(spark))
    stateful = any(_keeps_state(node) for node in nodes_of(rows._jdf.queryExecution().analyzed()))
    found = lineage_of(rows, names)
    if UNCHANGED in rows.columns:
        return replace(found, stateful=stateful)
    return Lineage({}, found.computed | frozenset(found.passed.values()), stateful)


def _queried(
    spark: SparkSession,
    source: TopicSettings,
    raw: DataFrame,
    lineage: Lineage = Lineage(),  # noqa: B008 - it is immutable
    missed: Accumulator[frozenset[int]] | None = None,
) -> DataFrame:
    if source.dead_letters:
        rows = message_view.readable(raw, source, lineage, missed)
    else:
        rows = message_view.required(raw, source, lineage)
    column, delay = source.watermark
    if column:
        rows = rows.withWatermark(_quoted(column), f"{round(delay * 1000)} milliseconds")
    rows.createOrReplaceTempView(VIEW)
    return spark.sql(source.sql or f"SELECT {_all_columns(source)} FROM {VIEW}")


def output_of(pipeline: Pipeline) -> OutputMode:
    """Return whether results are written at every change, or once they are final.

    A mirror replaces a changed window; a changelog would contain it several times.
    """
    only_logs = all(sink.mode == "changelog" for sink in pipeline.sinks)
    return _source(pipeline).output or ("append" if only_logs else "update")


def keeps_last(pipeline: Pipeline, has_ops: bool) -> bool:
    """Return whether the last row of a key counts: in a mirror, and in a changelog whose events follow one another.

    :param has_ops: see :class:`QueryResult`.
    """
    return has_ops or bool(_source(pipeline).key)


def _source(pipeline: Pipeline) -> TopicSettings:
    return topic_settings(pipeline)


def _all_columns(source: TopicSettings) -> str:
    names = message_view.columns_of(source).names + ([OP, UNCHANGED] if source.format == "debezium" else [])
    return ", ".join(map(_quoted, names))


def _quoted(name: str) -> str:
    """Quote a column's name; Spark would read an unquoted dot as access to a field."""
    return "`" + name.replace("`", "``") + "`"


def _check_output(spark: SparkSession, rows: DataFrame, output: OutputMode) -> None:
    """Let Spark raise its errors of the first batch now."""
    jvm: Any = spark._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Update() if output == "update" else modes.Append()
    plan = rows._jdf.queryExecution().analyzed()
    jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(plan, mode)


def _refused(error: PySparkException) -> ConfigError:
    said = re.sub(r";.*", "", str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
    what = "is not a valid streaming query" if isinstance(error, AnalysisException) else "cannot be used"
    return ConfigError(
        f"source.sql {what}: {said}",
        f"Correct it: it must be a query over {VIEW}, with the columns of source.columns and _topic, _partition,"
        " _offset, _timestamp and _key. Windows are closed only with a watermark (source.watermark).",
    )


def _reads(plan: Any) -> int:
    """Return how often messages are read: a WITH appears in the plan once, and once more for each reference."""
    subqueries = plan.subqueriesAll()
    plans = [plan, *(subqueries.apply(place) for place in range(subqueries.size()))]
    streaming = [node for each in plans for node in nodes_of(each) if node.isStreaming()]
    named = Counter(str(node.nodeName()) for node in streaming)
    leaves = sum(bool(node.children().isEmpty()) for node in streaming) - named["CTERelationRef"]
    return leaves + max(0, named["CTERelationRef"] - named["CTERelationDef"])


def _keeps_state(node: Any) -> bool:
    if not node.isStreaming() or node.nodeName() in _STATELESS:
        return False
    children = node.children()
    streaming = sum(bool(children.apply(place).isStreaming()) for place in range(children.size()))
    if node.nodeName() == "Join":
        return streaming > 1
    return streaming > 0


def _check_names(pipeline: Pipeline, names: list[str], stateful: bool) -> None:
    source = _source(pipeline)
    taken = [name for name in set(names) if names.count(name) > 1]
    if taken:
        raise ConfigError(f"source.sql returns several columns named {taken[0]}", "Give them other names with AS.")
    mirrors = [sink for sink in pipeline.sinks if sink.mode == "mirror"]
    if mirrors and not source.key:
        raise ConfigError(
            "source.key is missing, but a mirror needs a key",
            "Name the columns of the result that identify its rows, or use sink.mode: changelog.",
        )
    unknown = [name for name in source.key if name not in names]
    if unknown:
        raise ConfigError(
            f"source.key: the query returns no column {unknown[0]}",
            f"Choose from its columns: {', '.join(name for name in names if name not in (OP, UNCHANGED))}.",
        )
    if mirrors and source.format == "debezium" and not stateful and OP not in names:
        raise ConfigError(
            f"source.sql does not select {OP}, which tells a mirror which rows were deleted",
            f"Select {OP} as well; it does not become a column of the target.",
        )


def _table(source: TopicSettings, schema: t.StructType) -> Table:
    columns = tuple(
        _column(field, number, source.key)
        for number, field in enumerate((field for field in schema if field.name not in (OP, UNCHANGED)), 1)
    )
    schema_name, name = source.schema_and_name
    oid = zlib.crc32(source.table.encode())
    return Table(
        oid=oid,
        schema=schema_name,
        name=name,
        columns=columns,
        key=source.key,
        replica_identity="d" if source.key else "f",
        where=None,
        leaves=(Leaf(oid, schema_name, name),),
        kind="r",
        attnums=len(columns),
    )


def _column(field: t.StructField, number: int, key: tuple[str, ...]) -> Column:
    kind = field.dataType
    if isinstance(kind, t.DecimalType):
        name, oid = f"numeric({kind.precision},{kind.scale})", _NUMERIC
    elif type(kind) in _TYPES:
        name, oid = _TYPES[type(kind)]
    else:
        raise ConfigError(
            f"source.sql: {field.name} has the type {kind.simpleString()}, which targets cannot store",
            "Select its fields one by one, such as `window.start AS start`, or convert it to text with to_json().",
        )
    return Column(
        name=field.name,
        type=name,
        type_oid=oid,
        collation=None,
        not_null=field.name in key,
        builtin=True,
        attnum=number,
    )
