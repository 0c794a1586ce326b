"""The commit record in a store with transactions, and the epoch that keeps an overtaken run out.

It is the ground truth of a pipeline, and changes in the same transaction as the data. Every transaction begins with
the fence: it locks the epoch's row, so that taking the epoch waits for commits in flight, and an overtaken writer is
refused. To read the epoch alone would not fence: an old writer could read it, be overtaken, and commit after the new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import Blocked, Fenced
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Mode, Target

Lock: TypeAlias = Literal["stage", "share", "unit", "alone"]
"""Of the epoch's row, from weak to strong. ``stage``: a piece is staged, or fetched. ``share``: a chunk, a deposit, a
sweep, what is done beside the sink. ``unit``: a unit, which keeps these out and lets pieces be staged. ``alone``:
whoever takes the epoch, reads again or changes a definition. A store with fewer takes a stronger one."""


class Transaction(Protocol):
    """A session of the store, in which there may be a transaction."""

    def commit(self) -> None:
        """Commit the transaction, if there is one."""

    def rollback(self) -> None:
        """Take the transaction back, if there is one."""


Tx = TypeVar("Tx", bound=Transaction)
T = TypeVar("T")


class TransactionalRecord(ABC, Generic[Tx]):
    """See :class:`.contract.CommitRecord`."""

    pipeline: str
    mode: Mode

    # -- what a store fills in ---------------------------------------------------------------------

    @property
    @abstractmethod
    def _place(self) -> str:
        """Where the store is, for messages."""

    @abstractmethod
    def _transaction(self, rehearsal: bool = False) -> AbstractContextManager[Tx]:
        """A session; what has been begun in it is committed at the end of the block, or for a rehearsal taken back."""

    def _asking(self) -> AbstractContextManager[Tx]:
        """A session that only asks; a store that can keeps it from writing."""
        return self._transaction()

    @abstractmethod
    def _lock_epoch(self, tx: Tx, lock: Lock | None) -> tuple[int, LogPosition] | None:
        """Lock the epoch's row, or only read it.

        :returns: epoch and applied LSN; ``None`` when there is no record.
        """

    @abstractmethod
    def _next_epoch(self, owner: str, at_least: int) -> int:
        """See :meth:`.contract.CommitRecord.take_epoch`."""

    @abstractmethod
    def end_sessions(self) -> None:
        """See :meth:`.contract.CommitRecord.end_sessions`."""

    @abstractmethod
    def _prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str],
        rehearsal: bool,
    ) -> None:
        """See :meth:`.contract.Sink.prepare`; passes ``before-plan`` when everything is done and not committed."""

    @abstractmethod
    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """See :meth:`.contract.Sink.add`; passes ``before-plan`` like :meth:`_prepare`."""

    @abstractmethod
    def _source(self, tx: Tx) -> Mapping[str, Any]:
        """The record's ``identity``."""

    @abstractmethod
    def _note(self, tx: Tx, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity``."""

    @abstractmethod
    def _targets(self, tx: Tx, labels: Collection[str] | None = None) -> dict[str, Target]:
        """The targets as recorded, by label: all, or those that are named."""

    @abstractmethod
    def _forget(self, tx: Tx, labels: Sequence[str]) -> None:
        """Remove tables and their chunks from the record."""

    # -- the protocol ------------------------------------------------------------------------------

    def _fence(self, tx: Tx, epoch: int, lock: Lock | None) -> LogPosition:
        """Refuse to go on under an epoch that is another's; with a lock nobody takes it until the transaction ends.

        :returns: the applied LSN.
        """
        found = self._lock_epoch(tx, lock)
        if found is None:
            raise Fenced(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} any more",
                "Nothing to do if the pipeline has been dropped; otherwise start it again, and it says what helps.",
            )
        current, applied = found
        if current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self._place} is at", current, epoch)
        return applied

    def _begin(self, tx: Tx, epoch: int, lock: Lock) -> LogPosition:
        """Begin a transaction with the fence; a store begins it here where that takes a statement."""
        return self._fence(tx, epoch, lock)

    @contextmanager
    def _fenced(self, epoch: int, lock: Lock, rehearsal: bool = False) -> Iterator[tuple[Tx, LogPosition]]:
        """A transaction that keeps the epoch, and the applied LSN.

        :raises Fenced: when the epoch is another's.
        """
        with self._transaction(rehearsal) as tx:
            yield tx, self._begin(tx, epoch, lock)

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.contract.CommitRecord.fenced`."""
        with self._fenced(epoch, "share"):
            yield

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.CommitRecord.take_epoch`."""
        failpoint("before-epoch")
        epoch = self._insistently(lambda: self._next_epoch(owner, at_least))
        failpoint("after-epoch")
        return epoch

    def _insistently(self, step: Callable[[], T]) -> T:
        """Take a step that may have to wait for what an earlier run has left; it is ended if it takes too long."""
        try:
            return step()
        except Blocked:
            self.end_sessions()
            return step()

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """See :meth:`.contract.Sink.prepare`."""
        self._insistently(lambda: self._prepare(targets, chunks, identity, start, ours, rehearsal))
        if not rehearsal:
            failpoint("after-plan")

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """See :meth:`.contract.Sink.add`."""
        self._insistently(lambda: self._add(epoch, targets, chunks))
        failpoint("after-plan")

    def note_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """See :meth:`.contract.Sink.note_source`."""
        with self._fenced(epoch, "alone") as (tx, _):
            self._note(tx, values)

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """See :meth:`.contract.Sink.forget`."""
        with self._fenced(epoch, "alone") as (tx, _):
            self._forget(tx, labels)
