"""Units of the stream in a store with transactions: staged by tasks, applied and recorded in one transaction."""

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


class TransactionalUnits(TransactionalRecord[Tx]):
    """See :class:`.contract.Sink`: units, and what is too large to pass through Spark."""

    # -- what a store fills in ---------------------------------------------------------------------

    @abstractmethod
    def _table(self, tx: Tx, target: Target) -> TargetTable:
        """A target table to work on in a transaction."""

    def _tables(self, tx: Tx, targets: Iterable[Target]) -> Mapping[str, TargetTable]:
        """Target tables, by label; for a store that looks at all of them at once."""
        return {target.table.label: self._table(tx, target) for target in targets}

    @abstractmethod
    def _stage(self, tx: Tx, epoch: int, attempt: str, effects: Sequence[Effect]) -> Sequence[Staged]:
        """Put the rows of effects where :meth:`TargetTable.apply` finds them; the transaction has begun."""

    @abstractmethod
    def _staged_counts(self, tx: Tx, relations: Sequence[str]) -> Mapping[str, int]:
        """Rows that stand in what was staged; what is gone may be left out."""

    @abstractmethod
    def _finish_unit(self, tx: Tx, relations: Sequence[str]) -> None:
        """Drop what was staged for a unit in its transaction; or, where to drop commits, commit first."""

    @abstractmethod
    def _advance(self, tx: Tx, end: LogPosition) -> None:
        """Move the applied LSN, and remove re-reads of keys whose H it has reached: passed, a filter is of no use."""

    @abstractmethod
    def _read_beyond(self, tx: Tx, high: LogPosition) -> str | None:
        """A source table of which the record has a chunk or re-read with a higher H; ``None`` if there is none."""

    @abstractmethod
    def _sweep(self, tx: Tx) -> None:
        """Drop all that the pipeline has staged."""

    @abstractmethod
    def _write_deposit(self, tx: Tx, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`."""

    @abstractmethod
    def _read_deposit(self, tx: Tx, name: str, size: int) -> bytearray:
        """What there is of a deposit of ``size`` bytes."""

    @abstractmethod
    def _drop_deposits(self, tx: Tx, names: Collection[str] | None) -> None:
        """Remove deposits, all when ``None``."""

    def _check_deferred(self, tx: Tx) -> None:
        """Check now what the store would check when it commits: a rehearsal does not come to that."""

    # -- the protocol ------------------------------------------------------------------------------

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`."""
        with self._fenced(epoch, "share") as (tx, _):
            self._write_deposit(tx, name, data)

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.contract.Sink.fetch`."""
        with self._fenced(epoch, "stage") as (tx, _):
            data = self._read_deposit(tx, name, size)
        if len(data) != size:
            raise StagingLost(
                f"a piece of the log of {size} bytes was deposited in the sink {self._place}, {len(data)} are there",
                "Start again: the piece is read anew. The server has perhaps crashed in between.",
            )
        return data

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.contract.CommitRecord.discard`."""
        with suppress(Fenced), self._fenced(epoch, "share") as (tx, _):
            self._drop_deposits(tx, names)

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.contract.Sink.stage`."""
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
        """See :meth:`.contract.Sink.commit`."""
        return self._commit(epoch, start, end, _in_order(pieces), noted)

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """See :meth:`.contract.Rehearsing.rehearse`."""
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
                staged = self._apply(tx, pieces)
                self._advance(tx, end)
                if noted:
                    self._note(tx, noted)
            staged += (each for piece in pieces for each in piece.tables)  # of a unit that is skipped
            failpoint("in-batch-commit")
            self._finish_unit(tx, list(dict.fromkeys(each.relation for each in staged if each.relation is not None)))
        failpoint("after-batch-commit")
        return not skip

    def _apply(self, tx: Tx, pieces: Iterator[StagedPiece]) -> list[Staged]:
        """Apply pieces; return what had been staged for them.

        :raises MissingValues: when all are applied, with the keys of all of them, so that all are read at once.
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
                lacking = tables[staged.label].apply(staged)
                if lacking:
                    missing.setdefault(staged.label, set()).update(lacking)
            failpoint("after-piece-applied")
        if missing:
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items()})
        return all_staged

    def _check_filters(self, tx: Tx, high: LogPosition) -> None:
        """Rows that were read since a piece was staged hold changes that it would take back."""
        label = self._read_beyond(tx, high)
        if label is not None:
            raise read_again_since(label)

    def _check_staged(self, tx: Tx, piece: Sequence[Staged]) -> None:
        """Count before a piece is applied: a crash of the store may have emptied what is not logged."""
        expected: dict[str, tuple[int, str]] = {}
        for staged in piece:
            if staged.relation is not None and staged.share is None:
                expected[staged.relation] = (staged.rows, staged.label)
            elif staged.relation is not None:  # which has a row for each table
                tables = 1 + expected.get(staged.relation, (0, ""))[0]
                expected[staged.relation] = (tables, f"{tables} tables")
        counts = self._staged_counts(tx, list(expected)) if expected else {}
        for relation, (count, what) in expected.items():
            if counts.get(relation, 0) != count:
                raise StagingLost(
                    f"{count} rows were staged for {what}, {counts.get(relation, 0)} are there",
                    "Start again: the unit is staged anew. The server has perhaps crashed in between.",
                )

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.CommitRecord.sweep`."""
        with suppress(Fenced), self._fenced(epoch, "share") as (tx, _):
            self._sweep(tx)


def _in_order(pieces: Sequence[StagedPiece]) -> Iterator[StagedPiece]:
    return iter(sorted(pieces, key=lambda piece: piece.index))
