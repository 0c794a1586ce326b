"""The commit record in a store with transactions, and the epoch that excludes an overtaken run.

The record is the authoritative state of a pipeline, and changes in the same transaction as the data. Every transaction
begins with the fence, which locks the epoch's row. So taking the epoch waits for commits in flight, and an overtaken
writer is refused. Reading the epoch without a lock would not suffice: an old writer could read it, be overtaken, and
commit after the new one.
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
"""Locks on the epoch's row, from weak to strong. ``stage``: staging or fetching a piece. ``share``: a chunk, a deposit,
a sweep, or work alongside the sink. ``unit``: a unit, which excludes these but permits staging of pieces. ``alone``:
taking the epoch, a re-read, or a change of a definition. A store with fewer locks uses a stronger one.
"""


class Transaction(Protocol):
    """A session of the store, which may have an open transaction."""

    def commit(self) -> None:
        """Commit the transaction, if there is one."""

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""


Tx = TypeVar("Tx", bound=Transaction)
T = TypeVar("T")


class TransactionalRecord(ABC, Generic[Tx]):
    """The commit record of a sink with transactions, see :class:`.contract.CommitRecord`."""

    pipeline: str
    mode: Mode

    # -- provided by a store -----------------------------------------------------------------------

    @property
    @abstractmethod
    def _place(self) -> str:
        """Return the location of the store, for messages."""

    @abstractmethod
    def _transaction(self, rehearsal: bool = False) -> AbstractContextManager[Tx]:
        """Open a session; its transaction is committed at the end of the block, or rolled back for a rehearsal."""

    def _asking(self) -> AbstractContextManager[Tx]:
        """Open a session for queries only; some stores prevent writes in it."""
        return self._transaction()

    @abstractmethod
    def _lock_epoch(self, tx: Tx, lock: Lock | None) -> tuple[int, LogPosition] | None:
        """Lock the epoch's row, or only read it.

        :returns: epoch and applied LSN; ``None`` if there is no record.
        """

    @abstractmethod
    def _next_epoch(self, owner: str, at_least: int) -> int:
        """Make ``owner`` the only process that may commit, and return the new epoch."""

    @abstractmethod
    def end_sessions(self) -> None:
        """End open sessions, and wait until none of them can commit."""

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
        """Create commit record and target tables, or accept existing ones.

        The failpoint ``before-plan`` is passed when everything is done but not committed.
        """

    @abstractmethod
    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """Add tables to the commit record; pass ``before-plan`` like :meth:`_prepare`."""

    @abstractmethod
    def _source(self, tx: Tx) -> Mapping[str, Any]:
        """Return the record's ``identity``."""

    @abstractmethod
    def _note(self, tx: Tx, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity``."""

    @abstractmethod
    def _targets(self, tx: Tx, labels: Collection[str] | None = None) -> dict[str, Target]:
        """Return the recorded targets by label: all, or the named ones."""

    @abstractmethod
    def _forget(self, tx: Tx, labels: Sequence[str]) -> None:
        """Remove tables and their chunks from the record."""

    def _end_views(self, tx: Tx, applied: LogPosition, labels: Collection[str]) -> None:
        """Let views over some tables no longer move with the mirror."""

    # -- the protocol ------------------------------------------------------------------------------

    def _fence(self, tx: Tx, epoch: int, lock: Lock | None) -> LogPosition:
        """Refuse to go on if another run has the epoch; with a lock, it stays the same until the transaction ends.

        :returns: the applied LSN.
        """
        found = self._lock_epoch(tx, lock)
        if found is None:
            raise Fenced(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} anymore",
                "If the pipeline was dropped, no action is needed. Otherwise start the pipeline again; it will report"
                " what to do next.",
            )
        current, applied = found
        if current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self._place} is at", current, epoch)
        return applied

    def _begin(self, tx: Tx, epoch: int, lock: Lock) -> LogPosition:
        """Begin a transaction with the fence; a store whose transactions begin with a statement overrides this."""
        return self._fence(tx, epoch, lock)

    @contextmanager
    def _fenced(self, epoch: int, lock: Lock, rehearsal: bool = False) -> Iterator[tuple[Tx, LogPosition]]:
        """Yield a transaction that holds the epoch, and the applied LSN.

        :raises Fenced: when another run has the epoch.
        """
        with self._transaction(rehearsal) as tx:
            yield tx, self._begin(tx, epoch, lock)

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """Keep others from taking the epoch within the block."""
        with self._fenced(epoch, "share"):
            yield

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Make ``owner`` the only process that may commit, and return the new epoch."""
        failpoint("before-epoch")
        epoch = self._run_unblocked(lambda: self._next_epoch(owner, at_least))
        failpoint("after-epoch")
        return epoch

    def _run_unblocked(self, step: Callable[[], T]) -> T:
        """Run a step that may have to wait for an earlier run's sessions; end them if that takes too long."""
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
        """Create commit record and target tables, or accept existing ones."""
        self._run_unblocked(lambda: self._prepare(targets, chunks, identity, start, ours, rehearsal))
        if not rehearsal:
            failpoint("after-plan")

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """Add tables to the commit record, and create or accept their target tables."""
        self._run_unblocked(lambda: self._add(epoch, targets, chunks))
        failpoint("after-plan")

    def record_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity``."""
        with self._fenced(epoch, "alone") as (tx, _):
            self._note(tx, values)

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """Remove tables from the commit record."""
        with self._fenced(epoch, "alone") as (tx, applied):
            self._end_views(tx, applied, labels)
            self._forget(tx, labels)
