"""Turns values of messages into texts, and into the single JSON object in each, independent of their columns."""

from __future__ import annotations

from pyspark import Accumulator
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, BooleanType, StringType, StructField, StructType

from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.sources.kafka.avro_texts import TEXT, UNDECODED, AvroTexts
from airflow_cdc_provider.engine.sources.kafka.column_values import Values, marked, paired
from airflow_cdc_provider.engine.sources.kafka.settings import TopicSettings

WHOLE, ONE = "_whole", "_one"
"""Columns: the object of a message, and whether the value contains nothing else."""

NO_UTF8 = "it is not in UTF-8"

_UNREADABLE = "_unreadable"


def with_texts(
    raw: DataFrame,
    source: TopicSettings,
    values: Values,
    missed: Accumulator[frozenset[int]] | None = None,
    missing: frozenset[int] = frozenset(),
) -> DataFrame:
    """Return messages with their values as JSON, or with the reason why there is none."""
    if source.registry:
        schema = StructType([*raw.schema, *(StructField(name, StringType()) for name in (TEXT, UNDECODED))])
        registry = Registry(source.registry, source.registry_properties)
        return raw.mapInArrow(AvroTexts(registry, missed, missing), schema)
    text = f.col("value").cast("string")
    wrong = f.lit(None).cast("string")
    if "encoding" not in source.lenient:
        wrong = f.when(~f.is_valid_utf8(text), f.lit(NO_UTF8)).when(
            ~paired(text), f.lit("it contains an unpaired surrogate")
        )
    return raw.withColumn(UNDECODED, wrong).withColumn(TEXT, marked(text, values))


def parsed_objects(raw: DataFrame, columns: StructType, values: Values) -> DataFrame:
    """Return messages with the single object in their :data:`.TEXT`.

    ``from_json`` ignores text after an object. So the object is wrapped as the first of two items of a list. No message
    can know the list's name or its second item, so text after the object cannot go unnoticed.
    """
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREADABLE, "allowSingleQuotes": "false"}
    unreadable = StructField(_UNREADABLE, StringType())
    if "trailing" in values.lenient:
        parsed = f.from_json(f.col(TEXT), StructType([*columns, unreadable]), options)
        found = raw.withColumn("_read", parsed).withColumn(WHOLE, f.col("_read"))
        return found.withColumn(ONE, f.col("_read").isNotNull() & f.col("_read")[_UNREADABLE].isNull())
    mark = values.mark
    item = StructType([*columns, StructField(mark, BooleanType())])
    schema = StructType([StructField(mark, ArrayType(item)), unreadable])
    text = f.concat(f.lit(f'{{"{mark}":['), f.col(TEXT), f.lit(f',{{"{mark}":true}}]}}'))
    found = raw.withColumn("_read", f.from_json(text, schema, options))
    items = f.col("_read").getField(mark)
    one = f.col("_read")[_UNREADABLE].isNull() & (f.size(items) == 2) & f.get(items, f.lit(1)).getField(mark)
    return found.withColumn(WHOLE, f.get(items, f.lit(0))).withColumn(ONE, one & f.col(WHOLE).isNotNull())
