"""The two sides of a comparison: a source table and its copy in a sink.

For each row a side has a *key* as texts, and a *content* as a text that must be equal on both sides. On the source
there is also a *version* that changes whenever the row is written. Every value is text as its type's output function
writes it, whatever type the target's column has. The *cells* of a row are hashes of its whole content or of each
column: they must be equal, and are small enough to be fetched. Both sides use the same hash, so that they assign a key
to the same bucket without communicating.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, scalar

UNKNOWN = "?"
"""A cell that equals every value."""

RowKey: TypeAlias = tuple[str | None, ...]
HashedRow: TypeAlias = tuple[int, str, Sequence[str | None], Sequence[str | None], str | None]
"""Hash and text of a row's key, then the key, the cells and the version."""
FoundRow: TypeAlias = tuple[Sequence[str | None], Sequence[str | None], str | None]
"""A row's key, cells and version."""

_BUCKET_BYTES = 64 << 10


class Side(Protocol):
    """One side of a table. ``scan``, ``open`` and ``read`` are called within ``reading``."""

    def reading(self) -> AbstractContextManager[None]:
        """Read from one snapshot of all rows during the block, if the store has snapshots."""

    def scan(self, buckets: int) -> Mapping[int, Sequence[Any]]:
        """Return the number of rows and two sums of hashes for each bucket that has rows.

        :param buckets: number of buckets, a power of two.
        """

    def open(self, buckets: int, opened: Sequence[int]) -> Iterable[HashedRow]:
        """Begin to read the rows of some buckets, ordered by the key's hash, then by the code points of its text."""

    def read(self, keys: Sequence[RowKey]) -> Iterator[FoundRow]:
        """Yield the rows at some keys."""

    def cancel(self) -> None:
        """Cancel the work of another thread, if the store allows it."""


@dataclass(frozen=True)
class Sides:
    """A table and its copy.

    :param buckets: number of buckets, a power of two; a bucket has some hundred rows, or more in very large tables.
    """

    table: Table
    source: Side
    target: Side
    buckets: int


def buckets_of(source: Connection, table: Table) -> int:
    """Return :attr:`Sides.buckets` for a table on a server, depending on its size."""
    size = "SELECT coalesce(sum(pg_relation_size(leaf)), 0)::int8 FROM unnest(%s::oid[]) AS leaf"
    pieces = int(scalar(source, size, ([leaf.oid for leaf in table.leaves],))) // _BUCKET_BYTES
    return 1 << min(max(pieces.bit_length(), 6), 13)
