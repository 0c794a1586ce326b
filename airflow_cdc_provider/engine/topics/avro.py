"""Avro in Confluent's wire format, as it is read: a zero, the number of the schema, the value, which becomes JSON.

What follows is one for all formats, so that a value means the same in each. Values with a logical type become texts of
what they stand for; bytes become texts in Base64, as Spark reads them.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
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

from airflow_cdc_provider.engine.errors import ConnectionFailed
from airflow_cdc_provider.engine.sinks.kafka.avro import Registry

TEXT, UNDECODED = "text", "undecoded"
"""Columns that are added to messages: the value as JSON, or why there is none."""

_HEADER = struct.Struct(">bI")
_UNKNOWN = 404


@dataclass(frozen=True)
class AvroTexts:
    """Decodes the values of messages, as a function that Spark ships."""

    registry: Registry

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [self._text(value) for value in batch.column("value").to_pylist()]
            texts, troubles = zip(*found, strict=True) if found else ((), ())
            columns = {name: pa.array(each, pa.string()) for name, each in ((TEXT, texts), (UNDECODED, troubles))}
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns.values()], [*batch.schema.names, *columns])

    def _text(self, value: bytes | None) -> tuple[str | None, str | None]:
        """The JSON of a value, or what is wrong with it."""
        if value is None:
            return None, None
        if len(value) < _HEADER.size or value[0]:
            return None, "it does not begin with a zero and the number of a schema"
        _, number = _HEADER.unpack_from(value)
        schema = _schema(os.getpid(), self.registry, number)
        if schema is None:
            return None, f"the registry has no schema {number}"
        stream = io.BytesIO(value[_HEADER.size :])
        try:
            read = fastavro.schemaless_reader(stream, schema, None)
            whole = not stream.read(1)
        except Exception:  # whatever fastavro runs into
            whole = False
        return (json.dumps(read, default=_spelled), None) if whole else (None, f"it is no value of schema {number}")


@cache
def _schema(pid: int, registry: Registry, number: int) -> Any:
    """A schema as fastavro reads with it; ``None`` where there is none of this number."""
    try:
        found = registry.ask(f"schema {number} cannot be had", lambda client: client.get_schema(number))
    except ConnectionFailed as e:
        if isinstance(e.__cause__, SchemaRegistryError) and e.__cause__.http_status_code == _UNKNOWN:
            return None
        raise
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
    raise TypeError(f"{type(value).__name__} is no type of Avro")
