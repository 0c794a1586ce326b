"""What Spark reads of topics, and how it becomes the view that the query is over.

Each message is either decoded or has a *trouble*, a text that says what is wrong with it. The decoded ones are the
view, with the columns of the pipeline file, and ``_topic``, ``_partition``, ``_offset``, ``_timestamp`` and ``_key``;
in Debezium's format also ``_op``, a letter as in a changelog: r, i, u or d, of which d has the row that is gone.
"""

from __future__ import annotations

import json
import re
from functools import reduce
from operator import or_
from typing import Any, cast

from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from airflow_cdc_provider.engine.errors import BadRecord, ConfigError
from airflow_cdc_provider.engine.sinks.kafka.avro import Registry
from airflow_cdc_provider.engine.topics.avro import TEXT, UNDECODED, AvroTexts
from airflow_cdc_provider.engine.topics.settings import Offsets, TopicSource

OP = "_op"
"""The column of the result that says what has been done to a row."""

_TROUBLE = "_trouble"
_UNREADABLE = "_unreadable"
_LETTERS = {"r": "r", "c": "i", "u": "u", "d": "d"}
_BAD = re.compile(r"bad record (\S+)\[(\d+)\]@(\d+): (.*?) \(end of trouble\)", re.DOTALL)


def columns_of(source: TopicSource) -> StructType:
    """The columns of the file.

    :raises ConfigError: when Spark does not take them for a schema.
    """
    try:
        return cast(StructType, StructType.fromDDL(source.columns))
    except Exception as e:  # of Spark's parser, in several classes
        raise ConfigError(
            f"source.columns: {source.columns!r} is not a schema: {str(e).strip().splitlines()[0]}",
            "Give columns as Spark's CREATE TABLE has them, such as `id BIGINT NOT NULL, at TIMESTAMP`.",
        ) from e


def raw_stream(spark: SparkSession, source: TopicSource, starting: Offsets) -> DataFrame:
    """The messages of the topics, as they come, of transactions only once they are committed.

    :param starting: where to begin, for all partitions, unless there is a checkpoint.
    """
    options = {
        **source.client_options,
        **source.topic_options,
        "startingOffsets": json.dumps(starting),
        "maxOffsetsPerTrigger": str(source.max_batch_messages),
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
    }
    return spark.readStream.format("kafka").options(**options).load()


def raw_range(spark: SparkSession, source: TopicSource, start: Offsets, end: Offsets) -> DataFrame:
    """The messages between some offsets; of partitions that ``start`` does not have, from their first one on."""
    return spark.read.format("kafka").options(**_range_options(source, start, end)).load()


def _range_options(source: TopicSource, start: Offsets, end: Offsets) -> dict[str, str]:
    begin = {t: {p: start.get(t, {}).get(p, -2) for p in partitions} for t, partitions in end.items()}
    return {
        **source.client_options,
        "assign": json.dumps({topic: [int(p) for p in partitions] for topic, partitions in end.items()}),
        "startingOffsets": json.dumps(begin),
        "endingOffsets": json.dumps(end),
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
    }


def raw_stream_of_range(spark: SparkSession, source: TopicSource, start: Offsets, end: Offsets) -> DataFrame:
    """As :func:`raw_range`, for a stream, which by itself has no end to be named."""
    options = _range_options(source, start, end)
    del options["endingOffsets"]
    inside = [
        (f.col("topic") == topic) & (f.col("partition") == int(p)) & (f.col("offset") < offset)
        for topic, partitions in end.items()
        for p, offset in partitions.items()
    ]
    return spark.readStream.format("kafka").options(**options).load().filter(reduce(or_, inside))


def raw_nothing(spark: SparkSession) -> DataFrame:
    """What has the columns of messages, without a cluster."""
    kinds = {"key": "binary", "value": "binary", "topic": "string", "partition": "int", "offset": "bigint"}
    columns = [f.lit(None).cast(kind).alias(name) for name, kind in kinds.items()]
    return spark.readStream.format("rate").load().select(*columns, "timestamp")


def readable(raw: DataFrame, source: TopicSource, missed: Accumulator[frozenset[int]] | None = None) -> DataFrame:
    """The view's rows, without messages that have a trouble.

    :param missed: see :class:`.AvroTexts`, as for all functions here.
    """
    return _shown(_decoded(raw, source, missed), source).filter(f.col(_TROUBLE).isNull()).drop(_TROUBLE)


def required(raw: DataFrame, source: TopicSource) -> DataFrame:
    """The view's rows; the first message that has a trouble ends the query, see :func:`bad_record`."""
    decoded = _decoded(raw, source)
    said = f.concat(
        f.lit("bad record "),
        f.col("topic"),
        f.lit("["),
        f.col("partition").cast("string"),
        f.lit("]@"),
        f.col("offset").cast("string"),
        f.lit(": "),
        f.col(_TROUBLE),
        f.lit(" (end of trouble)"),
    )
    # What Spark cannot know before it puts together with no other condition: one of the query's, asked first, would let
    # the message go unseen.
    bad = f.col(_TROUBLE).isNotNull() & (f.spark_partition_id() >= 0)
    ends = f.when(bad, f.raise_error(said).cast("boolean")).otherwise(f.lit(True))
    return _shown(decoded.filter(ends), source).drop(_TROUBLE)


def troubled(raw: DataFrame, source: TopicSource, missing: frozenset[int]) -> DataFrame:
    """Messages that have a trouble, as they are to be written to another topic, with headers that say where from.

    :param missing: see :class:`.AvroTexts`.
    """
    told = {name: f.col(name) for name in ("topic", "partition", "offset")} | {"error": f.col(_TROUBLE)}
    headers = f.array(
        *(
            f.struct(f.lit(f"airflow_cdc.{name}").alias("key"), value.cast("string").cast("binary").alias("value"))
            for name, value in told.items()
        )
    )
    bad = _decoded(raw, source, missing=missing).filter(f.col(_TROUBLE).isNotNull())
    return bad.select("key", "value", headers.alias("headers"))


def bad_record(text: str) -> BadRecord | None:
    """The error for what :func:`required` has ended a query with; ``None`` for any other end.

    :param text: of Spark's error.
    """
    found = _BAD.search(text)
    if found is None:
        return None
    topic, partition, offset, trouble = found.groups()
    return BadRecord(
        f"message {offset} of {topic}[{partition}] cannot be read: {trouble}",
        "Nothing of its batch was applied. Correct source.columns or source.format if they are wrong; otherwise have"
        " such messages written to another topic by source.bad_records: {dead_letter: …}, and start again.",
    )


def _decoded(
    raw: DataFrame,
    source: TopicSource,
    missed: Accumulator[frozenset[int]] | None = None,
    missing: frozenset[int] = frozenset(),
) -> DataFrame:
    """Messages with their row in ``m``, what is wrong with it, and in Debezium's format the operation."""
    columns = columns_of(source)
    if source.registry:
        schema = StructType([*raw.schema, *(StructField(name, StringType()) for name in (TEXT, UNDECODED))])
        registry = Registry(source.registry, source.registry_properties)
        texts = raw.mapInArrow(AvroTexts(registry, missed, missing), schema)
    else:
        nothing = f.lit(None).cast("string")
        texts = raw.withColumn(TEXT, f.col("value").cast("string")).withColumn(UNDECODED, nothing)
    return _debezium(texts, columns) if source.format == "debezium" else _plain(texts, columns)


def _plain(raw: DataFrame, columns: StructType) -> DataFrame:
    parsed = raw.withColumn("m", _parsed(columns))
    trouble = f.coalesce(_unreadable(f.col("m")), _lacking(columns, f.col("m")))
    return parsed.withColumn(_TROUBLE, trouble)


def _debezium(raw: DataFrame, columns: StructType) -> DataFrame:
    """A tombstone follows the delete of its key, and says nothing more."""
    row = StructType([StructField(each.name, each.dataType) for each in columns])
    envelope = StructType(
        [StructField("before", row), StructField("after", row), StructField(OP[1:], StringType())],
    )
    whole = StructType([*envelope, StructField("payload", envelope)])
    parsed = raw.filter(f.col("value").isNotNull()).withColumn("e", _parsed(whole))
    told = f.coalesce(f.col("e.payload"), f.struct("e.before", "e.after", "e.op"))
    parsed = parsed.withColumn("p", told)
    letter = f.create_map(*(f.lit(each) for pair in _LETTERS.items() for each in pair))
    gone = f.col("p.op") == "d"
    parsed = parsed.withColumn("m", f.when(gone, f.col("p.before")).otherwise(f.col("p.after")))
    parsed = parsed.withColumn(OP, f.element_at(letter, f.col("p.op")))
    trouble = f.coalesce(
        _unreadable(f.col("e")),
        f.when(f.col(OP).isNull(), f.concat(f.lit("op is "), f.coalesce(f.col("p.op"), f.lit("missing")))),
        f.when(f.col("m").isNull(), f.when(gone, f.lit("before is missing")).otherwise(f.lit("after is missing"))),
        f.when(~gone, _lacking(columns, f.col("m"))),
    )
    return parsed.withColumn(_TROUBLE, trouble)


def _parsed(columns: StructType) -> Column:
    fields = [StructField(each.name, each.dataType) for each in columns]
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREADABLE}
    schema = StructType([*fields, StructField(_UNREADABLE, StringType())])
    return f.from_json(f.col(TEXT), schema, options)


def _unreadable(parsed: Column) -> Column:
    return (
        f.when(f.col("value").isNull(), f.lit("it has no value"))
        .when(f.col(UNDECODED).isNotNull(), f.col(UNDECODED))
        .when(parsed.isNull() | parsed[_UNREADABLE].isNotNull(), f.lit("its values are not of these columns"))
        .otherwise(f.lit(None).cast("string"))
    )


def _lacking(columns: StructType, row: Column) -> Column:
    """Which of the columns that have to be there is not."""
    needed = [each.name for each in columns if not each.nullable]
    missing = [f.when(row[name].isNull(), f.lit(f"{name} is missing")) for name in needed]
    return f.coalesce(*missing, f.lit(None).cast("string"))


def _shown(decoded: DataFrame, source: TopicSource) -> DataFrame:
    """The columns of the view, and the trouble."""
    place: dict[str, Any] = {
        "_topic": f.col("topic"),
        "_partition": f.col("partition"),
        "_offset": f.col("offset"),
        "_timestamp": f.col("timestamp"),
        "_key": f.col("key").cast("string"),
    }
    operation = [OP] if source.format == "debezium" else []
    own = [f.col("m")[each.name].alias(each.name) for each in columns_of(source)]
    return decoded.select(*own, *operation, *(column.alias(name) for name, column in place.items()), _TROUBLE)
