"""Debezium's format: change events in its envelope, as written by its Postgres connector.

Consumers and sinks written for the connector can read these messages. The differences are listed in
``docs/sinks/kafka.md``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider import __version__
from airflow_cdc_provider.engine.core.effect import OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.array_text import array_elements
from airflow_cdc_provider.engine.sinks.kafka.formats.debezium_values import DebeziumType, Decimals, debezium_type
from airflow_cdc_provider.engine.sinks.kafka.formats.json_columns import (
    NULL,
    TEXT,
    each_by_text,
    joined,
    objects,
    optional,
    string,
)
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import (
    MESSAGES,
    array_text,
    arrays,
    decoded,
    messages,
    names,
    not_ours,
)

UNAVAILABLE = "__debezium_unavailable_value"
"""Placeholder for an unchanged value that was not sent, in columns of texts and bytes; other columns are null."""

OPS = {"r": "r", "i": "c", "u": "u", "d": "d", "t": "t"}
"""Debezium's letters for the engine's."""

SPELLED = json.JSONDecoder(parse_float=str, parse_int=str)
"""Keeps numbers as texts."""

_OURS = {theirs: ours for ours, theirs in OPS.items()}
_PLACEHOLDERS = {"string": f'"{UNAVAILABLE}"', "bytes": '"X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="'}


@dataclass(frozen=True)
class DebeziumFormat:
    """Debezium's envelope in JSON; see :class:`.Format`.

    :param pipeline: name of the pipeline, used as Debezium's ``topic.prefix``.
    :param database: name of the source's database in messages.
    :param decimals: how ``numeric`` is written: as text, or as Kafka Connect's Decimal.
    :param schemas: whether each message contains its schema.
    :param tombstones: whether a message without a value follows a delete.
    """

    pipeline: str
    database: str = ""
    decimals: Decimals = "string"
    schemas: bool = False
    tombstones: bool = True

    def require(self, target: Target) -> None:
        """Accept every table."""

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """Return events as messages."""
        found = arrays(events)
        codec = TableCodec(target, self.decimals)
        keys, values = codec.keys(found), codec.values(found, self._source(target, found), _now())
        if self.schemas:
            keys = keys if keys is None else _with_schema(codec.key_schema(topic), keys)
            values = _with_schema(codec.value_schema(topic), values)
        made = messages(keys, values, found[OP])
        return with_tombstones(made, found[OP]) if self.tombstones and keys is not None else made

    def decode(self, target: Target, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Return messages as events."""
        return decoded(target, self._events(target, values))

    def _events(self, target: Target, values: pa.Array) -> Iterator[dict[str, Any]]:
        codec = TableCodec(target, self.decimals)
        for value in values.to_pylist():
            if value is not None:
                try:
                    envelope = SPELLED.decode(value.decode())
                    yield codec.event(envelope.get("payload", envelope))
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise not_ours(value) from None

    def _source(self, target: Target, found: Mapping[str, pa.Array]) -> pa.Array:
        """Return the ``source`` block of each message."""
        connector = {"version": __version__, "connector": "postgresql", "name": self.pipeline}
        members: dict[str, pa.Array | str] = {name: string(value) for name, value in connector.items()}
        numbers = joined('[\\"', found["commit_lsn"].cast(TEXT), '\\",\\"', found["seq"].cast(TEXT), '\\"]')
        members |= {
            **times(found["commit_ts"]),
            "snapshot": pc.if_else(pc.equal(found[OP], "r"), pa.scalar('"true"', TEXT), pa.scalar('"false"', TEXT)),
            "db": string(self.database),
            "sequence": joined('"', numbers, '"'),
            "schema": string(target.table.schema),
            "table": string(target.table.name),
            "txId": found["xid"],
            "lsn": found["commit_lsn"],
            "xmin": NULL,
        }
        return objects(members, [optional("unchanged", names(found[UNCHANGED]))] if UNCHANGED in found else [])


@dataclass(frozen=True)
class TableCodec:
    """The messages of a table: encoding and decoding of its columns, and their schemas."""

    target: Target
    decimals: Decimals

    @cached_property
    def kinds(self) -> dict[str, DebeziumType]:
        """Return the encodings of the columns, by name."""
        return {column.name: debezium_type(column, self.decimals) for column in self.target.table.columns}

    def keys(self, found: Mapping[str, pa.Array]) -> pa.Array | None:
        """Return the keys as JSON objects, null for truncates; ``None`` for a table without a key."""
        if not self.target.table.key:
            return None
        names = list(self.kinds)
        columns = {name: found[f"c{names.index(name)}"] for name in self.target.table.key}
        keys = objects({name: self.kinds[name].encode(texts) for name, texts in columns.items()})
        return pc.if_else(pc.equal(found[OP], "t"), pa.scalar(None, keys.type), keys)

    def values(self, found: Mapping[str, pa.Array], source: pa.Array, now: Mapping[str, str]) -> pa.Array:
        """Return the envelopes.

        :param source: JSON objects.
        :param now: when the event was made, under Debezium's names.
        """
        op = found[OP]
        after = objects({name: self._column(found, i, name, kind) for i, (name, kind) in enumerate(self.kinds.items())})
        before: pa.Array | str = NULL
        if OLD_KIND in found:
            old = {name: kind.encode(found[f"b{i}"]) for i, (name, kind) in enumerate(self.kinds.items())}
            before = pc.if_else(pc.is_valid(found[OLD_KIND]), objects(old), pa.scalar(None, TEXT))
        gone = pc.or_(pc.equal(op, "d"), pc.equal(op, "t"))
        if pc.any(gone).as_py():
            after = pc.if_else(gone, pa.scalar(None, TEXT), after)
        letters = each_by_text(op, lambda letter: string(OPS[letter]))
        return objects({"before": before, "after": after, "source": source, "transaction": NULL, "op": letters, **now})

    def _column(self, found: Mapping[str, pa.Array], i: int, name: str, kind: DebeziumType) -> pa.Array:
        values = kind.encode(found[f"c{i}"])
        placeholder = _PLACEHOLDERS.get(kind.type) if kind.name != "org.apache.kafka.connect.data.Decimal" else None
        if UNCHANGED not in found or placeholder is None:
            return values
        unsent = each_by_text(found[UNCHANGED], lambda text: placeholder if name in array_elements(text) else None)
        return pc.if_else(pc.is_valid(unsent), unsent, values)

    def event(self, envelope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event of an envelope, as texts; see :meth:`.Format.decode`.

        :param envelope: the envelope, with numbers as texts.
        """
        source, op = envelope["source"], _OURS[envelope["op"]]
        lsn, seq = source["sequence"][2:-2].split('","')
        event: dict[str, Any] = {"_op": op, "_commit_lsn": format_lsn(LogPosition(int(lsn))), "_seq": seq}
        before, after = (self._row(envelope.get(name)) for name in ("before", "after"))
        unchanged = source.get("unchanged") or []
        row = after or {name: (before or {}).get(name) for name in self.target.table.key}
        event |= {name: None if name in unchanged else value for name, value in row.items()}
        if before is not None:
            event["_before"] = json.dumps(before)
        if unchanged:
            event["_unchanged"] = array_text(unchanged)
        return event

    def _row(self, values: Mapping[str, Any] | None) -> dict[str, str | None] | None:
        if values is None:
            return None
        known = {name: kind for name, kind in self.kinds.items() if name in values}
        return {name: None if values[name] is None else kind.decode(values[name]) for name, kind in known.items()}

    # -- schemas -------------------------------------------------------------------------------------

    def key_schema(self, topic: str) -> dict[str, Any]:
        """Return Kafka Connect's schema of the keys."""
        fields = [_field(name, self.kinds[name], optional=False) for name in self.target.table.key]
        return {"type": "struct", "fields": fields, "optional": False, "name": f"{topic}.Key"}

    def value_schema(self, topic: str) -> dict[str, Any]:
        """Return Kafka Connect's schema of the envelopes."""
        key = self.target.table.key
        # The log may contain only the key of a deleted row, even if other columns are NOT NULL.
        columns = [_field(name, kind, optional=name not in key) for name, kind in self.kinds.items()]
        row = {"type": "struct", "fields": columns, "optional": True, "name": f"{topic}.Value"}
        stamps = [{"type": "int64", "optional": True, "field": name} for name in _TIMES]
        transaction = {"type": "struct", "fields": _TRANSACTION, "optional": True, "name": "event.block", "version": 1}
        fields = [
            {**row, "field": "before"},
            {**row, "field": "after"},
            {**_SOURCE, "field": "source"},
            {**transaction, "field": "transaction"},
            {"type": "string", "optional": False, "field": "op"},
            *stamps,
        ]
        return {"type": "struct", "fields": fields, "optional": False, "name": f"{topic}.Envelope", "version": 2}


_TIMES = ("ts_ms", "ts_us", "ts_ns")
_TRANSACTION = [
    {"type": "string", "optional": False, "field": "id"},
    {"type": "int64", "optional": False, "field": "total_order"},
    {"type": "int64", "optional": False, "field": "data_collection_order"},
]
_SOURCE = {
    "type": "struct",
    "fields": [
        *({"type": "string", "optional": False, "field": name} for name in ("version", "connector", "name")),
        {"type": "int64", "optional": False, "field": "ts_ms"},
        {"type": "string", "optional": True, "field": "snapshot"},
        {"type": "string", "optional": False, "field": "db"},
        {"type": "string", "optional": True, "field": "sequence"},
        *({"type": "int64", "optional": True, "field": name} for name in _TIMES[1:]),
        *({"type": "string", "optional": False, "field": name} for name in ("schema", "table")),
        *({"type": "int64", "optional": True, "field": name} for name in ("txId", "lsn", "xmin")),
        {"type": "array", "items": {"type": "string", "optional": False}, "optional": True, "field": "unchanged"},
    ],
    "optional": False,
    "name": "io.debezium.connector.postgresql.Source",
    "version": 1,
}


def _field(name: str, kind: DebeziumType, optional: bool) -> dict[str, Any]:
    """Return a field with its members in the order of Connect's JsonConverter, because keys are compared by their
    bytes.
    """
    found: dict[str, Any] = {"type": kind.type}
    if kind.type == "struct":
        found["fields"] = [
            {"type": "int32", "optional": False, "field": "scale"},
            {"type": "bytes", "optional": False, "field": "value"},
        ]
    found["optional"] = optional
    if kind.name is not None:
        found |= {"name": kind.name, "version": 1}
    if kind.type == "struct":
        found["doc"] = "Variable scaled decimal"
    if kind.parameters:
        found["parameters"] = dict(kind.parameters)
    return {**found, "field": name}


def times(micros: pa.Array) -> dict[str, pa.Array | str]:
    """Return a time as Debezium's numbers; null stays null."""
    numbers = micros.cast(pa.int64())
    return {
        "ts_ms": pc.divide(numbers, 1000),
        "ts_us": numbers,
        "ts_ns": pc.multiply(numbers, 1000),
    }


def _with_schema(schema: Mapping[str, Any], payloads: pa.Array) -> pa.Array:
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    return joined(f'{{"schema":{text},"payload":', payloads, "}")


def with_tombstones(made: pa.Table, op: pa.Array) -> pa.Table:
    """Return messages with a tombstone after each delete."""
    if not pc.any(pc.equal(op, "d")).as_py():
        return made
    deleted = pc.equal(op, "d").to_numpy(zero_copy_only=False)
    places = np.repeat(np.arange(len(deleted)), deleted + 1)
    dead = np.append(False, places[1:] == places[:-1])
    alive = pa.array(places, mask=dead)
    found = arrays(made)
    keys, everywhere = (found[name].take(pa.array(places)) for name in ("key", "everywhere"))
    return pa.Table.from_arrays([keys, found["value"].take(alive), everywhere], schema=MESSAGES)


def _now() -> dict[str, str]:
    micros = int(time.time() * 1_000_000)
    return {"ts_ms": str(micros // 1000), "ts_us": str(micros), "ts_ns": str(micros * 1000)}
