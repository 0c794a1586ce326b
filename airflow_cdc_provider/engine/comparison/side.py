"""The two sides of a comparison: a source table, and what a sink has made of it.

A side gives for each row its *key* as texts, its *content* as a text that is to be equal on both sides, and on the
source a *version* that changes whenever the row is written. Every value is text as its type's output function writes
it, whatever type the target's column has. The *cells* of a row are hashes of its content, of all of it or column by
column: what must be equal, small enough to be fetched. Both sides hash alike, so that they agree on the bucket that a
key lies in without asking each other.
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

Key: TypeAlias = tuple[str | None, ...]
Entry: TypeAlias = tuple[int, str, Sequence[str | None], Sequence[str | None], str | None]
"""Hash and text of a row's key, the key, cells and version."""
Found: TypeAlias = tuple[Sequence[str | None], Sequence[str | None], str | None]
"""A row's key, cells and version."""

_BUCKET_BYTES = 64 << 10


class Side(Protocol):
    """One side of a table. ``scan``, ``open`` and ``read`` are called within ``reading``."""

    def reading(self) -> AbstractContextManager[None]:
        """One snapshot of every row, where the store has such."""

    def scan(self, buckets: int) -> Mapping[int, Sequence[Any]]:
        """Rows and two sums of hashes of each bucket that has rows.

        :param buckets: how many there are, a power of two.
        """

    def open(self, buckets: int, opened: Sequence[int]) -> Iterable[Entry]:
        """Begin to read the rows of some buckets; they come by the hash of the key, then by its text's code points."""

    def read(self, keys: Sequence[Key]) -> Iterator[Found]:
        """The rows at some keys."""

    def cancel(self) -> None:
        """Break off what another thread does, as far as the store lets us."""


@dataclass(frozen=True)
class Sides:
    """A table and what it is compared with.

    :param buckets: a power of two: some hundred rows a bucket, or more in very large tables.
    """

    table: Table
    source: Side
    target: Side
    buckets: int


def buckets_of(source: Connection, table: Table) -> int:
    """The :attr:`Sides.buckets` for a table on a server, by its size."""
    size = "SELECT coalesce(sum(pg_relation_size(leaf)), 0)::int8 FROM unnest(%s::oid[]) AS leaf"
    pieces = int(scalar(source, size, ([leaf.oid for leaf in table.leaves],))) // _BUCKET_BYTES
    return 1 << min(max(pieces.bit_length(), 6), 13)
