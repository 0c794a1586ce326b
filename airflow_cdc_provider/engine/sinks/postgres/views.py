"""The part of a Postgres sink that keeps views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psycopg2 import sql

from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, describe, named, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.reads import PostgresReads
from airflow_cdc_provider.engine.sinks.postgres.refused_values import of_sink
from airflow_cdc_provider.engine.sinks.postgres.view_record import has_views, read_versions, remove_version
from airflow_cdc_provider.engine.sinks.postgres.view_store import PostgresViewStore
from airflow_cdc_provider.engine.sinks.postgres.view_upkeep import SETTINGS, PostgresViewUpkeep
from airflow_cdc_provider.engine.views.explanation import ViewExplanation
from airflow_cdc_provider.engine.views.fan_out import rows_per_change
from airflow_cdc_provider.engine.views.recorded import RecordedViews
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion


@dataclass(frozen=True)
class PostgresViews(PostgresReads):
    """The part of a Postgres sink that keeps views."""

    def _upkeep(self, tx: Connection) -> PostgresViewUpkeep | None:
        if not has_views(tx):
            return None
        versions = read_versions(tx, self.pipeline)
        if not any(version.moves for version in versions):
            return None
        rows(tx, SETTINGS)
        labels = {label for version in versions for label in version.view.columns}
        return PostgresViewUpkeep(tx, self.pipeline, self._targets(tx, labels), versions)

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

    # -- commands ----------------------------------------------------------------------------------

    def recorded_views(self) -> RecordedViews | None:
        """Return the views in the commit record, from one snapshot; ``None`` if there are none."""
        with self._asked() as connection:
            if not has_views(connection):
                return None
            rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            versions = read_versions(connection, self.pipeline)
            found = self._lock_epoch(connection, None)
            if not versions or found is None:
                return None
            queued = {
                version.number: int(scalar(connection, sql.SQL("SELECT count(*) FROM {}").format(_queue_of(version))))
                for version in versions
                if version.queue and version.behind is not None
            }
            return RecordedViews(found[1], versions, queued)

    def compare_views(self) -> Iterator[ViewResult]:
        """Compare the rows of each view with its SELECT, in one snapshot each."""
        # Imported late, because tasks on executors do not compare views.
        from airflow_cdc_provider.engine.sinks.postgres.view_comparison import compare_view

        for label in dict.fromkeys(version.view.label for version in self.view_versions()):
            with self._asked() as connection:
                result = compare_view(connection, self.pipeline, self._targets(connection), label)
            if result is not None:
                yield result

    def explain_view(self, settings: ViewSettings, targets: Sequence[Target]) -> ViewExplanation:
        """Explain the upkeep of a view."""
        from airflow_cdc_provider.engine.sinks.postgres.view_explanation import ColumnStatistics, anchored_select
        from airflow_cdc_provider.engine.views.select_parser import parse_view  # late, as above

        by_label = {target.table.label: target for target in targets}
        view = parse_view(settings, {label: target.table for label, target in by_label.items()}, "postgres")
        select = anchored_select(view, by_label)
        used = [by_label[label] for label in view.columns]
        if self.missing(used):
            return ViewExplanation(view, select, False, dict.fromkeys((alias.name for alias in view.aliases), None))
        with self._transaction(rehearsal=True) as tx:
            store = PostgresViewStore(tx, self.pipeline, self.views, by_label, LOG_START)
            store.checked(settings)
            indexes = tuple(create for _, create in store.lacking_indexes(view))
            statistics = {target.table.label: ColumnStatistics(tx, target) for target in used}
            return ViewExplanation(view, select, True, rows_per_change(view, statistics), indexes)

    def drop_views(self) -> list[str]:
        """Drop the tables and the records of views that the file no longer has; return their labels."""
        kept = {settings.label for settings in self.views}
        dropped: dict[str, None] = {}
        with self._transaction() as tx:
            if not has_views(tx) or self._lock_epoch(tx, "alone") is None:
                return []
            rows(tx, "SET LOCAL lock_timeout = '2s'")  # units wait meanwhile
            for version in read_versions(tx, self.pipeline):
                if version.view.label not in kept:
                    remove_version(tx, self.pipeline, version)
                    if version.in_place:
                        table = sql.Identifier(version.view.schema, version.relation)
                        rows(tx, sql.SQL("DROP TABLE IF EXISTS {}").format(table))
                    dropped[version.view.label] = None
        return list(dropped)

    def drop(self) -> None:
        """Remove the commit record, with that of the views, their queues and unfinished tables; finished ones stay."""
        with self._transaction() as tx:
            for version in read_versions(tx, self.pipeline) if has_views(tx) else ():
                remove_version(tx, self.pipeline, version)
        super().drop()


def _queue_of(version: ViewVersion) -> sql.Composable:
    return sql.Identifier("airflow_cdc", version.queue)
