"""Chunks and re-reads in a store with transactions: rows and watermark are written in one transaction.

Normally rows go directly into the target table, in the transaction that ends with their watermark. This is impossible
if the store would block other writers meanwhile, or if the table needs another definition first. Then rows are written
to a separate table (*aside*), which replaces the target in a second transaction, after all checks are repeated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import FIRST_READ, ChunkRecord, Target, Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.protocol_errors import require_origin
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk
from airflow_cdc_provider.engine.sinks.transactional.record import Lock, Tx
from airflow_cdc_provider.engine.sinks.transactional.target_table import members_by_text
from airflow_cdc_provider.engine.sinks.transactional.units import TransactionalUnits


@dataclass(frozen=True)
class PendingRead(Generic[Tx]):
    """A chunk or a re-read that is about to be written.

    :param keys: keys of a re-read of some rows; ``None`` for all rows.
    :param whole: its rows replace all rows of the target: a chunk without bounds, or a whole table.
    :param lock: lock on the epoch's row.
    :param is_wanted: returns whether it still has to be written.
    :param record: records it, with its watermark and number of rows.
    :param before: the recorded target of a re-read; ``None`` for a chunk, or a table that joins.
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
    """The destination of a read's rows.

    :param aside: name of the separate table; empty for the target table itself.
    :param applied: the applied LSN when the first row may arrive.
    """

    aside: str
    applied: LogPosition


class TransactionalSink(TransactionalUnits[Tx]):
    """The part of a sink with transactions that writes chunks and re-reads."""

    # -- provided by a store -----------------------------------------------------------------------

    @abstractmethod
    def _is_unfinished(self, tx: Tx, chunk: Chunk) -> bool:
        """Return whether the record has an uncommitted chunk; lock it."""

    @abstractmethod
    def _finish_chunk(self, tx: Tx, epoch: int, read: ChunkRecord, target: Target) -> None:
        """Record that a chunk has been read."""

    @abstractmethod
    def _enter_reread(self, tx: Tx, epoch: int, read: ChunkRecord, target: Target) -> None:
        """Record a re-read; for a whole table, also its current definition."""

    @abstractmethod
    def _forget_chunks(self, tx: Tx, label: str) -> None:
        """Remove a table's chunks from the record."""

    @abstractmethod
    def _free_index(self, tx: Tx, label: str) -> int:
        """Return an index that none of a table's chunks has."""

    def _choose_destination(
        self, tx: Tx, epoch: int, read: PendingRead[Tx], applied: LogPosition
    ) -> Destination | None:
        """Make sure that a table with the right definition exists for the rows.

        The transaction, which has begun, may end, and another one begin.

        :returns: ``None`` if the read is no longer wanted.
        """
        return Destination("", applied)

    def _fill_aside(self, tx: Tx, read: PendingRead[Tx], destination: Destination, rows: SourceRows) -> int:
        """Write rows to the separate table; called only if there is one."""
        raise NotImplementedError

    def _take_place(
        self, tx: Tx, epoch: int, read: PendingRead[Tx], destination: Destination
    ) -> AbstractContextManager[bool]:
        """Replace the target by the separate table; the block's records are committed in the same step.

        It yields whether the read is still wanted. The store calls :meth:`_require_still`.
        """
        raise NotImplementedError

    def _redefine_views(self, tx: Tx, applied: LogPosition, before: Target, after: Target) -> None:
        """Let the views follow a change of a table."""

    @abstractmethod
    def _redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Change a target table like its source table."""

    # -- the protocol ------------------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: ServerIdentity,
        rows: SourceRows,
    ) -> int | None:
        """Write the rows and the watermark of a chunk in one transaction."""

        def is_wanted(tx: Tx) -> bool:
            # The epoch's row is locked until the transaction ends; a process that notes another origin waits for that.
            require_origin(chunk, origin, ServerIdentity.of(self._source(tx)))
            return self._is_unfinished(tx, chunk)

        def record(tx: Tx, watermark: Watermark, count: int) -> None:
            self._finish_chunk(tx, epoch, ChunkRecord(chunk, watermark, count), target)
            failpoint("before-chunk-commit")

        read = PendingRead(target, None, chunk.whole, "share", is_wanted, record)
        count = self._write(epoch, read, rows)
        if count is not None:
            failpoint("after-chunk-commit")
        return count

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int]:
        """Return the numbers of rows; the chunks' tasks have committed them already."""
        return [each.written for each in copied]

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        rows: SourceRows,
        before: Target | None,
    ) -> int:
        """Commit a re-read."""
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
        count = self._write(epoch, read, rows)
        failpoint("after-reread-commit")
        assert count is not None  # a re-read is always wanted
        return count

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Change a target table like its source table."""
        failpoint("before-redefinition")
        self._redefine(epoch, before, after)
        failpoint("after-redefinition")

    def _write(self, epoch: int, read: PendingRead[Tx], rows: SourceRows) -> int | None:
        """Write a read's rows and record it; return ``None`` if it is no longer wanted."""
        with self._fenced(epoch, read.lock) as (tx, applied):
            # A chunk has no views to keep: they are built when the mirror is consistent.
            if read.before is not None:
                self._redefine_views(tx, applied, read.before, read.target)
            upkeep = self._upkeep(tx) if read.is_reread else None
            if upkeep is not None:
                upkeep.note_before_reread(read.target.table.label, read.keys)
            destination = self._choose_destination(tx, epoch, read, applied) if read.is_wanted(tx) else None
            if destination is None:
                return None
            if read.keys is not None:
                rows = rows.changed(partial(self._only_members, read.target, read.keys))
            fill = self._fill_aside if destination.aside else self._fill
            count = fill(tx, read, destination, rows)
            failpoint("after-chunk-staged")
            watermark = rows.finish()
            with self._take_place(tx, epoch, read, destination) if destination.aside else _in_place() as wanted:
                if wanted:
                    failpoint("before-chunk-prepared")
                    if upkeep is not None:
                        upkeep.note_after_reread(read.target.table.label, read.keys)
                        upkeep.settle(applied)
                    read.record(tx, watermark, count)
        return count if wanted else None

    def _fill(self, tx: Tx, read: PendingRead[Tx], destination: Destination, rows: SourceRows) -> int:
        """Write rows into the target table."""
        table = self._table(tx, read.target)
        replacing = read.whole or read.keys is not None
        seq = table.clear(read.keys, destination.applied) if replacing else FIRST_READ
        failpoint("before-chunk-staged")
        return table.copy(rows, destination.applied, seq)

    def _only_members(self, target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch) -> pa.RecordBatch:
        """Remove rows that the source has found under another text of a key, unless the key is equal for the target.

        The stream delivers these rows. The target is asked in a separate session, because the transaction's session is
        busy receiving rows.
        """
        names = [column.name for column in target.table.columns]
        columns = [batch.column(names.index(name)) for name in target.table.key]
        texts = zip(*(column.to_pylist() for column in columns), strict=True)
        members = np.array([text in keys for text in texts], dtype=bool)
        others = np.flatnonzero(~members)
        if others.size:
            asked = [column.take(pa.array(others)) for column in columns]
            members[[others[place] for place, _ in self.members(target, sorted(keys), asked)]] = True
        return batch.filter(pa.array(members))

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """Match keys against the keys of re-reads; in a changelog by their texts."""
        if self.mode == "changelog":
            return members_by_text(members, keys)
        with self._asking() as tx:
            return self._table(tx, target).members(members, keys)

    @staticmethod
    def _require_still(before: LogPosition, applied: LogPosition, target: Target) -> None:
        """Refuse rows that were written aside before another unit was committed, because its changes would be lost.

        :raises StreamFailed: naming both LSNs.
        """
        if applied != before:
            raise StreamFailed(
                f"a unit was applied while {target.table.label} was read into a separate table, from"
                f" {format_lsn(before)} to {format_lsn(applied)}",
                "Start again: the rows are read again.",
            )


@contextmanager
def _in_place() -> Iterator[bool]:
    """Yield true: rows in the target table itself need no replacement."""
    yield True
