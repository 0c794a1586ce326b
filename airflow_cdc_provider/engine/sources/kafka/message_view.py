"""Reads topics with Spark, and builds the view that the query is over.

Each message is either decoded, or has a *trouble*: a text that says what is wrong with it. The view contains the
decoded messages, with the columns of the pipeline file and ``_topic``, ``_partition``, ``_offset``, ``_timestamp`` and
``_key``. In Debezium's format it also has ``_op``, a letter as in a changelog (r, i, u or d; d has the deleted row),
and ``_unchanged``, the names of columns whose value is omitted, see :mod:`.unchanged_values`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import Any, cast

from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from airflow_cdc_provider.engine.core.errors import BadRecord, ConfigError
from airflow_cdc_provider.engine.sources.kafka.avro_texts import UNDECODED
from airflow_cdc_provider.engine.sources.kafka.column_lineage import Lineage
from airflow_cdc_provider.engine.sources.kafka.column_values import Values, counts_in
from airflow_cdc_provider.engine.sources.kafka.message_texts import NO_UTF8, ONE, WHOLE, parsed_objects, with_texts
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, only
from airflow_cdc_provider.engine.sources.kafka.unchanged_values import UNCHANGED, Placeholder, completed_row

OP = "_op"
"""The column of the result that contains the operation on a row."""

_ALL = Lineage()

_TROUBLE = "_trouble"
_COMPUTED = "it omits the unchanged value of {}, which source.sql computes with"
_TRUNCATED = "it is a truncate"
_ADDED_UP = "op is t, a truncate, which source.sql cannot remove from its state"
_NO_VALUE = "it has no value"
_NAMES = "array<string>"
_LETTERS = {"r": "r", "c": "i", "u": "u", "d": "d"}
_BAD = re.compile(r"bad record (\S+)\[(\d+)\]@(\d+): (.*?) \(end of trouble\)", re.DOTALL)


class Truncated(BadRecord):
    """A query has reached a truncate, which the unit writer must handle."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        what = f"message {offset} of {topic}[{partition}] is a truncate that has not been applied yet"
        super().__init__(what, "Run `airflow-cdc run` until it has passed this message; then try again.", what)


def columns_of(source: TopicSettings) -> StructType:
    """Return the columns of the pipeline file.

    :raises ConfigError: when Spark rejects them as a schema, or ``source.epochs`` does not match them.
    """
    try:
        found = cast(StructType, StructType.fromDDL(source.columns))
    except Exception as e:  # errors of Spark's parser, in several classes
        raise ConfigError(
            f"source.columns: {source.columns!r} is not a schema: {str(e).strip().splitlines()[0]}",
            "Write columns as in Spark's CREATE TABLE, such as `id BIGINT NOT NULL, at TIMESTAMP`.",
        ) from e
    kinds = {each.name: each.dataType for each in found}
    for name, unit in source.units:
        if name not in kinds or unit not in counts_in(kinds[name]):
            what = kinds[name].simpleString().upper() if name in kinds else "not in source.columns"
            raise ConfigError(
                f"source.epochs: {name} is {what}, which cannot be read from a number of {unit}",
                "Name columns of type TIMESTAMP or TIMESTAMP_NTZ with seconds, milliseconds or microseconds, or"
                " columns of type DATE with days.",
            )
    return found


def raw_stream(spark: SparkSession, source: TopicSettings, starting: Offsets) -> DataFrame:
    """Return the messages of the topics as a stream; those of transactions only after the commit.

    :param starting: the offsets of all partitions to begin at, unless there is a checkpoint.
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


def raw_range(spark: SparkSession, source: TopicSettings, start: Offsets, end: Offsets) -> DataFrame:
    """Return the messages between offsets; if ``start`` lacks a partition, from its first message."""
    return spark.read.format("kafka").options(**_range_options(source, start, end)).load()


def _range_options(source: TopicSettings, start: Offsets, end: Offsets) -> dict[str, str]:
    begin = {t: {p: start.get(t, {}).get(p, -2) for p in partitions} for t, partitions in end.items()}
    return {
        **source.client_options,
        "assign": json.dumps({topic: [int(p) for p in partitions] for topic, partitions in end.items()}),
        "startingOffsets": json.dumps(begin),
        "endingOffsets": json.dumps(end),
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
    }


def raw_stream_of_range(spark: SparkSession, source: TopicSettings, start: Offsets, end: Offsets) -> DataFrame:
    """Return what :func:`raw_range` does, as a stream. Streams have no option for the end, so a filter sets it."""
    options = _range_options(source, start, end)
    del options["endingOffsets"]
    inside = [
        (f.col("topic") == topic) & (f.col("partition") == int(p)) & (f.col("offset") < offset)
        for topic, partitions in end.items()
        for p, offset in partitions.items()
    ]
    return spark.readStream.format("kafka").options(**options).load().filter(reduce(or_, inside))


def raw_nothing(spark: SparkSession) -> DataFrame:
    """Return an empty stream with the columns of messages, without a cluster."""
    kinds = {"key": "binary", "value": "binary", "topic": "string", "partition": "int", "offset": "bigint"}
    columns = [f.lit(None).cast(kind).alias(name) for name, kind in kinds.items()]
    return spark.readStream.format("rate").load().select(*columns, "timestamp")


def readable(
    raw: DataFrame,
    source: TopicSettings,
    lineage: Lineage = _ALL,
    missed: Accumulator[frozenset[int]] | None = None,
) -> DataFrame:
    """Return the view's rows, without messages that have a trouble.

    :param lineage: the lineage of the query; messages must contain the columns that it computes with.
    :param missed: see :class:`.AvroTexts`.
    """
    values = _values(source)
    decoded = _decoded(raw, source, values, lineage, missed)
    if source.format == "debezium":
        decoded = _ended(decoded, f.col(_TROUBLE) == _TRUNCATED)
    return _shown(decoded, source, values).filter(f.col(_TROUBLE).isNull()).drop(_TROUBLE)


def required(raw: DataFrame, source: TopicSettings, lineage: Lineage = _ALL) -> DataFrame:
    """Return the view's rows; the first message with a trouble ends the query, see :func:`bad_record`."""
    values = _values(source)
    decoded = _ended(_decoded(raw, source, values, lineage), f.col(_TROUBLE).isNotNull())
    return _shown(decoded, source, values).drop(_TROUBLE)


def _ended(decoded: DataFrame, bad: Column) -> DataFrame:
    """Let the first bad message end the query, see :func:`bad_record`."""
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
    # Spark does not combine a nondeterministic condition with others. Otherwise Spark could evaluate a condition of the
    # query first, and the message would go unnoticed.
    ends = f.when(bad & (f.spark_partition_id() >= 0), f.raise_error(said).cast("boolean")).otherwise(f.lit(True))
    return decoded.filter(ends)


def dead_letter_rows(raw: DataFrame, source: TopicSettings, lineage: Lineage, missing: frozenset[int]) -> DataFrame:
    """Return messages that have a trouble, as rows for another topic, with headers that contain their origin.

    :param lineage: see :func:`readable`.
    :param missing: see :class:`.AvroTexts`.
    """
    bad = _decoded(raw, source, _values(source), lineage, missing=missing).filter(f.col(_TROUBLE) != _TRUNCATED)
    return _as_dead_letters(bad, f.col(_TROUBLE))


def truncates(raw: DataFrame, source: TopicSettings) -> DataFrame:
    """Return the truncates in topics in Debezium's format: partition, offset, and an identifying text."""
    values = _values(source)
    told_by = StructType([StructField(name, StringType()) for name in ("sequence", "lsn", "ts_us", "ts_ms")])
    envelope = StructType([StructField(OP[1:], StringType()), StructField("source", told_by)])
    texts = with_texts(raw.filter(f.col("value").isNotNull()), source, values)
    parsed = parsed_objects(texts, StructType([*envelope, StructField("payload", envelope)]), values)
    e = f.col(WHOLE)
    parsed = parsed.withColumn("p", f.coalesce(e["payload"], f.struct(e["op"], e["source"])))
    identity = f.concat_ws(" ", *(f.col("p.source")[name] for name in told_by.names))
    return parsed.filter(f.col("p.op") == "t").select("partition", "offset", identity.alias("identity"))


def set_aside(raw: DataFrame, skips: Collection[Skip]) -> DataFrame:
    """Return skipped messages in the format of :func:`dead_letter_rows`."""
    return _as_dead_letters(only(raw, skips), f.col("cause"))


def _as_dead_letters(bad: DataFrame, error: Column) -> DataFrame:
    place = {name: f.col(name) for name in ("topic", "partition", "offset")} | {"error": error}
    headers = f.array(
        *(
            f.struct(f.lit(f"airflow_cdc.{name}").alias("key"), value.cast("string").cast("binary").alias("value"))
            for name, value in place.items()
        )
    )
    return bad.select("key", "value", headers.alias("headers"))


def bad_record(text: str) -> BadRecord | None:
    """Return the error for a message with which :func:`required` ended a query; ``None`` for any other end.

    :param text: the text of Spark's error.
    """
    found = _BAD.search(text)
    if found is None:
        return None
    topic, partition, offset, trouble = found.groups()
    if trouble == _TRUNCATED:
        return Truncated(topic, int(partition), int(offset))
    return BadRecord(
        f"message {offset} of {topic}[{partition}] cannot be read: {trouble}",
        "Nothing of its batch was applied. If source.columns or source.format is wrong, correct it. Otherwise have such"
        " messages written to another topic with source.bad_records: {dead_letter: …}, or skip this message with"
        f" `airflow-cdc skip --topic {topic} --partition {partition} --offset {offset}`; then start again.",
        f"message {offset} of {topic}[{partition}] cannot be read",
    )


def _decoded(
    raw: DataFrame,
    source: TopicSettings,
    values: Values,
    lineage: Lineage,
    missed: Accumulator[frozenset[int]] | None = None,
    missing: frozenset[int] = frozenset(),
) -> DataFrame:
    """Return messages with their row in ``m``, their trouble, and in Debezium's format the operation."""
    if source.format in ("text", "bytes"):
        return _as_whole(raw, source)
    columns, texts = columns_of(source), with_texts(raw, source, values, missed, missing)
    if source.format != "debezium":
        return _plain(texts, columns, values)
    return _debezium(texts, columns, values, Placeholder(source.unavailable), lineage)


def _as_whole(raw: DataFrame, source: TopicSettings) -> DataFrame:
    """Return messages whose whole value is the row."""
    text = f.col("value").cast("string")
    bad = f.lit(None).cast("string")
    if source.format == "text" and "encoding" not in source.lenient:
        bad = f.when(~f.is_valid_utf8(text), f.lit(NO_UTF8))
    value = f.make_valid_utf8(text) if source.format == "text" else f.col("value")
    trouble = f.when(f.col("value").isNull(), f.lit(_NO_VALUE)).otherwise(bad)
    return raw.withColumn("m", f.struct(value.alias("value"))).withColumn(_TROUBLE, trouble)


def _plain(raw: DataFrame, columns: StructType, values: Values) -> DataFrame:
    parsed = parsed_objects(raw, values.schema(columns), values)
    return parsed.withColumn("m", f.col(WHOLE)).withColumn(
        _TROUBLE, f.coalesce(_unreadable(), _wrong(columns, f.col(WHOLE), values, f.lit(None).cast(_NAMES)))
    )


def _debezium(
    raw: DataFrame, columns: StructType, values: Values, placeholder: Placeholder, lineage: Lineage
) -> DataFrame:
    """Return decoded Debezium messages, without tombstones, which only follow the delete of their key."""
    row = values.schema(columns)
    unchanged = StructType([StructField("unchanged", ArrayType(StringType()))])
    envelope = StructType(
        [
            StructField("before", row),
            StructField("after", row),
            StructField(OP[1:], StringType()),
            StructField("source", unchanged),
        ]
    )
    whole = StructType([*envelope, StructField("payload", envelope)])
    parsed = parsed_objects(raw.filter(f.col("value").isNotNull()), whole, values)
    e = f.col(WHOLE)
    parsed = parsed.withColumn("p", f.coalesce(e["payload"], f.struct(*(e[each.name] for each in envelope))))
    # Rows that were read or deleted are complete in the message.
    update = completed_row(row, placeholder, f.col("p.after"), f.col("p.before"), f.col("p.source.unchanged"))
    parsed = parsed.withColumn("update", f.when(f.col("p.op").isin("u", "c"), update))
    letter = f.create_map(*(f.lit(each) for pair in _LETTERS.items() for each in pair))
    gone = f.col("p.op") == "d"
    now = f.coalesce(f.col("update.row"), f.col("p.after"))
    parsed = parsed.withColumn("m", f.when(gone, f.col("p.before")).otherwise(now))
    away = f.col("update.away")
    parsed = parsed.withColumn(UNCHANGED, away)
    parsed = parsed.withColumn(OP, f.element_at(letter, f.col("p.op")))
    emptied = _ADDED_UP if lineage.stateful else _TRUNCATED
    trouble = f.coalesce(
        _unreadable(),
        f.when(f.col("p.op") == "t", f.lit(emptied)),
        f.when(f.col(OP).isNull(), f.concat(f.lit("op is "), f.coalesce(f.col("p.op"), f.lit("missing")))),
        f.when(f.col("m").isNull(), f.when(gone, f.lit("before is missing")).otherwise(f.lit("after is missing"))),
        f.when(~gone, _wrong(columns, f.col("m"), values, away)),
        *(f.when(f.array_contains(away, name), f.lit(_COMPUTED.format(name))) for name in sorted(lineage.computed)),
    )
    return parsed.withColumn(_TROUBLE, trouble)


def _unreadable() -> Column:
    return (
        f.when(f.col("value").isNull(), f.lit(_NO_VALUE))
        .when(f.col(UNDECODED).isNotNull(), f.col(UNDECODED))
        .when(~f.coalesce(f.col(ONE), f.lit(False)), f.lit("it is not a single JSON object with these columns"))
        .otherwise(f.lit(None).cast("string"))
    )


def _wrong(columns: StructType, row: Column, values: Values, away: Column) -> Column:
    """Return which column has an unsuitable value, or lacks a required one.

    :param away: names of columns whose unchanged value is omitted.
    """
    found = [_lacking(columns, row, away)]
    for each in columns:
        bad = values.bad(row[each.name], each)
        if bad is not None:
            said = f"the value of {each.name} does not fit {each.dataType.simpleString().upper()} without a change"
            found.append(f.when(bad, f.lit(said)))
    return f.coalesce(*found)


def _lacking(columns: StructType, row: Column, away: Column) -> Column:
    """Return which required column is missing."""
    needed = [each.name for each in columns if not each.nullable]
    stays = {name: f.coalesce(f.array_contains(away, name), f.lit(False)) for name in needed}
    missing = [f.when(row[name].isNull() & ~stays[name], f.lit(f"{name} is missing")) for name in needed]
    return f.coalesce(*missing, f.lit(None).cast("string"))


def _values(source: TopicSettings) -> Values:
    return Values(source.lenient, dict(source.units))


def _shown(decoded: DataFrame, source: TopicSettings, values: Values) -> DataFrame:
    """Return the columns of the view, and the trouble."""
    place: dict[str, Any] = {
        "_topic": f.col("topic"),
        "_partition": f.col("partition"),
        "_offset": f.col("offset"),
        "_timestamp": f.col("timestamp"),
        "_key": f.col("key").cast("string"),
    }
    operation = [OP, UNCHANGED] if source.format == "debezium" else []
    own = [values.value(f.col("m")[each.name], each).alias(each.name) for each in columns_of(source)]
    return decoded.select(*own, *operation, *(column.alias(name) for name, column in place.items()), _TROUBLE)
