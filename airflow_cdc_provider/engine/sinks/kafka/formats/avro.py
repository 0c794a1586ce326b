"""Debezium's envelope in Avro, in Confluent's wire format: a zero byte, the schema id, the value.

The schemas are the ones that Kafka Connect's ``AvroConverter`` derives from Debezium's. Their subjects in the schema
registry are ``<topic>-key`` and ``<topic>-value``.
"""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fastavro
import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.postgres.typed_values import to_texts
from airflow_cdc_provider.engine.sinks.kafka.formats.debezium import SPELLED, DebeziumFormat, TableCodec
from airflow_cdc_provider.engine.sinks.kafka.formats.debezium_values import Decimals
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import MESSAGES, decoded, not_ours

_MAGIC = 0
_HEADER = struct.Struct(">bI")
_NAME = re.compile(r"[^A-Za-z0-9_]")
_TYPES = {"int8": "int", "int16": "int", "int32": "int", "int64": "long"}
_FLOATS = {"float": pa.float32(), "double": pa.float64()}
ConnectSchema = Mapping[str, Any]


@dataclass(frozen=True)
class AvroFormat:
    """Debezium's envelope in Avro; see :class:`.Format` and, for the parameters, :class:`.DebeziumFormat`."""

    registry: Registry
    pipeline: str
    database: str = ""
    decimals: Decimals = "string"
    tombstones: bool = True

    def require(self, target: Target) -> None:
        """Refuse a table whose column names collide in Avro.

        :raises ConfigError: naming two such columns.
        """
        found: dict[str, str] = {}
        for column in target.table.columns:
            other = found.setdefault(avro_name(column.name), column.name)
            if other != column.name:
                raise ConfigError(
                    f"columns {other!r} and {column.name!r} of {target.table.label} would both be"
                    f" {avro_name(column.name)} in Avro",
                    "Rename one of them, or leave it out with `columns`.",
                )

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """Return events as messages."""
        codec = TableCodec(target, self.decimals)
        plain = DebeziumFormat(self.pipeline, self.database, self.decimals, False, self.tombstones)
        made = plain.encode(target, topic, events)
        written = []
        for name, schema in (("key", codec.key_schema(topic)), ("value", codec.value_schema(topic))):
            column = made.column(name)
            if column.null_count < len(column):
                number = self.registry.id_of(f"{topic}-{name}", json.dumps(avro_schema(schema), separators=(",", ":")))
                parsed = self.registry.schema(number)
                values = [None if v is None else _write(number, parsed, schema, v) for v in column.to_pylist()]
                written.append(pa.array(values, pa.large_binary()))
            else:
                written.append(column.combine_chunks())
        return pa.Table.from_arrays([*written, made.column("everywhere")], schema=MESSAGES)

    def decode(self, target: Target, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Return messages as events."""
        return decoded(target, self._events(target, values))

    def _events(self, target: Target, values: pa.Array) -> Iterator[dict[str, Any]]:
        codec = TableCodec(target, self.decimals)
        schema = codec.value_schema("")
        for value in values.to_pylist():
            if value is None:
                continue
            try:
                magic, number = _HEADER.unpack_from(value)
                if magic != _MAGIC:
                    raise not_ours(value)
                found = fastavro.schemaless_reader(
                    io.BytesIO(value[_HEADER.size :]), self.registry.schema(number), None
                )
                yield codec.event(_plain(schema, found))
            except (ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError, struct.error):
                raise not_ours(value) from None


def avro_schema(schema: ConnectSchema, known: set[str] | None = None) -> Any:
    """Return a schema of Kafka Connect in Avro, like its ``AvroConverter``.

    :param known: names of records that have been defined before.
    """
    known = set() if known is None else known
    kind, name = schema["type"], schema.get("name")
    if kind == "struct":
        full = ".".join(avro_name(part) for part in str(name or "").split("."))
        if full in known:
            made: Any = full
        else:
            known.add(full)
            namespace, _, last = full.rpartition(".")
            fields = [_avro_field(each, known) for each in schema["fields"]]
            made = {"type": "record", "name": last, "namespace": namespace, "fields": fields, **_connect(schema)}
    elif kind == "array":
        made = {"type": "array", "items": avro_schema(schema["items"], known)}
    else:
        made = {"type": _TYPES.get(kind, kind)}
        parameters = schema.get("parameters")
        if parameters:
            made |= {"scale": int(parameters["scale"]), "precision": int(parameters["connect.decimal.precision"])}
        made |= _connect(schema)
        if kind == "int16":
            made["connect.type"] = kind
        if parameters:
            made["logicalType"] = "decimal"
        if len(made) == 1:
            made = made["type"]
    return ["null", made] if schema.get("optional") else made


def _connect(schema: ConnectSchema) -> dict[str, Any]:
    """Return properties that Avro lacks, in the order of ``AvroConverter``, which distinguishes schemas
    in a registry.
    """
    names = ("doc", "version", "parameters", "name")
    return {f"connect.{name}": schema[name] for name in names if name in schema}


def avro_name(name: str) -> str:
    """Return a valid name for Avro."""
    found = _NAME.sub("_", name)
    return f"_{found}" if found[:1].isdigit() or not found else found


def _avro_field(schema: ConnectSchema, known: set[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"name": avro_name(schema["field"]), "type": avro_schema(schema, known)}
    if schema.get("optional"):
        made["default"] = None
    return made


def _write(number: int, parsed: Any, schema: ConnectSchema, value: bytes) -> bytes:
    out = io.BytesIO()
    out.write(_HEADER.pack(_MAGIC, number))
    fastavro.schemaless_writer(out, parsed, _native(schema, SPELLED.decode(value.decode())))
    return out.getvalue()


def _native(schema: ConnectSchema, value: Any) -> Any:
    """Return a value of JSON, with numbers as texts, for Avro."""
    if value is None:
        return None
    kind = schema["type"]
    if kind == "struct":
        return {avro_name(each["field"]): _native(each, value.get(each["field"])) for each in schema["fields"]}
    if kind == "bytes":
        return base64.b64decode(value)
    if kind in _TYPES:
        return int(value)
    return float(value) if kind in _FLOATS else value


def _plain(schema: ConnectSchema, value: Any) -> Any:
    """Return a value of Avro for JSON, with numbers as texts."""
    if value is None:
        return None
    kind = schema["type"]
    if kind == "struct":
        named = {each["field"]: (each, avro_name(each["field"])) for each in schema["fields"]}
        return {field: _plain(each, value[name]) for field, (each, name) in named.items() if name in value}
    if kind == "bytes":
        return base64.b64encode(value).decode()
    return to_texts(pa.array([value], _FLOATS[kind]))[0].as_py() if kind in _FLOATS else value
