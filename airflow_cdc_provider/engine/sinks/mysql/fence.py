"""The epoch of a pipeline on a MySQL server: who may commit, and who may change tables.

Every commit locks the epoch's row, so that taking the epoch waits for commits in flight, and an overtaken writer is
refused. Who does DDL holds a lock by name as well, see :mod:`.pending_ddl`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from airflow_cdc_provider.engine.core.errors import Blocked, Fenced, GateClosed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.mysql import session as sessions
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import is_pending, settle
from airflow_cdc_provider.engine.sinks.mysql.session import Session, session

T = TypeVar("T")


@dataclass(frozen=True)
class MysqlFence:
    """A pipeline's place on a MySQL server, and its epoch.

    :param dsn: see :meth:`.session.Address.parse`.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    :param part: the part of a run whose sessions these are; empty for what is not done by one.
    """

    dsn: str = field(repr=False)
    pipeline: str
    mode: Literal["mirror", "changelog"]
    part: str = ""

    @property
    def _place(self) -> str:
        return Address.parse(self.dsn).place

    @property
    def _mark(self) -> str:
        """Of a fixed length, so that no pipeline's names begin with another's."""
        return hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """A session that :meth:`end_sessions` finds."""
        with session(Address.parse(self.dsn)) as opened:
            opened.register(self.pipeline, self.part)
            yield opened

    @contextmanager
    def _alone(self, epoch: int | None = None, seconds: float | None = None) -> Iterator[Session]:
        """A session that alone may do DDL; the epoch stays what it is meanwhile.

        :raises Fenced: when ``epoch`` is another's.
        """
        with self._session() as opened, self._naming_lock(opened, seconds):
            if epoch is not None:
                self._fence(opened, epoch, "")
            yield opened

    @contextmanager
    def _naming_lock(self, opened: Session, seconds: float | None = None) -> Iterator[None]:
        """Hold the lock by name, with nothing pending."""
        name = f"airflow_cdc_{self._mark}"
        opened.acquire(name, sessions.LOCK_SECONDS if seconds is None else seconds)
        try:
            if opened.exists("airflow_cdc", "pending"):
                settle(opened, self.pipeline, self.mode)
            yield
        finally:
            with suppress(Exception):  # it goes with the session at the latest
                opened.release(name)

    @contextmanager
    def _transaction(self, epoch: int, lock: Literal["share", "update"]) -> Iterator[tuple[Session, int]]:
        """A transaction that holds the epoch's row, and the applied LSN; committed at the end of the block.

        :raises Fenced: when the epoch is another's.
        """
        with self._session() as opened:
            applied = self._begin(opened, epoch, lock)
            yield opened, applied
            opened.commit()

    def _begin(self, opened: Session, epoch: int, lock: Literal["share", "update"]) -> int:
        """Begin such a transaction in a session; whatever is pending is settled before."""
        clause = {"share": "LOCK IN SHARE MODE", "update": "FOR UPDATE"}[lock]
        while True:
            opened.begin()
            applied = self._fence(opened, epoch, clause)
            if not is_pending(opened, self.pipeline):
                return applied
            opened.rollback()
            with self._naming_lock(opened):
                pass

    def _fence(self, opened: Session, epoch: int, clause: str) -> int:
        found = (
            opened.rows(
                f"SELECT epoch, applied_lsn FROM airflow_cdc.pipelines WHERE pipeline = %s {clause}", [self.pipeline]
            )
            if opened.exists("airflow_cdc", "pipelines")
            else []
        )
        if not found:
            raise Fenced(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} any more",
                "Nothing to do if the pipeline has been dropped; otherwise start it again, and it says what helps.",
            )
        ((current, applied),) = found
        if current != epoch:
            raise Fenced.by(f"pipeline {self.pipeline} in {self._place} is at", current, epoch)
        return int(applied)

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.Sink.take_epoch`."""
        failpoint("before-epoch")
        epoch = self._insistently(lambda: self._next_epoch(owner, at_least))
        failpoint("after-epoch")
        return epoch

    def _next_epoch(self, owner: str, at_least: int) -> int:
        with self._alone(seconds=sessions.COMMIT_SECONDS) as opened:
            gone = GateClosed(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} any more",
                "It was dropped, or the sink restored, while the run began. Start it again, and it says what helps.",
            )
            if not opened.exists("airflow_cdc", "pipelines"):
                raise gone
            opened.limit_waiting(sessions.COMMIT_SECONDS)
            opened.begin()
            # By the clock, so that no epoch comes twice, whatever becomes of the record in between.
            opened.run(
                "UPDATE airflow_cdc.pipelines SET owner = %s, epoch = GREATEST(epoch + 1,"
                " FLOOR(UNIX_TIMESTAMP(NOW(6)) * 1000), %s) WHERE pipeline = %s",
                [owner, at_least, self.pipeline],
            )
            found = opened.rows("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
            if not found:
                raise gone
            opened.commit()
            return int(found[0][0])

    def _insistently(self, step: Callable[[], T]) -> T:
        """Take a step that may have to wait for what an earlier run has left; it is ended if it takes too long."""
        try:
            return step()
        except Blocked:
            self.end_sessions()
            return step()

    def end_sessions(self) -> None:
        """See :meth:`.contract.Sink.end_sessions`."""
        with session(Address.parse(self.dsn)) as opened:
            opened.end_others(self.pipeline, self.part)

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.contract.Sink.fenced`."""
        with self._transaction(epoch, "share"):
            yield
