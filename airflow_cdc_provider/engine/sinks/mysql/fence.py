"""The epoch of a pipeline on a MySQL server: controls which process may commit or change tables.

A process that runs DDL also holds a named lock, see :mod:`.pending_ddl`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.sinks.mysql import session as sessions
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import finish_announced, is_pending
from airflow_cdc_provider.engine.sinks.mysql.session import Session, session
from airflow_cdc_provider.engine.sinks.transactional.record import Lock
from airflow_cdc_provider.engine.sinks.transactional.view_store import ViewStore
from airflow_cdc_provider.engine.sinks.transactional.views import TransactionalViews
from airflow_cdc_provider.engine.views.settings import ViewSettings


@dataclass(frozen=True)
class MysqlFence(TransactionalViews[Session]):
    """A pipeline on a MySQL server, and its epoch.

    :param dsn: see :meth:`.session.Address.parse`.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    :param part: the part of a run that uses the sessions; empty outside of runs.
    :param views: the views of the pipeline file.
    """

    dsn: str = field(repr=False)
    pipeline: str
    mode: Literal["mirror", "changelog"]
    part: str = ""
    views: tuple[ViewSettings, ...] = ()

    @abstractmethod
    def _view_store(self, tx: Session, applied: LogPosition, awaits: str = "") -> ViewStore:
        """Return the versions of the views, see :meth:`.TransactionalViews._view_store`.

        :param awaits: token of an announced alteration; changes of versions wait until it is made.
        """

    @property
    def _place(self) -> str:
        return Address.parse(self.dsn).place

    @property
    def _mark(self) -> str:
        """Return a mark of fixed length, so that no pipeline's names are a prefix of another's."""
        return hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """Open a session that :meth:`end_sessions` can find."""
        with session(Address.parse(self.dsn)) as opened:
            opened.register(self.pipeline, self.part)
            yield opened

    @contextmanager
    def _alone(self, epoch: int | None = None, seconds: float | None = None) -> Iterator[Session]:
        """Open a session that has the exclusive right to DDL; the epoch does not change meanwhile.

        :raises Fenced: when ``epoch`` belongs to another run.
        """
        with self._session() as opened, self._naming_lock(opened, seconds):
            if epoch is not None:
                self._fence(opened, epoch, None)
            yield opened

    @contextmanager
    def _naming_lock(self, opened: Session, seconds: float | None = None) -> Iterator[None]:
        """Hold the named lock, after settling pending changes."""
        name = f"airflow_cdc_{self._mark}"
        opened.acquire(name, sessions.LOCK_SECONDS if seconds is None else seconds)
        try:
            if opened.exists("airflow_cdc", "pending"):
                finish_announced(opened, self.pipeline, self.mode)
            yield
        finally:
            with suppress(Exception):  # the lock ends with the session at the latest
                opened.release(name)

    @contextmanager
    def _transaction(self, rehearsal: bool = False) -> Iterator[Session]:
        with self._session() as opened:
            yield opened
            if rehearsal:
                opened.rollback()
            else:
                opened.commit()

    def _begin(self, tx: Session, epoch: int, lock: Lock) -> LogPosition:
        """Begin a transaction, see :meth:`.TransactionalRecord._begin`; pending changes are settled first."""
        while True:
            tx.begin()
            applied = self._fence(tx, epoch, lock)
            if not is_pending(tx, self.pipeline):
                return applied
            tx.rollback()
            with self._naming_lock(tx):
                pass

    def _lock_epoch(self, tx: Session, lock: Lock | None) -> tuple[int, LogPosition] | None:
        if not tx.exists("airflow_cdc", "pipelines"):
            return None
        clause = {None: "", "stage": "LOCK IN SHARE MODE", "share": "LOCK IN SHARE MODE"}.get(lock, "FOR UPDATE")
        query = f"SELECT epoch, applied_lsn FROM airflow_cdc.pipelines WHERE pipeline = %s {clause}"
        for epoch, applied in tx.rows(query, [self.pipeline]):
            return int(epoch), LogPosition(int(applied))
        return None

    def _next_epoch(self, owner: str, at_least: int) -> int:
        with self._alone(seconds=sessions.COMMIT_SECONDS) as opened:
            gone = GateClosed(
                f"the sink {self._place} has no commit record of pipeline {self.pipeline} anymore",
                "It was dropped, or the sink was restored, while the run began. Start the pipeline again; it will"
                " report what to do next.",
            )
            if not opened.exists("airflow_cdc", "pipelines"):
                raise gone
            opened.limit_waiting(sessions.COMMIT_SECONDS)
            opened.begin()
            # Taken from the clock, so that no epoch repeats even if the record is replaced in between.
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

    def end_sessions(self) -> None:
        """End open sessions of the part, or of the whole pipeline."""
        with session(Address.parse(self.dsn)) as opened:
            opened.end_others(self.pipeline, self.part)
