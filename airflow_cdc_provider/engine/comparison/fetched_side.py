"""The sides of a comparison whose target is not in Postgres: its rows are fetched and hashed by this process.

The sink returns rows as texts, exactly as Postgres writes them. Arrays of texts are then formatted as Postgres formats
them, so that keys and contents have the same MD5 sum on both sides. Only sums are kept, and the hashes of buckets that
disagree.

The events of a changelog are reduced to the current row of each key, in one pass over all events. For the events that
belong to a row, see :mod:`.postgres.compared`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.hash_sums import add_up, first_hash, hashes_of
from airflow_cdc_provider.engine.comparison.postgres_side import (
    content_of_cells,
    shipped_hash,
    source_side,
    whole_content,
)
from airflow_cdc_provider.engine.comparison.side import UNKNOWN, FoundRow, HashedRow, RowKey, Sides, buckets_of
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.array_text import array_elements, array_texts
from airflow_cdc_provider.engine.postgres.connection import Connection

Rows: TypeAlias = Callable[[Target, Sequence[RowKey] | None], Iterator[pa.RecordBatch]]
"""Returns all rows of a target, or those at the given keys; additional rows do no harm.

If the table has no key, the keys consist of all columns. The batches have the captured columns under their names, of
Arrow's type ``string``. For a changelog they have all events, with ``_op``, ``_commit_lsn``, ``_seq``, ``_before`` and
``_unchanged`` as further texts.
"""

_PAGE = 1000  # keys in one read
_LAST = (1 << 63) - 1  # rows without a sequence number sort after those that have one


@contextmanager
def row_sides(source: Connection, target: Target, mode: Mode, rows: Rows) -> Iterator[Sides]:
    """Open the sides of a table and a target that only returns its rows; see :meth:`.sinks.contract.Sink.compared`."""
    hashed = shipped_hash(source)
    shape = whole_content if mode == "mirror" else content_of_cells
    content, cells = shape(target.table, hashed)
    copy = RowSide(target, rows, mirror_rows if mode == "mirror" else changelog_rows)
    original = source_side(source, target.table, content, cells, hashed)
    yield Sides(target.table, original, copy, buckets_of(source, target.table))


@dataclass(frozen=True)
class Rowset:
    """Rows of a target, column by column.

    A scan needs only the texts. Keys and cells are computed on demand, because this takes longer than the whole scan.

    :param key_texts: each key as the text of an array.
    :param contents: the contents of the rows, as the source has them.
    :param make_keys: computes :attr:`keys`.
    :param make_cells: computes :attr:`cells`.
    """

    key_texts: Sequence[str]
    contents: Sequence[str]
    make_keys: Callable[[], Sequence[RowKey]]
    make_cells: Callable[[], Sequence[Sequence[str | None]]]

    @cached_property
    def keys(self) -> Sequence[RowKey]:
        """Return the texts of the keys."""
        return self.make_keys()

    @cached_property
    def cells(self) -> Sequence[Sequence[str | None]]:
        """Return the hashes of the rows' contents, as the source has them."""
        return self.make_cells()

    def only(self, rows: Sequence[int]) -> Rowset:
        """Return some of the rows."""
        return Rowset(
            [self.key_texts[i] for i in rows],
            [self.contents[i] for i in rows],
            lambda: [self.keys[i] for i in rows],
            lambda: [self.cells[i] for i in rows],
        )


@dataclass(frozen=True)
class RowSide:
    """A :class:`.Side` that reads the whole target for each scan.

    :param shaped: converts batches of rows to rowsets that can be compared.
    """

    target: Target
    rows: Rows
    shaped: Callable[[Target, Iterable[pa.RecordBatch]], Iterator[Rowset]]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Do nothing, see :meth:`.Side.reading`: the sink determines how consistent each read is."""
        yield

    def scan(self, buckets: int) -> Mapping[int, Sequence[Any]]:
        """Return row counts and sums of hashes by bucket, see :meth:`.Side.scan`."""
        found: dict[int, list[int]] = {}
        for rowset in self.shaped(self.target, self.rows(self.target, None)):
            add_up(found, hashes_of(rowset.key_texts)[:, 0], hashes_of(rowset.contents), buckets)
        return found

    def open(self, buckets: int, opened: Sequence[int]) -> Iterable[HashedRow]:
        """Return the rows of some buckets, see :meth:`.Side.open`."""
        wanted, found = set(opened), []
        for rowset in self.shaped(self.target, self.rows(self.target, None)):
            hashes = hashes_of(rowset.key_texts)[:, 0].tolist()
            for hashed, text, key, cells in zip(hashes, rowset.key_texts, rowset.keys, rowset.cells, strict=True):
                if hashed & (buckets - 1) in wanted:
                    found.append((hashed, text, key, cells, None))
        return sorted(found, key=lambda entry: entry[:2])

    def read(self, keys: Sequence[RowKey]) -> Iterator[FoundRow]:
        """Yield the rows at some keys, see :meth:`.Side.read`."""
        for start in range(0, len(keys), _PAGE):
            page = keys[start : start + _PAGE]
            wanted = set(page)
            for rowset in self.shaped(self.target, self.rows(self.target, page)):
                for key, cells in zip(rowset.keys, rowset.cells, strict=True):
                    if key in wanted:
                        yield key, cells, None

    def cancel(self) -> None:
        """Do nothing, see :meth:`.Side.cancel`: a read that has begun runs to its end."""


def mirror_rows(target: Target, batches: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
    """Yield the rows of a mirror; their cells are two hashes of all columns."""
    names = [column.name for column in target.table.columns]
    key = list(target.table.key) or names
    for batch in batches:
        keys = [batch.column(name) for name in key]
        contents = array_texts([batch.column(name) for name in names]).to_pylist()
        key_texts = contents if key == names else array_texts(keys).to_pylist()
        yield Rowset(key_texts, contents, partial(_tuples, keys), partial(_whole_cells, contents))


def keyed_rows(target: Target, batches: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
    """Yield the rows of a table that has a key; their cells are as in :func:`changelog_rows`."""
    for batch in batches:
        columns = [batch.column(column.name).to_pylist() for column in target.table.columns]
        keys = [batch.column(name) for name in target.table.key]
        cells = list(zip(*(map(_cell, texts) for texts in columns), strict=True))
        yield Rowset(array_texts(keys).to_pylist(), _row_texts(cells), partial(_tuples, keys), partial(list, cells))


def changelog_rows(target: Target, events: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
    """Yield the rows that the events of a changelog add up to; their cells are the hashes of their columns."""
    names = [column.name for column in target.table.columns]
    rows: dict[RowKey, list[str | None]] = {}
    for event in sorted((event for batch in events for event in batch.to_pylist()), key=event_sort_key):
        if event["_op"] == "t":
            rows.clear()
            continue
        before = json.loads(event["_before"]) if event["_before"] else {}
        key = tuple(event[name] for name in target.table.key)
        old = tuple(before[name] if before.get(name) is not None else event[name] for name in target.table.key)
        if event["_op"] == "d":
            rows.pop(old, None)
            continue
        unchanged = array_elements(event["_unchanged"]) if event["_unchanged"] else ()
        kept: list[str | None] | None = None
        if event["_op"] == "u":
            if old == key:
                kept = rows.get(key)
            else:
                rows.pop(old, None)
        last: Sequence[str | None] = kept or [UNKNOWN] * len(names)
        rows[key] = [last[i] if name in unchanged else _cell(event[name]) for i, name in enumerate(names)]
    if rows:
        keys = list(rows)
        contents = _row_texts([tuple(cells) for cells in rows.values()])
        yield Rowset(_row_texts(keys), contents, partial(list, keys), partial(list, rows.values()))


def event_sort_key(event: Mapping[str, str | None]) -> tuple[int, int]:
    """Return the sort key that orders the events of a changelog."""
    assert event["_commit_lsn"] is not None
    return parse_lsn(event["_commit_lsn"]), int(event["_seq"] or _LAST)


def _tuples(columns: Sequence[pa.Array]) -> list[RowKey]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _whole_cells(contents: Sequence[str]) -> list[Sequence[str | None]]:
    return [tuple(map(str, hashes)) for hashes in hashes_of(contents).tolist()]


def _row_texts(rows: Sequence[tuple[str | None, ...]]) -> list[str]:
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    return list(array_texts(columns).to_pylist())


def _cell(text: str | None) -> str | None:
    return None if text is None else str(first_hash(text))
