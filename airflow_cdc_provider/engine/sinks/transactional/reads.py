"""Chunks and re-reads in a store with transactions: rows are written with their watermark in one transaction.

Rows go straight into the target table, in the transaction that ends with their watermark. Where that cannot be, since
the store lets nobody else write meanwhile or the table has to take another definition first, they are brought *aside*,
and take their place in a second transaction, which looks at everything again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import FIRST_READ, ChunkRecord, Target, Watermark
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.protocol_errors import require_origin
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk
from airflow_cdc_provider.engine.sinks.transactional.record import Lock, Tx
from airflow_cdc_provider.engine.sinks.transactional.target_table import members_by_text
from airflow_cdc_provider.engine.sinks.transactional.units import TransactionalUnits


@dataclass(frozen=True)
class PendingRead(Generic[Tx]):
    """A chunk or a re-read that is about to be written.

    :param keys: of a re-read of some rows; ``None`` for all.
    :param whole: its rows take the place of all that the target has: a chunk without bounds, or a whole table.
    :param lock: of the epoch's row.
    :param is_wanted: looks whether it is still to be written.
    :param record: records it, with its watermark and rows.
    :param before: of a re-read, the target as it is recorded; ``None`` for a chunk, or a table that joins.
    :param is_reread: whether it is a re-read.
    """

    target: Target
    keys: frozenset[tuple[str, ...]] | None
    whole: bool
    lock: Lock
    is_wanted: Callable[[Tx], bool]
    record: Callable[[Tx, Watermark, int], None]
    before: Target | None = None
    is_reread: bool = False


@dataclass(frozen=True)
class Destination:
    """Where the rows of a read go.

    :param aside: what they are brought to; empty for the target table itself.
    :param applied: the applied LSN when the first of them may come.
    """

    aside: str
    applied: LogPosition


class TransactionalSink(TransactionalUnits[Tx]):
    """See :class:`.contract.Sink`: chunks and re-reads."""

    # -- what a store fills in ---------------------------------------------------------------------

    @abstractmethod
    def _is_unfinished(self, tx: Tx, chunk: Chunk) -> bool:
        """Whether the record has a chunk that has not been committed; it is locked."""

    @abstractmethod
    def _finish_chunk(self, tx: Tx, epoch: int, read: ChunkRecord, target: Target) -> None:
        """Record that a chunk has been read."""

    @abstractmethod
    def _enter_reread(self, tx: Tx, epoch: int, read: ChunkRecord, target: Target) -> None:
        """Record a re-read; of a whole table, also the table as it is defined now."""

    @abstractmethod
    def _forget_chunks(self, tx: Tx, label: str) -> None:
        """Remove a table's chunks from the record."""

    @abstractmethod
    def _free_index(self, tx: Tx, label: str) -> int:
        """A number that none of a table's chunks has."""

    def _choose_destination(
        self, tx: Tx, epoch: int, read: PendingRead[Tx], applied: LogPosition
    ) -> Destination | None:
        """See to it that there is a table of the right definition for the rows to go to.

        The transaction, which has begun, may end, and another begin.

        :returns: ``None`` when the read is no longer wanted.
        """
        return Destination("", applied)

    def _fill_aside(
        self, tx: Tx, read: PendingRead[Tx], destination: Destination, batches: Iterator[pa.RecordBatch]
    ) -> int:
        """Bring rows to the table aside; asked only where there is one."""
        raise NotImplementedError

    def _take_place(
        self, tx: Tx, epoch: int, read: PendingRead[Tx], destination: Destination
    ) -> AbstractContextManager[bool]:
        """Have what was brought aside take its place; what the block records is committed with it.

        It gives whether the read is still wanted. The store calls :meth:`_require_still`.
        """
        raise NotImplementedError

    @abstractmethod
    def _redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`."""

    # -- the protocol ------------------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> int | None:
        """See :meth:`.contract.Sink.write_chunk`."""

        def is_wanted(tx: Tx) -> bool:
            # The epoch's row is locked until the transaction ends: who notes another origin waits for that.
            require_origin(chunk, origin, Origin.of(self._source(tx)))
            return self._is_unfinished(tx, chunk)

        def record(tx: Tx, watermark: Watermark, count: int) -> None:
            self._finish_chunk(tx, epoch, ChunkRecord(chunk, watermark, count), target)
            failpoint("before-chunk-commit")

        read = PendingRead(target, None, chunk.whole, "share", is_wanted, record)
        count = self._write(epoch, read, batches, finish)
        if count is not None:
            failpoint("after-chunk-commit")
        return count

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int]:
        """See :meth:`.contract.Sink.commit_chunks`: their tasks have committed them."""
        return [each.written for each in copied]

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""
        label = target.table.label

        def record(tx: Tx, watermark: Watermark, count: int) -> None:
            index = 0
            if keys is None:
                self._forget_chunks(tx, label)
            else:
                index = self._free_index(tx, label)
            self._enter_reread(tx, epoch, ChunkRecord(Chunk(label, index, None, None), watermark, count, keys), target)
            failpoint("before-reread-commit")

        read = PendingRead(target, keys, keys is None, "alone", lambda _: True, record, before, is_reread=True)
        count = self._write(epoch, read, batches, finish)
        failpoint("after-reread-commit")
        assert count is not None  # a re-read is always wanted
        return count

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`."""
        failpoint("before-redefinition")
        self._redefine(epoch, before, after)
        failpoint("after-redefinition")

    def _write(
        self, epoch: int, read: PendingRead[Tx], batches: Iterator[pa.RecordBatch], finish: Callable[[], Watermark]
    ) -> int | None:
        """Write a read's rows and record it; ``None`` when it is not wanted any more."""
        with self._fenced(epoch, read.lock) as (tx, applied):
            destination = self._choose_destination(tx, epoch, read, applied) if read.is_wanted(tx) else None
            if destination is None:
                return None
            if read.keys is not None:
                batches = self._only_members(read.target, read.keys, batches)
            fill = self._fill_aside if destination.aside else self._fill
            count = fill(tx, read, destination, batches)
            failpoint("after-chunk-staged")
            watermark = finish()
            with self._take_place(tx, epoch, read, destination) if destination.aside else _in_place() as wanted:
                if wanted:
                    failpoint("before-chunk-prepared")
                    read.record(tx, watermark, count)
        return count if wanted else None

    def _fill(self, tx: Tx, read: PendingRead[Tx], destination: Destination, batches: Iterator[pa.RecordBatch]) -> int:
        """Write rows into the target table."""
        table = self._table(tx, read.target)
        replacing = read.whole or read.keys is not None
        seq = table.clear(read.keys, destination.applied) if replacing else FIRST_READ
        failpoint("before-chunk-staged")
        return table.copy(batches, destination.applied, seq)

    def _only_members(
        self, target: Target, keys: frozenset[tuple[str, ...]], batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Leave out rows that the source has found under another text of a key, if that is another key for the target.

        The stream brings these rows. The target is asked in a session of its own: that of the transaction is in the
        middle of taking rows.
        """
        names = [column.name for column in target.table.columns]
        for batch in batches:
            columns = [batch.column(names.index(name)) for name in target.table.key]
            texts = zip(*(column.to_pylist() for column in columns), strict=True)
            members = np.array([text in keys for text in texts], dtype=bool)
            others = np.flatnonzero(~members)
            if others.size:
                asked = [column.take(pa.array(others)) for column in columns]
                members[[others[place] for place, _ in self.members(target, sorted(keys), asked)]] = True
            yield batch.filter(pa.array(members))

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`; the keys of a changelog are one if their texts are."""
        if self.mode == "changelog":
            return members_by_text(members, keys)
        with self._asking() as tx:
            return self._table(tx, target).members(members, keys)

    @staticmethod
    def _require_still(before: LogPosition, applied: LogPosition, target: Target) -> None:
        """Refuse rows that were brought aside before a unit that was committed since: its changes would be lost.

        :raises StreamFailed: naming both.
        """
        if applied != before:
            raise StreamFailed(
                f"a unit was applied while {target.table.label} was read aside, from {format_lsn(before)} to"
                f" {format_lsn(applied)}",
                "Start again: the rows are read once more.",
            )


@contextmanager
def _in_place() -> Iterator[bool]:
    """Rows that were written to the target table itself need not take their place."""
    yield True
