"""The part of a MySQL sink with which commands show, compare, explain and drop views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_cdc_provider.engine.comparison.compare import PASS_TIMEOUT
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import is_pending
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.view_record import (
    change_version,
    drop_removed,
    end_version,
    has_views,
    read_versions,
    table_names,
)
from airflow_cdc_provider.engine.sinks.mysql.views import MysqlViews
from airflow_cdc_provider.engine.views.explanation import ViewExplanation
from airflow_cdc_provider.engine.views.fan_out import rows_per_change
from airflow_cdc_provider.engine.views.recorded import RecordedViews, compared_version
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

_DROP_SECONDS = 2.0


@dataclass(frozen=True)
class MysqlViewCommands(MysqlViews):
    """The part of a MySQL sink that commands about views use, see :class:`.contract.KeepsViews`."""

    def recorded_views(self) -> RecordedViews | None:
        """Return the views in the commit record, from one snapshot; ``None`` if there are none."""
        with self._session() as opened:
            opened.begin_snapshot()
            versions, found = self._versions(opened), self._lock_epoch(opened, None)
            if not versions or found is None:
                return None
            queued = {
                version.number: int(opened.one(f"SELECT COUNT(*) FROM {quoted('airflow_cdc', version.queue)}")[0])
                for version in versions
                if version.queue and version.behind is not None
            }
            return RecordedViews(found[1], versions, queued)

    def _versions(self, session: Session) -> list[ViewVersion]:
        return read_versions(session, self.pipeline) if has_views(session) else []

    def compare_views(self) -> Iterator[ViewResult]:
        """Compare the rows of each view with its SELECT, in one snapshot each."""
        for label in dict.fromkeys(version.view.label for version in self.view_versions()):
            found: list[ViewResult | None] = []

            def compared(label: str = label, found: list[ViewResult | None] = found) -> bool:
                with self._session() as opened:
                    found.extend(self._compared(opened, label))
                return bool(found)

            if not await_condition(compared, PASS_TIMEOUT):
                raise Blocked(
                    f"view {label} cannot be compared, because its definition is being changed in {self._place}",
                    "Verify again when `airflow-cdc status` shows that it is built.",
                )
            if found[0] is not None:
                yield found[0]

    def _compared(self, opened: Session, label: str) -> list[ViewResult | None]:
        """Compare a view; return nothing if it was exchanged meanwhile."""
        # Late, because tasks on executors compare nothing.
        from airflow_cdc_provider.engine.sinks.mysql.view_comparison import compare_view, lock_tables

        opened.begin_snapshot()
        version = compared_version(self._versions(opened), label)
        if version is None or not version.relation:
            return [None if version is None else ViewResult(label)]
        targets = self._targets(opened)
        lock_tables(opened, targets, version)
        with self._session() as later:
            now = {each.number: each for each in self._versions(later)}.get(version.number)
            same = now is not None and (now.relation, now.kept) == (version.relation, version.kept)
            if not same or is_pending(later, self.pipeline):
                return []
        return [compare_view(opened, targets, version)]

    def explain_view(self, settings: ViewSettings, targets: Sequence[Target]) -> ViewExplanation:
        """Explain the upkeep of a view."""
        # Late, because tasks on executors do not need sqlglot.
        from airflow_cdc_provider.engine.sinks.mysql.view_explanation import IndexStatistics, anchored_select
        from airflow_cdc_provider.engine.views.select_parser import parse_view

        by_label = {target.table.label: target for target in targets}
        view = parse_view(settings, {label: target.table for label, target in by_label.items()}, "mysql")
        select = anchored_select(view, by_label)
        if self.missing([by_label[label] for label in view.columns]):
            return ViewExplanation(view, select, False, dict.fromkeys((alias.name for alias in view.aliases), None))
        with self._session() as opened:
            store = self._view_store(opened, LOG_START)
            store.targets = by_label
            store.checked(settings)
            statistics = {label: IndexStatistics(opened, by_label[label]) for label in view.columns}
            indexes = tuple(store.lacking_indexes(view))
            return ViewExplanation(view, select, True, rows_per_change(view, statistics), indexes)

    def drop_views(self) -> list[str]:
        """Drop the tables and the records of views that the file no longer has; return their labels."""
        kept = {settings.label for settings in self.views}
        with self._alone() as opened:
            opened.limit_waiting(_DROP_SECONDS)
            dropped = [version for version in self._versions(opened) if version.view.label not in kept]
            if not dropped:
                return []
            opened.begin()
            _, applied = self._lock_epoch(opened, "alone") or (0, LOG_START)
            for version in dropped:  # from then on, units do not touch it
                end_version(opened, self.pipeline, version, applied)
            opened.commit()
            for version in dropped:
                # Once the table has the name that follows from its number, it is dropped even after a crash.
                if version.in_place and opened.exists(version.view.schema, version.relation):
                    aside = quoted("airflow_cdc", table_names(self.pipeline, version.number)[0])
                    opened.run(f"RENAME TABLE {quoted(version.view.schema, version.relation)} TO {aside}")
                change_version(opened, self.pipeline, version.number, removed=True)
            drop_removed(opened, self.pipeline)
        return list(dict.fromkeys(version.view.label for version in dropped))

    def drop(self) -> None:
        """Remove the commit record, with that of the views, their queues and unfinished tables; finished ones stay."""
        with self._alone() as opened:
            if has_views(opened):
                opened.run("UPDATE airflow_cdc.views SET removed = TRUE WHERE pipeline = %s", [self.pipeline])
                drop_removed(opened, self.pipeline)
        super().drop()
