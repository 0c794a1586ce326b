"""Values that a message of Debezium's leaves out, as an update has left them alone: they are kept where they stand.

Postgres does not send a TOASTed value that an update leaves alone, and Debezium writes a placeholder in its place. The
sink for Kafka names such columns in ``source.unchanged``, too, as the placeholder has no place in columns of other
types than texts and bytes. In the view such a value is NULL, and :data:`UNCHANGED` has the names of the columns.
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
"""The column of view and result that names the view's columns whose value a message leaves out."""

Away: TypeAlias = Mapping[int, NDArray[np.bool_]]

_WHOLE_NUMBERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)


@dataclass(frozen=True)
class Placeholder:
    """What stands for a value that was not sent.

    :param text: as Debezium is configured (``unavailable.value.placeholder``).
    """

    text: str

    def stands(self, read: Column, kind: t.DataType) -> Column | None:
        """Return whether it is what was read of a column; ``None`` for types that have no place for it.

        :param kind: that the column is read as.
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
            inner = self.stands(f.get(read, f.lit(0)), kind.elementType)
            return None if inner is None else (f.size(read) == 1) & inner
        if isinstance(kind, t.MapType) and isinstance(kind.valueType, t.StringType):
            return (f.size(read) == 1) & (f.get(f.map_values(read), f.lit(0)) == self.text)
        return None

    def _texts(self) -> Sequence[str]:
        """The placeholder as a text: its own, of bytes, of the elements of arrays, and of those and maps as JSON."""
        data = self.text.encode()
        digest = uuid.UUID(bytes=hashlib.md5(data, usedforsecurity=False).digest(), version=3)
        one = [self.text, base64.b64encode(data).decode(), data.hex(), str(digest)]
        numbers = [n - (n > 127) * 256 for n in data]
        whole = [*([each] for each in one), numbers, {self.text: self.text}]
        return [*one, *(json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in whole)]


def told(row: t.StructType, placeholder: Placeholder, after: Column, before: Column, named: Column) -> Column:
    """Return what an update says of a row: a value that it leaves out is the old row's, where that has it.

    :param row: what ``before`` and ``after`` are read as.
    :param named: columns that the message says to be unchanged.
    :returns: a struct of the row, and of the names of columns that are left out; these are null in it.
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
    stands = placeholder.stands(read, each.dataType)
    found = f.lit(False) if stands is None else f.coalesce(stands, f.lit(False))
    return found if named is None else found | f.coalesce(f.array_contains(named, each.name), f.lit(False))


def masks(names: pa.Array, columns: Sequence[str]) -> Away:
    """Return by place of a column in which rows its value is left out; only columns that have such.

    :param names: lists of names of columns.
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
    """Return the rows of a mirror's :class:`.Effect`: of each key the last one, with what those before it have told.

    :param letters: what has been done to the rows; as a changelog has it.
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
