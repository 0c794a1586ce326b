"""The part of a MySQL sink that keeps views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.reads import MysqlReads
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import code_of
from airflow_cdc_provider.engine.sinks.mysql.view_record import (
    create_views,
    drop_removed,
    has_removed,
    has_views,
    read_versions,
)
from airflow_cdc_provider.engine.sinks.mysql.view_store import MysqlViewStore, analyze
from airflow_cdc_provider.engine.sinks.mysql.view_upkeep import MysqlViewUpkeep
from airflow_cdc_provider.engine.views.version import ViewVersion

_SAME_INDEX = 1061
_DROP_SECONDS = 2.0


@dataclass(frozen=True)
class MysqlViews(MysqlReads):
    """The part of a MySQL sink that keeps views."""

    def _upkeep(self, tx: Session) -> MysqlViewUpkeep | None:
        if not has_views(tx):
            return None
        versions = read_versions(tx, self.pipeline)
        if not any(version.moves for version in versions):
            return None
        labels = {label for version in versions for label in version.view.columns}
        return MysqlViewUpkeep(tx, self.pipeline, self._targets(tx, labels), versions)

    @contextmanager
    def view_store(self, epoch: int) -> Iterator[MysqlViewStore]:
        """Yield the versions of the views; afterwards, drop the tables of those that were removed."""
        with self._fenced(epoch, "unit") as (tx, applied):
            if not has_views(tx):
                with self._alone_again(tx):
                    create_views(tx)
                applied = self._begin(tx, epoch, "unit")
            yield self._view_store(tx, applied)
            removed = has_removed(tx, self.pipeline)
        if removed:
            with suppress(Blocked), self._alone(epoch) as opened:
                opened.limit_waiting(_DROP_SECONDS)
                drop_removed(opened, self.pipeline)

    def _view_store(self, tx: Session, applied: LogPosition, awaits: str = "") -> MysqlViewStore:
        alone = partial(self._alone_again, tx)
        return MysqlViewStore(tx, self.pipeline, self.views, self._targets(tx), applied, alone, awaits)

    @contextmanager
    def _alone_again(self, tx: Session) -> Iterator[None]:
        """Begin another transaction of the same epoch, under the named lock; see :mod:`.view_store`."""
        held = self._lock_epoch(tx, None)
        assert held is not None
        tx.rollback()
        with self._naming_lock(tx):
            self._begin(tx, held[0], "alone")
            yield
            tx.commit()

    def _create_indexes(self, version: ViewVersion) -> None:
        pymysql = driver()
        with self._session() as opened:
            for statement in list(self._view_store(opened, LOG_START).lacking_indexes(version.view)):
                try:
                    opened.run(statement)
                except pymysql.err.OperationalError as e:
                    if code_of(e) != _SAME_INDEX:  # created by an earlier run that was overtaken
                        raise
                failpoint("after-view-index")
            for target in self._targets(opened, version.view.columns).values():
                analyze(opened, quoted(target.schema, target.name))

    def view_versions(self) -> list[ViewVersion]:
        """Return the recorded versions of the views."""
        with self._session() as opened:
            return read_versions(opened, self.pipeline) if has_views(opened) else []
