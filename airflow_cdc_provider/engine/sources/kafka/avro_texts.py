"""Decodes Avro in Confluent's wire format (a zero byte, the schema id, the value) into JSON.

All formats share the later steps, so that a value means the same in each. Values with a logical type become texts of
what they represent. Bytes become Base64 texts, as Spark reads them.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import re
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import fastavro
import pyarrow as pa
from confluent_kafka.schema_registry.error import SchemaRegistryError
from pyspark import Accumulator
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core import errors
from airflow_cdc_provider.engine.core.errors import CdcError, ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.kafka.schema_registry import Registry

TEXT, UNDECODED = "text", "undecoded"
"""Columns added to messages: the value as JSON, or the reason why there is none."""

READ_SCHEMAS = "Set a user that may read schemas in `source.registry_properties`."

_CARRIED = re.compile(r"error of the engine (\S+) \(end of error\)")
_HEADER = struct.Struct(">bI")
_UNKNOWN = 404


def carried(error: CdcError) -> str:
    """Return an error as a text that Spark carries to the driver within its own error."""
    encoded = base64.b64encode(json.dumps(error.as_dict()).encode()).decode()
    return f"error of the engine {encoded} (end of error)"


def carried_error(text: str) -> CdcError | None:
    """Return the error that a text carries; ``None`` if there is none.

    :param text: the text of Spark's error.
    """
    found = _CARRIED.search(text)
    if found is None:
        return None
    values = json.loads(base64.b64decode(found[1]))
    kind: type[CdcError] = getattr(errors, values["kind"])
    return kind(values["message"], values["solution"])


class _Union(AccumulatorParam[frozenset[int]]):
    """Collects schema ids in a set, so that retried tasks do not matter."""

    def zero(self, value: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def addInPlace(self, value1: frozenset[int], value2: frozenset[int]) -> frozenset[int]:
        return value1 | value2


def unknown_schemas(spark: SparkSession) -> Accumulator[frozenset[int]]:
    """Return an accumulator for schema ids that tasks do not find in the registry."""
    return spark.sparkContext.accumulator(frozenset(), _Union())


@dataclass(frozen=True)
class AvroTexts:
    """Decodes the values of messages, as a function that Spark ships.

    A schema that is missing from the registry may appear between two reads of the same messages. The second read treats
    the schemas that the first one missed as missing too, so that every message is in exactly one of the two results.

    :param missed: receives the schema ids that the registry does not have.
    :param missing: schema ids not to ask for.
    """

    registry: Registry
    missed: Accumulator[frozenset[int]] | None = None
    missing: frozenset[int] = frozenset()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._decoded(batches)
        except CdcError as e:
            raise RuntimeError(carried(e)) from e

    def _decoded(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        missing = set(self.missing)
        for batch in batches:
            found = [self._text(value, missing) for value in batch.column("value").to_pylist()]
            texts, troubles = zip(*found, strict=True) if found else ((), ())
            columns = {name: pa.array(each, pa.string()) for name, each in ((TEXT, texts), (UNDECODED, troubles))}
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns.values()], [*batch.schema.names, *columns])

    def _text(self, value: bytes | None, missing: set[int]) -> tuple[str | None, str | None]:
        """Return a value as JSON, or what is wrong with it.

        :param missing: schema ids not to ask for; ids that the registry does not have are added.
        """
        if value is None:
            return None, None
        if len(value) < _HEADER.size or value[0]:
            return None, "it does not begin with a zero byte and a schema id"
        _, number = _HEADER.unpack_from(value)
        schema = None if number in missing else self._schema(number)
        if schema is None:
            missing.add(number)
            return None, f"the registry has no schema {number}"
        stream = io.BytesIO(value[_HEADER.size :])
        try:
            read = fastavro.schemaless_reader(stream, schema, None)
            whole = not stream.read(1)
        except Exception:  # any error of fastavro
            whole = False
        return (json.dumps(read, default=_spelled), None) if whole else (None, f"it is not a value of schema {number}")

    def _schema(self, number: int) -> Any:
        """Return a schema as parsed by fastavro; ``None`` if this id does not exist yet."""
        try:
            return _schema(os.getpid(), self.registry, number)
        except MissingPrivilege as e:
            raise MissingPrivilege(e.message, READ_SCHEMAS) from e
        except ConnectionFailed as e:
            if not isinstance(e.__cause__, SchemaRegistryError) or e.__cause__.http_status_code != _UNKNOWN:
                raise
        if self.missed is not None:
            self.missed.add(frozenset({number}))
        return None


@cache
def _schema(pid: int, registry: Registry, number: int) -> Any:
    found = registry.ask(f"cannot get schema {number}", lambda client: client.get_schema(number))
    return fastavro.parse_schema(json.loads(found.schema_str))


def _spelled(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not an Avro type")
