"""What messages look like: events as keys and values, and back.

:class:`PlainFormat` has the row's columns in one object, beside what the change is, see the class.
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
"""Of messages: ``key`` is null for tables without one, ``value`` for tombstones; ``everywhere`` says that a message
goes to every partition."""

META = ("_op", "_commit_lsn", "_seq", "_before", "_unchanged")


class Format(Protocol):
    """How events stand in messages. Immutable and picklable."""

    def require(self, target: Target) -> None:
        """Refuse a table whose rows cannot be messages.

        :raises ConfigError: naming what stands in the way.
        """

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """Events as messages, in their order.

        :param events: see :mod:`.events`; none of them moves a row to another key.
        :returns: with the columns of :data:`MESSAGES`.
        """

    def decode(self, target: Target, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
        """Messages as events, as :data:`.fetched_side.Rows` has them; tombstones are left out.

        :param keys, values: of type ``large_binary``. They may be of when the table had other columns.
        :raises TargetConflict: when there is a message that this format has not made.
        """


@dataclass(frozen=True)
class PlainFormat:
    """One JSON object a message: the row, and what has become of it.

    Whole numbers and booleans are JSON's own, everything else is text as Postgres writes it. Keys are objects of the
    key's columns. ``_op`` is one of r (read), i, u, d, t (truncate), ``_commit_lsn`` and ``_seq`` are the change's
    place in the log, ``_xid`` and ``_commit_ts`` its transaction; ``_before`` has the old key or row, as far as the log
    has it, and ``_unchanged`` names columns whose value was not sent as it stays.
    """

    def require(self, target: Target) -> None:
        """See :meth:`Format.require`: none is refused."""

    def encode(self, target: Target, topic: str, events: pa.Table) -> pa.Table:
        """See :meth:`Format.encode`."""
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
        """See :meth:`Format.decode`."""
        return decoded(target, (_event(value) for value in values.to_pylist() if value is not None))


def arrays(events: pa.Table) -> dict[str, pa.Array]:
    """The columns of a table, each in one piece."""
    whole = events.combine_chunks()
    return {
        name: column.chunk(0) if column.num_chunks else pa.array([], column.type)
        for name, column in zip(whole.column_names, whole.columns, strict=True)
    }


def keys_of(target: Target, found: Mapping[str, pa.Array], rows: Mapping[str, pa.Array]) -> pa.Array | None:
    """The keys of messages as JSON objects, null for those of truncates; ``None`` for a table without a key.

    :param rows: JSON texts of the row's columns, by name.
    """
    if not target.table.key:
        return None
    keys = objects({name: rows[name] for name in target.table.key})
    return pc.if_else(pc.equal(found[OP], "t"), pa.scalar(None, keys.type), keys)


def messages(keys: pa.Array | None, values: pa.Array, op: pa.Array) -> pa.Table:
    """Messages of texts.

    :param keys: ``None`` when there are none.
    :param op: of the events.
    """
    count = len(values)
    key = pa.nulls(count, pa.large_binary()) if keys is None else keys.cast(pa.large_binary())
    return pa.Table.from_arrays([key, values.cast(pa.large_binary()), pc.equal(op, "t")], schema=MESSAGES)


def json_of(column: Column, texts: pa.Array) -> pa.Array:
    """Texts of Postgres as JSON: whole numbers and booleans are JSON's own."""
    kind = arrow_type(column)
    if pa.types.is_integer(kind):
        return texts
    if pa.types.is_boolean(kind):
        words = pc.if_else(pc.equal(texts, "t"), pa.scalar("true", TEXT), pa.scalar("false", TEXT))
        return pc.if_else(pc.is_valid(texts), words, pa.scalar(None, TEXT))
    return quoted(texts)


def names(texts: pa.Array) -> pa.Array:
    """Texts of arrays of names as JSON."""
    return each_by_text(texts, lambda text: json.dumps(array_elements(text), ensure_ascii=False))


def decoded(target: Target, events: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    """Events, whose values are texts already, as a batch: the target's columns, and :data:`META`."""
    names = [*(column.name for column in target.table.columns), *META]
    rows = list(events)
    return pa.RecordBatch.from_arrays([pa.array([r.get(name) for r in rows], TEXT) for name in names], names=names)


def text_of(value: Any) -> str | None:
    """A value of JSON as Postgres writes it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)


def array_text(elements: Sequence[str]) -> str:
    """The text of an array of names."""
    return str(array_texts([pa.array([each]) for each in elements])[0].as_py())


def not_ours(value: bytes) -> TargetConflict:
    """What is raised of a message that the format has not made."""
    return TargetConflict(
        f"a message in the topic is not in the format of the pipeline file: {value[:80]!r}",
        "Put `sink.format` back, or name other topics by `sink.topic`; and see who else writes to it.",
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
    """Times as ISO 8601 has them, with six digits of the second."""
    texts = micros.cast(pa.timestamp("us")).cast(TEXT)
    return quoted(joined(pc.replace_substring(texts, " ", "T"), "Z"))
