"""Groups of chunks, each the work of one Spark job.

A group is given as ranges of chunks. The ranges do not depend on which chunks other jobs finish in the meantime, so a
job that is started again works on the same group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, values_hidden
from airflow_cdc_provider.engine.core.record import Record

Range: TypeAlias = tuple[str, int, int]
"""A table's label, and the first and last index of the chunks."""

# The ranges of a group are an argument on a command line; an argument may have at most 128 KiB.
_MOST_BYTES = 100_000
_INDEX_BYTES = 32
# The label becomes the name of a task; this is the width of its column in Airflow's database.
_LABEL_CHARACTERS = 250


def plan_groups(unfinished: Sequence[dict[str, Any]], groups: int) -> list[dict[str, Any]]:
    """Divide chunks into groups of about the same number of chunks.

    :param unfinished: the result of ``commands.unfinished``, in the order of tables and keys.
    :param groups: the maximum number of groups; there are more if a group would have too many tables.
    :returns: for each group its ``label`` and its ``chunks`` as ranges; no group is empty.
    """
    parts = [unfinished[start:end] for start, end in pairwise([*_starts(unfinished, groups), len(unfinished)])]
    return [{"label": _label(part), "chunks": [list(r) for r in _ranges(part)]} for part in parts]


def _starts(chunks: Sequence[dict[str, Any]], groups: int) -> Iterator[int]:
    """Yield the indexes at which groups begin.

    A group begins at each equal share of the chunks, and wherever the ranges of the group before would become too long.
    """
    shares = {len(chunks) * index // groups for index in range(groups)}
    table, length = None, 0
    for index, chunk in enumerate(chunks):
        begins = index in shares
        if begins or chunk["table"] != table:
            table, more = chunk["table"], len(json.dumps(chunk["table"])) + _INDEX_BYTES
            begins = begins or length + more > _MOST_BYTES
            length = more if begins else length + more
        if begins:
            yield index


def _ranges(chunks: Sequence[dict[str, Any]]) -> list[Range]:
    """Return the chunks of each table as one range.

    The range may include finished chunks. These do no harm, because finished chunks are never copied again.
    """
    tables = groupby(chunks, key=lambda chunk: chunk["table"])
    indexes = ((table, [chunk["index"] for chunk in found]) for table, found in tables)
    return [(table, min(found), max(found)) for table, found in indexes]


def _label(chunks: Sequence[dict[str, Any]]) -> str:
    """Return a label such as ``public.orders 1000 .. 5000, 4 chunks``."""
    label = _whole_label(chunks)
    return label if len(label) <= _LABEL_CHARACTERS else f"{label[: _LABEL_CHARACTERS - 1]}…"


def _whole_label(chunks: Sequence[dict[str, Any]]) -> str:
    first, last = chunks[0], chunks[-1]
    count = "1 chunk" if len(chunks) == 1 else f"{len(chunks)} chunks"
    if first["table"] != last["table"]:
        tables = len({chunk["table"] for chunk in chunks})
        return f"{first['table']} … {last['table']}, {count} of {tables} tables"
    keys = f"{first['lower']} .. {last['upper']}".strip() if first["lower"] or last["upper"] else "all rows"
    if values_hidden():
        keys = f"[{first['index']} .. {last['index']}]"
    return f"{first['table']} {keys}, {count}"


def parse_chunks(text: str) -> tuple[Range, ...]:
    """Parse the ranges of a group from a command line argument: a JSON list of ``[table, first, last]``.

    :raises ConfigError: if the text does not have that form.
    """
    try:
        return tuple(_checked(json.loads(text)))
    except (ValueError, TypeError) as e:
        raise ConfigError(
            f"--chunks {text[:200]!r} is not a list of ranges of chunks",
            'Give JSON such as [["public.orders", 0, 9]]: a table, its first and its last chunk.',
        ) from e


def _checked(ranges: Any) -> Iterator[Range]:
    for table, first, last in ranges:
        if not (isinstance(table, str) and type(first) is int and type(last) is int and 0 <= first <= last):
            raise ValueError(f"{[table, first, last]}")
        yield table, first, last


def part_of(chunks: Sequence[Range] | None) -> str:
    """Return the name of the part of a run that works on a group.

    :param chunks: the ranges of the group, or ``None`` for all chunks.
    """
    if chunks is None:
        return "snapshot"
    return f"snapshot-{zlib.crc32(json.dumps(chunks).encode()):08x}"


ChunkIndex: TypeAlias = tuple[str, int]
"""A chunk: the label of its table, and its index in the table."""


def ranges(places: Iterable[ChunkIndex]) -> list[Range]:
    """Merge consecutive chunks into ranges."""
    found: list[Range] = []
    for table, index in sorted(places):
        if found and found[-1][0] == table and found[-1][2] == index - 1:
            found[-1] = table, found[-1][1], index
        else:
            found.append((table, index, index))
    return found


def places(ranges: Iterable[Sequence[Any]]) -> set[ChunkIndex]:
    """Expand the ranges that :func:`ranges` returned into chunks."""
    return {(table, index) for table, first, last in ranges for index in range(first, last + 1)}


def choose_chunks(record: Record, within: Sequence[Range] | None = None) -> tuple[Chunk, ...]:
    """Return the unfinished chunks within the given ranges, by default those of all tables."""
    unfinished = (c.chunk for c in record.chunks if c.keys is None and c.watermark is None)
    if within is None:
        return tuple(unfinished)
    wanted: dict[str, list[tuple[int, int]]] = {}
    for table, first, last in within:
        wanted.setdefault(table, []).append((first, last))
    return tuple(c for c in unfinished if any(first <= c.index <= last for first, last in wanted.get(c.table, ())))
