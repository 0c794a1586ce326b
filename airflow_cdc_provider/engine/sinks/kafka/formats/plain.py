"""Encodes events as keys and values of messages, and decodes them.

:class:`PlainFormat` writes one object with the columns of the row and the metadata of the change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.effect import OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.errors import TargetConflict
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.array_text import array_elements, array_texts
from airflow_cdc_provider.engine.postgres.typed_values import arrow_type
from airflow_cdc_provider.engine.sinks.kafka.formats.json_columns import (
    TEXT,
    each_by_text,
    joined,
    objects,
    optional,
    quoted,
)

MESSAGES = pa.schema({"key": pa.large_binary(), "value": pa.large_binary(), "everywhere": pa.bool_()})
"""The columns of messages. ``key`` is null for tables without a key, ``value`` for tombstones. ``everywhere`` marks
messages for every partition.
"""

META = ("_op", "_commit_lsn", "_seq", "_before", "_unchanged")


class Format(Protocol):
    """A format of messages. Immutable and picklable."""

    def require(self, target: Target) -> None:
        """Refuse a table whose rows cannot be messages.

        :raises ConfigError: naming the obstacle.
        """

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """Return events as messages, in order.

        :param events: see :mod:`.events`; none of them changes the key of a row.
        :returns: a table with the columns of :data:`MESSAGES`.
        """

    def decode(self, target: Target, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Return messages as events, see :data:`.fetched_side.Rows`; tombstones are left out.

        :param keys, values: of type ``large_binary``. They may be older than the current columns of the table.
        :raises TargetConflict: when a message was not made by this format.
        """


@dataclass(frozen=True)
class PlainFormat:
    """One JSON object per message: the row, and the metadata of the change.

    Whole numbers and booleans are JSON values, everything else is a text as written by Postgres. Keys are objects of
    the key's columns. ``_op`` is one of r (read), i, u, d, t (truncate). ``_commit_lsn`` and ``_seq`` are the change's
    position in the log, ``_xid`` and ``_commit_ts`` its transaction. ``_before`` has the old key or row, if the log
    contains it. ``_unchanged`` names columns with an unchanged value that was not sent.
    """

    def require(self, target: Target) -> None:
        """Accept every table."""

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """Return events as messages."""
        columns = target.table.columns
        found = arrays(events)
        rows = {column.name: json_of(column, found[f"c{i}"]) for i, column in enumerate(columns)}
        further = [optional("_xid", found["xid"]), optional("_commit_ts", _times(found["commit_ts"]))]
        if OLD_KIND in found:
            old = {column.name: json_of(column, found[f"b{i}"]) for i, column in enumerate(columns)}
            keys = {name: old[name] for name in target.table.key} or old
            kind = found[OLD_KIND]
            before = pc.if_else(pc.equal(kind, "K"), objects(keys), objects(old))
            further.append(optional("_before", before))
        if UNCHANGED in found:
            further.append(optional("_unchanged", names(found[UNCHANGED])))
        meta = {"_op": quoted(found[OP]), "_commit_lsn": found["commit_lsn"], "_seq": found["seq"]}
        return messages(keys_of(target, found, rows), objects({**rows, **meta}, further), found[OP])

    def decode(self, target: Target, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Return messages as events."""
        return decoded(target, (_event(value) for value in values.to_pylist() if value is not None))


def arrays(events: pa.Table) -> dict[str, pa.Array]:
    """Return the columns of a table, each in one chunk."""
    whole = events.combine_chunks()
    return {
        name: column.chunk(0) if column.num_chunks else pa.array([], column.type)
        for name, column in zip(whole.column_names, whole.columns, strict=True)
    }


def keys_of(target: Target, found: Mapping[str, pa.Array], rows: Mapping[str, pa.Array]) -> pa.Array | None:
    """Return the keys of messages as JSON objects, null for truncates; ``None`` for a table without a key.

    :param rows: JSON texts of the row's columns, by name.
    """
    if not target.table.key:
        return None
    keys = objects({name: rows[name] for name in target.table.key})
    return pc.if_else(pc.equal(found[OP], "t"), pa.scalar(None, keys.type), keys)


def messages(keys: pa.Array | None, values: pa.Array, op: pa.Array) -> pa.Table:
    """Return messages of keys and values.

    :param keys: ``None`` if there are none.
    :param op: operations of the events.
    """
    count = len(values)
    key = pa.nulls(count, pa.large_binary()) if keys is None else keys.cast(pa.large_binary())
    return pa.Table.from_arrays([key, values.cast(pa.large_binary()), pc.equal(op, "t")], schema=MESSAGES)


def json_of(column: Column, texts: pa.Array) -> pa.Array:
    """Return texts of Postgres as JSON; whole numbers and booleans become JSON values."""
    kind = arrow_type(column)
    if pa.types.is_integer(kind):
        return texts
    if pa.types.is_boolean(kind):
        words = pc.if_else(pc.equal(texts, "t"), pa.scalar("true", TEXT), pa.scalar("false", TEXT))
        return pc.if_else(pc.is_valid(texts), words, pa.scalar(None, TEXT))
    return quoted(texts)


def names(texts: pa.Array) -> pa.Array:
    """Return texts of arrays of names as JSON."""
    return each_by_text(texts, lambda text: json.dumps(array_elements(text), ensure_ascii=False))


def decoded(target: Target, events: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return events whose values are texts as a batch with the target's columns and :data:`META`."""
    names = [*(column.name for column in target.table.columns), *META]
    rows = list(events)
    return pa.RecordBatch.from_arrays([pa.array([r.get(name) for r in rows], TEXT) for name in names], names=names)


def text_of(value: Any) -> str | None:
    """Return a JSON value as the text that Postgres writes."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)


def array_text(elements: Sequence[str]) -> str:
    """Return the text of an array of names."""
    return str(array_texts([pa.array([each]) for each in elements])[0].as_py())


def not_ours(value: bytes) -> TargetConflict:
    """Return the error for a message that was not made by the format."""
    return TargetConflict(
        f"a message in the topic is not in the format of the pipeline file: {value[:80]!r}",
        "Put `sink.format` back, or name other topics in `sink.topic`; and find out who else writes to the topic.",
    )


def _event(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value)
        event = {name: text_of(each) for name, each in found.items() if name not in META}
        event |= {"_op": found["_op"], "_commit_lsn": format_lsn(found["_commit_lsn"]), "_seq": str(found["_seq"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise not_ours(value) from None
    if (before := found.get("_before")) is not None:
        event["_before"] = json.dumps({name: text_of(each) for name, each in before.items()})
    if (unchanged := found.get("_unchanged")) is not None:
        event["_unchanged"] = array_text(unchanged)
    return event


def _times(micros: pa.Array) -> pa.Array:
    """Return times as ISO 8601, with six digits of the second."""
    texts = micros.cast(pa.timestamp("us")).cast(TEXT)
    return quoted(joined(pc.replace_substring(texts, " ", "T"), "Z"))
