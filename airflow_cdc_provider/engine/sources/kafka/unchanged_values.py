"""Handles unchanged values that Debezium's updates omit: the target keeps its own.

Postgres does not send a TOASTed value that an update leaves unchanged, and Debezium writes a placeholder for it. The
Kafka sink also names such columns in ``source.unchanged``, because the placeholder does not fit types other than texts
and bytes. In the view such a value is NULL, and :data:`UNCHANGED` contains the names of the columns.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_cdc_provider.engine.changes.effects import net_rows
from airflow_cdc_provider.engine.changes.key_halves import split
from airflow_cdc_provider.engine.core.row_changes import Changes, Relation, RelationColumn
from airflow_cdc_provider.engine.core.table import Table

UNCHANGED = "_unchanged"
"""The column of view and result that names the view's columns with an omitted value."""

Away: TypeAlias = Mapping[int, NDArray[np.bool_]]

_WHOLE_NUMBERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)


@dataclass(frozen=True)
class Placeholder:
    """The text in place of a value that was not sent.

    :param text: as configured in Debezium (``unavailable.value.placeholder``).
    """

    text: str

    def matches(self, read: Column, kind: t.DataType) -> Column | None:
        """Return whether the value of a column is the placeholder; ``None`` for types that it does not fit.

        :param kind: type as which the column is read.
        """
        data = self.text.encode()
        if isinstance(kind, t.StringType):
            return read.isin(*self._texts())
        if isinstance(kind, t.BinaryType):
            return read == f.lit(data)
        if isinstance(kind, t.ArrayType):
            if isinstance(kind.elementType, _WHOLE_NUMBERS):
                numbers = f.array(*(f.lit(n - (n > 127) * 256) for n in data)).cast(kind)
                return (f.size(read) == len(data)) & (read == numbers)
            inner = self.matches(f.get(read, f.lit(0)), kind.elementType)
            return None if inner is None else (f.size(read) == 1) & inner
        if isinstance(kind, t.MapType) and isinstance(kind.valueType, t.StringType):
            return (f.size(read) == 1) & (f.get(f.map_values(read), f.lit(0)) == self.text)
        return None

    def _texts(self) -> Sequence[str]:
        """Return the placeholder as texts: plain, as bytes, as elements of arrays, and arrays and maps as JSON."""
        data = self.text.encode()
        digest = uuid.UUID(bytes=hashlib.md5(data, usedforsecurity=False).digest(), version=3)
        one = [self.text, base64.b64encode(data).decode(), data.hex(), str(digest)]
        numbers = [n - (n > 127) * 256 for n in data]
        whole = [*([each] for each in one), numbers, {self.text: self.text}]
        return [*one, *(json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in whole)]


def completed_row(row: t.StructType, placeholder: Placeholder, after: Column, before: Column, named: Column) -> Column:
    """Return the row of an update; an omitted value is taken from the old row if that contains it.

    :param row: type as which ``before`` and ``after`` are read.
    :param named: columns that the message names as unchanged.
    :returns: a struct of the row, and of the names of omitted columns; these are null in the row.
    """
    away = {each.name: _away(placeholder, after[each.name], each, named) for each in row}
    had = {each.name: ~_away(placeholder, before[each.name], each, None) for each in row}
    values = [
        f.when(~away[each.name], after[each.name]).when(had[each.name], before[each.name]).alias(each.name)
        for each in row
    ]
    lost = [f.when(away[n] & ~(had[n] & before[n].isNotNull()), f.lit(n)) for n in row.names]
    names = f.array_compact(f.array(*lost))
    return f.when(
        reduce(or_, away.values()),
        f.struct(f.struct(*values).alias("row"), f.when(f.size(names) > 0, names).alias("away")),
    ).otherwise(f.struct(after.alias("row"), f.lit(None).cast("array<string>").alias("away")))


def _away(placeholder: Placeholder, read: Column, each: t.StructField, named: Column | None) -> Column:
    matches = placeholder.matches(read, each.dataType)
    found = f.lit(False) if matches is None else f.coalesce(matches, f.lit(False))
    return found if named is None else found | f.coalesce(f.array_contains(named, each.name), f.lit(False))


def masks(names: pa.Array, columns: Sequence[str]) -> Away:
    """Return by column number the rows with an omitted value; only columns that have any.

    :param names: lists of column names.
    """
    rows = np.flatnonzero(names.is_valid().to_numpy(zero_copy_only=False))
    listed = names.take(pa.array(rows)).to_pylist()
    found = {}
    for place, column in enumerate(columns):
        chosen = [row for row, each in zip(rows, listed, strict=True) if column in each]
        if chosen:
            found[place] = np.zeros(len(names), dtype=np.bool_)
            found[place][chosen] = True
    return found


def net_of(table: Table, columns: Sequence[pa.Array], letters: pa.Array | None, away: Away) -> pa.Table:
    """Return the rows of a mirror's :class:`.Effect`: the last row of each key, completed from earlier rows of the key.

    :param letters: operations on the rows, as in a changelog.
    :param away: see :func:`masks`.
    """
    key = tuple(i for i, column in enumerate(table.columns) if column.name in table.key)
    count = len(columns[0])
    codes = [ord(letter or "i") for letter in letters.to_pylist()] if letters is not None else [ord("i")] * count
    described = tuple(RelationColumn(column.name, column.type_oid, -1, False) for column in table.columns)
    changes = Changes(
        relation=Relation(table.oid, table.schema, table.name, "d", described),
        order=np.arange(count),
        op=np.array(codes, dtype=np.uint8),
        xid=np.zeros(count, dtype=np.int64),
        commit_lsn=np.zeros(count, dtype=np.int64),
        commit_ts=np.zeros(count, dtype=np.int64),
        seq=np.arange(count),
        new=tuple(columns),
        unchanged=dict(away),
        old=None,
        old_kind=np.zeros(count, dtype=np.uint8),
    )
    halves = split(changes, key)
    rows, _ = net_rows(changes, halves, np.ones(len(halves.row), dtype=np.bool_), key, -1)
    return rows
