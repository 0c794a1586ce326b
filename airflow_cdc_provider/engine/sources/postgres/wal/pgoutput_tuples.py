"""Decodes the values of rows, column by column, from the bytes of many messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.row_changes import Bytes, Flags, Ints, Relation
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput_wire import (
    NULL,
    OPTIONS,
    TEXT,
    UNCHANGED,
    Wire,
    int32,
    octet,
    refuse,
)


def tuples(
    wire: Wire, relation: Relation, present: Flags, at: Ints, end: Ints, name: Callable[[int], str]
) -> tuple[tuple[pa.Array, ...], dict[int, Flags], Ints]:
    """Decode one tuple of each row that is ``present``.

    :param at, end: where the tuple begins and where its message ends; for the present rows only.
    :param name: describes a row, by its index among all.
    :returns: for all rows, an array for each column and masks of values that are left out; where the tuples end.
    """
    index, width, count = np.flatnonzero(present), len(relation.columns), wire.read(">u2", at)
    refuse(count != width, lambda i: f"{name(index[i])} has {count[i]} values for {width} columns")
    at = at + 2  # if the count itself was cut short, so are the values
    arrays, unchanged = [], {}
    for number, column in enumerate(relation.columns):
        text, left_out, start, at = _values(wire, at, end, column.name, lambda i: name(index[i]))
        arrays.append(_strings(wire.data, start, at, text, present))
        if left_out is not None and left_out.any():
            unchanged[number] = np.zeros(len(present), np.bool_)
            unchanged[number][index] = left_out
    return tuple(arrays), unchanged, at


def _values(
    wire: Wire, at: Ints, end: Ints, column: str, name: Callable[[int], str]
) -> tuple[Flags, Flags | None, Ints, Ints]:
    """Return which of the values at ``at`` are texts, which are left out, and where they start and end."""
    head = wire.read(">u8", at)
    kind = octet(head, 0)
    text, left_out = kind == TEXT, None
    length, start = int32(head, 1), at + 5
    if not text.all():
        left_out = kind == UNCHANGED
        bad = ~(text | (kind == NULL) | left_out) & (at < end)
        refuse(bad, lambda i: f"{name(i)} has a value of kind {chr(kind[i])!r} for {column}", OPTIONS)
        length, start = np.where(text, length, 0), np.where(text, start, at + 1)
    stop = start + length
    bad = (length < 0) | (stop > end)
    refuse(bad, lambda i: f"{name(i)} is cut short: {length[i]} bytes for {column}, but {end[i] - start[i]} are left")
    return text, left_out, start, stop


def _strings(data: Bytes, start: Ints, end: Ints, text: Flags, present: Flags) -> pa.Array:
    """Collect the values of one column; ``text`` marks the present rows that have one (not null, not left out).

    Values and the bytes between them are an Arrow array without any copying, because positions grow from row to row.
    Its even elements are the column, and Arrow's filter gathers them faster than NumPy can.
    """
    size = 2 * len(start)
    edges = np.empty(size + 1, np.int64)
    edges[:-1:2], edges[1::2], edges[-1] = start, end, len(data)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(data)]
    even = [None, pa.py_buffer(np.full(size // 8 + 1, 0b01010101, np.uint8))]
    values = pa.Array.from_buffers(pa.large_string(), size, buffers).filter(
        pa.Array.from_buffers(pa.bool_(), size, even)
    )
    valid, (_, offsets, characters) = text, values.buffers()
    if len(text) < len(present):  # rows without a tuple become empty and null
        offsets = pa.py_buffer(np.frombuffer(offsets, np.int64)[np.append(0, np.cumsum(present))])
        valid = np.zeros(len(present), np.bool_)
        valid[present] = text
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.large_string(), len(present), [bits, offsets, characters])
