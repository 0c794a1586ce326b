"""Units of the stream in a store with transactions: tasks stage them, and one transaction applies and records them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import Fenced, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.protocol_errors import read_again_since, require_adjoining
from airflow_cdc_provider.engine.sinks.staged import MissingValues, Staged, StagedPiece
from airflow_cdc_provider.engine.sinks.transactional.record import TransactionalRecord, Tx
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable
from airflow_cdc_provider.engine.sinks.transactional.view_upkeep import ViewUpkeep


class TransactionalUnits(TransactionalRecord[Tx]):
    """The part of a sink with transactions that writes units, and keeps pieces that are too large for Spark."""

    # -- provided by a store -----------------------------------------------------------------------

    @abstractmethod
    def _table(self, tx: Tx, target: Target) -> TargetTable:
        """Return a target table, for work in a transaction."""

    def _tables(self, tx: Tx, targets: Iterable[Target]) -> Mapping[str, TargetTable]:
        """Return target tables by label; overridden by a store that queries all of them at once."""
        return {target.table.label: self._table(tx, target) for target in targets}

    @abstractmethod
    def _stage(self, tx: Tx, epoch: int, attempt: str, effects: Sequence[Effect]) -> Sequence[Staged]:
        """Write the rows of effects where :meth:`TargetTable.apply` finds them; the transaction has begun."""

    @abstractmethod
    def _staged_counts(self, tx: Tx, relations: Sequence[str]) -> Mapping[str, int]:
        """Return the number of rows in staged relations; missing relations may be omitted."""

    @abstractmethod
    def _finish_unit(self, tx: Tx, relations: Sequence[str]) -> None:
        """Drop the staged relations of a unit in its transaction; if dropping commits, commit first."""

    @abstractmethod
    def _advance(self, tx: Tx, end: LogPosition) -> None:
        """Advance the applied LSN, and remove re-reads of keys that it has passed, because they are only filters."""

    @abstractmethod
    def _read_beyond(self, tx: Tx, high: LogPosition) -> str | None:
        """Return a source table with a read whose high watermark is higher than ``high``; ``None`` if there is none."""

    @abstractmethod
    def _sweep(self, tx: Tx) -> None:
        """Drop everything that the pipeline has staged."""

    @abstractmethod
    def _write_deposit(self, tx: Tx, name: str, data: bytes | bytearray) -> None:
        """Keep a piece of the log in the store."""

    @abstractmethod
    def _read_deposit(self, tx: Tx, name: str, size: int) -> bytearray:
        """Return the existing bytes of a deposit of ``size`` bytes."""

    @abstractmethod
    def _drop_deposits(self, tx: Tx, names: Collection[str] | None) -> None:
        """Remove deposits, all if ``None``."""

    def _upkeep(self, tx: Tx) -> ViewUpkeep | None:
        """Return the upkeep of the views in a transaction; ``None`` if the pipeline has none."""
        return None

    def _check_deferred(self, tx: Tx) -> None:
        """Check constraints now that the store would check at the commit, because a rehearsal does not commit."""

    # -- the protocol ------------------------------------------------------------------------------

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Keep a piece of the log in the store."""
        with self._fenced(epoch, "share") as (tx, _):
            self._write_deposit(tx, name, data)

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """Return a deposit."""
        with self._fenced(epoch, "stage") as (tx, _):
            data = self._read_deposit(tx, name, size)
        if len(data) != size:
            raise StagingLost(
                f"a piece of the log of {size} bytes was deposited in the sink {self._place}, but {len(data)}"
                " were found",
                "Start again: the piece is read again. The server may have crashed in between.",
            )
        return data

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """Remove deposits; nothing if another run has the epoch."""
        with suppress(Fenced), self._fenced(epoch, "share") as (tx, _):
            self._drop_deposits(tx, names)

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Stage the effects of a piece."""
        if not effects:
            return ()
        with self._fenced(epoch, "stage") as (tx, _):
            staged = self._stage(tx, epoch, attempt, effects)
            failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: LogPosition,
        end: LogPosition,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """Commit a unit in one transaction."""
        return self._commit(epoch, start, end, _in_order(pieces), noted)

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """Apply pieces like a commit, and roll back."""
        with self._fenced(epoch, "unit", rehearsal=True) as (tx, _):
            self._apply(tx, _in_order(pieces))
            self._check_deferred(tx)

    def _commit(
        self,
        epoch: int,
        start: LogPosition,
        end: LogPosition,
        pieces: Iterator[StagedPiece],
        noted: Mapping[str, Any] | None,
    ) -> bool:
        failpoint("before-batch-commit")
        staged: list[Staged] = []
        with self._fenced(epoch, "unit") as (tx, applied):
            skip = applied >= end
            if not skip:
                require_adjoining(self.pipeline, start, end, applied)
                upkeep = self._upkeep(tx)
                staged = self._apply(tx, pieces, upkeep)
                if upkeep is not None:
                    upkeep.settle(applied)
                self._advance(tx, end)
                if noted:
                    self._note(tx, noted)
            staged += (each for piece in pieces for each in piece.tables)  # pieces of a unit that is skipped
            failpoint("in-batch-commit")
            self._finish_unit(tx, list(dict.fromkeys(each.relation for each in staged if each.relation is not None)))
        failpoint("after-batch-commit")
        return not skip

    def _apply(self, tx: Tx, pieces: Iterator[StagedPiece], upkeep: ViewUpkeep | None = None) -> list[Staged]:
        """Apply pieces; return their staged changes.

        :raises MissingValues: after all pieces are applied, with all missing keys, so that they can be read at once.
        """
        tables: dict[str, TargetTable] = {}
        missing: dict[str, set[tuple[str, ...]]] = {}
        all_staged: list[Staged] = []
        for piece in pieces:
            self._check_filters(tx, piece.high)
            self._check_staged(tx, piece.tables)
            all_staged += piece.tables
            new = {staged.label for staged in piece.tables} - tables.keys()
            tables |= dict(self._tables(tx, self._targets(tx, new).values()) if new else {})
            for staged in piece.tables:
                if upkeep is not None:
                    upkeep.note(staged)
                lacking = tables[staged.label].apply(staged)
                if lacking:
                    missing.setdefault(staged.label, set()).update(lacking)
            failpoint("after-piece-applied")
        if missing:
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items()})
        return all_staged

    def _check_filters(self, tx: Tx, high: LogPosition) -> None:
        """Refuse a piece if rows were read again after it was staged; it would undo changes in them."""
        label = self._read_beyond(tx, high)
        if label is not None:
            raise read_again_since(label)

    def _check_staged(self, tx: Tx, piece: Sequence[Staged]) -> None:
        """Check the number of rows before a piece is applied; a crash of the store may have emptied unlogged tables."""
        expected: dict[str, tuple[int, str]] = {}
        for staged in piece:
            if staged.relation is not None and staged.share is None:
                expected[staged.relation] = (staged.rows, staged.label)
            elif staged.relation is not None:  # a shared relation, with one row per table
                tables = 1 + expected.get(staged.relation, (0, ""))[0]
                expected[staged.relation] = (tables, f"{tables} tables")
        counts = self._staged_counts(tx, list(expected)) if expected else {}
        for relation, (count, what) in expected.items():
            if counts.get(relation, 0) != count:
                raise StagingLost(
                    f"{count} rows were staged for {what}, but {counts.get(relation, 0)} were found",
                    "Start again: the unit is staged again. The server may have crashed in between.",
                )

    def sweep(self, epoch: int) -> None:
        """Remove everything staged; nothing if another run has the epoch."""
        with suppress(Fenced), self._fenced(epoch, "share") as (tx, _):
            self._sweep(tx)


def _in_order(pieces: Sequence[StagedPiece]) -> Iterator[StagedPiece]:
    return iter(sorted(pieces, key=lambda piece: piece.index))
