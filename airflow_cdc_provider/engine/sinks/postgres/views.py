"""The part of a Postgres sink that keeps views."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, describe, named, rows
from airflow_cdc_provider.engine.sinks.postgres.reads import PostgresReads
from airflow_cdc_provider.engine.sinks.postgres.refused_values import of_sink
from airflow_cdc_provider.engine.sinks.postgres.view_record import has_views, read_versions
from airflow_cdc_provider.engine.sinks.postgres.view_store import PostgresViewStore
from airflow_cdc_provider.engine.sinks.postgres.view_upkeep import PostgresViewUpkeep
from airflow_cdc_provider.engine.sinks.transactional.view_upkeep import ViewUpkeep
from airflow_cdc_provider.engine.views.version import ViewVersion


@dataclass(frozen=True)
class PostgresViews(PostgresReads):
    """The part of a Postgres sink that keeps views."""

    def _upkeep(self, tx: Connection) -> ViewUpkeep | None:
        if not self.views or not has_views(tx):
            return None
        return PostgresViewUpkeep(tx, self.pipeline, self._targets(tx), read_versions(tx, self.pipeline))

    def _view_store(self, tx: Connection, applied: LogPosition) -> PostgresViewStore:
        return PostgresViewStore(tx, self.pipeline, self.views, self._targets(tx), applied)

    def _create_indexes(self, version: ViewVersion) -> None:
        name, place = self._application, describe(self.dsn)
        with (
            connected(named(self.dsn, name), name, settings={"lock_timeout": "0"}, writes=True) as connection,
            of_sink(connection, place),
        ):
            store = PostgresViewStore(connection, self.pipeline, self.views, self._targets(connection), LOG_START)
            for drop, create in store.lacking_indexes(version.view):
                rows(connection, drop)
                rows(connection, create)
                failpoint("after-view-index")

    def view_versions(self) -> list[ViewVersion]:
        """Return the recorded versions of the views."""
        with self._asked() as connection:
            return read_versions(connection, self.pipeline) if has_views(connection) else []
