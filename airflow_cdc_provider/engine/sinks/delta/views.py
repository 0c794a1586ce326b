"""The part of a Delta sink that keeps views.

A view follows the mirror: it equals its SELECT at versions of the tables that one entry of the log has left. Each step
is two entries and a commit. The first entry, which checks the epoch, pins the versions; the commit to the view's table
records the number of that moment, so that it takes effect once, also if an overtaken run tries it late; the second
entry says that it has been done. Units are applied meanwhile::

    entry: next = versions of the tables ── one commit of the view, with the number ── entry: reached = next

After a crash between the entries, the same commit is tried again from the same versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable
from airflow_cdc_provider.engine.core.lsn import LogPosition, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.record import DeltaRecord
from airflow_cdc_provider.engine.sinks.delta.spark_errors import examining_tables, session
from airflow_cdc_provider.engine.sinks.delta.table_versions import TableVersions
from airflow_cdc_provider.engine.sinks.delta.table_work import is_made
from airflow_cdc_provider.engine.sinks.delta.view_check import table_exists
from airflow_cdc_provider.engine.sinks.delta.view_record import (
    DeltaView,
    Pin,
    changed,
    next_moment,
    views_of,
)
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, targets_of
from airflow_cdc_provider.engine.views.explanation import ViewExplanation
from airflow_cdc_provider.engine.views.recorded import RecordedViews
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.comparison.view_result import ViewResult
    from airflow_cdc_provider.engine.sinks.delta.view_definitions import DeltaViewDefinitions
    from airflow_cdc_provider.engine.sinks.delta.view_keeper import DeltaViewKeeper


@dataclass(frozen=True)
class DeltaViews(DeltaRecord):
    """The part of a Delta sink that keeps views."""

    def spark(self) -> SparkSession:
        """Return a session for views, in which timestamps are written as UTC."""
        spark = session(dict(self.conf))
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        # Otherwise Delta refuses to read an old version, such as a pinned one of a table that has just changed after a
        # week, although its files exist.
        spark.conf.set("spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration", "false")
        # Sources of MERGE are kept already, see :mod:`.view_rows`.
        spark.conf.set("spark.databricks.delta.merge.materializeSource", "none")
        return spark

    # -- definitions ---------------------------------------------------------------------------------

    def view_definitions(self, contents: Contents, targets: Mapping[str, Target] | None = None) -> DeltaViewDefinitions:
        """Return the definitions of the views in a log with ``contents``.

        :param targets: the targets by label; by default the recorded ones.
        """
        # Imported late, because tasks on executors do not parse views.
        from airflow_cdc_provider.engine.sinks.delta.view_definitions import DeltaViewDefinitions

        return DeltaViewDefinitions(self.spark, self.layout, self.views, contents, targets)

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """Create the commit record, and create or accept targets, after a check of the views."""
        if self.views and self._current() is None:
            self._refuse_others_names()
            self.view_definitions({}, {target.table.label: target for target in targets}).check()
        super().prepare(targets, chunks, identity, start, ours, rehearsal)

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        recorded = targets_of(contents)
        pairs = [(recorded[new.table.label], new) for new in targets if new.table.label in recorded]
        return super()._described(contents, targets, ours) + self._views_following(contents, pairs)

    def _views_following(self, contents: Contents, changes: Sequence[tuple[Target, Target]]) -> Change:
        """Return the change of the views' record when tables change.

        :param changes: pairs of the recorded target and the new one.
        :raises CannotFollow: when a view does not fit the changed tables.
        """
        if not self.views or not views_of(contents):
            return Change()
        after = {**targets_of(contents), **{new.table.label: new for _, new in changes}}
        definitions = self.view_definitions(contents, after)
        for old, new in changes:
            if old.table.to_dict() != new.table.to_dict():
                definitions.follow(old.table, new.table)
        return definitions.change

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """Remove tables from the commit record; views over them no longer move."""

        def decide(contents: Contents) -> Commit:
            definitions = self.view_definitions(contents)
            definitions.end_over(labels)
            return Commit(record_contents.forgotten(contents, labels) + definitions.change)

        if not views_of(self.view_contents()):
            super().forget(epoch, labels)
        elif labels:
            self._append(epoch, "tables forgotten", decide)

    def reconcile_views(self, epoch: int) -> None:
        """Make the recorded views those of the file.

        :raises ConfigError: when a view of the file cannot be maintained.
        :raises Fenced: when another run has the epoch.
        """

        self._refuse_others_names()

        def decide(contents: Contents) -> Commit | None:
            definitions = self.view_definitions(contents)
            definitions.reconcile()
            return Commit(definitions.change) if definitions.change != Change() else None

        self._append(epoch, "views reconciled", decide)

    def _refuse_others_names(self) -> None:
        """Refuse views whose tables, existing or not, belong to other pipelines.

        :raises ForeignTable: naming one.
        """
        others = list(self._others()) if self.views else []
        for settings in self.views:
            for pipeline, contents in others:
                if self._known_as(settings.schema, settings.name) in self._names(contents):
                    raise ForeignTable(
                        f"view {settings.label}: the table of this name belongs to pipeline {pipeline!r}",
                        "Give the view another name. Or, if the other pipeline is not needed anymore, run `airflow-cdc"
                        " drop` with its file, then try again.",
                    )

    # -- steps ---------------------------------------------------------------------------------------

    def keeps_views(self) -> bool:
        """Return whether the file or the record has views."""
        return bool(self.views or self.view_versions())

    def view_keeper(self, epoch: int) -> DeltaViewKeeper:
        """Return the keeper of the views."""
        from airflow_cdc_provider.engine.sinks.delta.view_keeper import DeltaViewKeeper

        return DeltaViewKeeper(self, epoch)

    def recorded(self, epoch: int) -> Contents:
        """Return the contents of the log.

        :raises Fenced: when another run has the epoch.
        """
        return self._contents(epoch)

    def pin_view(self, epoch: int, view: DeltaView, rebuild: bool) -> DeltaView | None:
        """Decide to bring a view to the present moment; return ``None`` if it has changed meanwhile.

        :param rebuild: whether all rows are to be computed.
        :raises TargetConflict: when a table that it reads has been dropped.
        """
        chosen: list[DeltaView] = []

        def decide(contents: Contents) -> Commit | None:
            views = {each.number: each for each in views_of(contents)}
            if views.get(view.number) != view:
                return None
            pinned = replace(view, next=next_moment(view, contents, self._pins(contents, view)), rebuild=rebuild)
            chosen[:] = [pinned]
            return Commit(changed(contents, [*({**views, view.number: pinned}).values()]))

        committed = self._append(epoch, f"view {view.view.label} pinned", decide)
        return chosen[0] if committed is not None else None

    def _pins(self, contents: Contents, view: DeltaView) -> dict[str, Pin | None]:
        """Return the current versions of the tables that a view reads; no step is open."""
        targets, spark = targets_of(contents), self.spark()
        found: dict[str, Pin | None] = {}
        with examining_tables():
            for label in view.view.columns:
                if label not in targets:
                    raise ConfigError(
                        f"view {view.view.label} reads {label}, which is no longer in the pipeline",
                        "Change the `sql` of the view in the pipeline file, or remove it; then start again.",
                    )
                if is_made(contents, label):
                    self._require_there(targets[label])
                there = table_exists(lambda: spark, self.layout, targets[label])
                found[label] = TableVersions(spark, self.layout, targets[label]).current() if there else None
        return found

    def record_view(self, epoch: int, view: DeltaView, anchors: int, seconds: float) -> None:
        """Record that a view has reached its next moment; former versions of it are forgotten."""

        def decide(contents: Contents) -> Commit | None:
            views = {each.number: each for each in views_of(contents)}
            if views.get(view.number) != view:
                return None
            views[view.number] = replace(
                view,
                reached=view.next,
                next=None,
                rebuild=False,
                units=view.units + 1,
                anchors=view.anchors + anchors,
                seconds=view.seconds + seconds,
            )
            left = [v for v in views.values() if v.number >= view.number or v.view.label != view.view.label]
            return Commit(changed(contents, left))

        self._append(epoch, f"view {view.view.label} moved", decide)

    # -- commands ------------------------------------------------------------------------------------

    def view_versions(self) -> list[ViewVersion]:
        """Return the recorded versions of the views."""
        contents = self.view_contents()
        return [view.version(contents) for view in views_of(contents)]

    def recorded_views(self) -> RecordedViews | None:
        """Return the views in the commit record; ``None`` if there are none."""
        contents = self.view_contents()
        versions = [view.version(contents) for view in views_of(contents)]
        return RecordedViews(parse_lsn(contents["head"]["applied"]), versions, {}) if versions else None

    def compare_views(self) -> Iterator[ViewResult]:
        """Compare the rows of each view with its SELECT at the moment that it has reached."""
        from airflow_cdc_provider.engine.sinks.delta.view_comparison import compare_view

        for label in dict.fromkeys(view.view.label for view in views_of(self.view_contents())):
            result = compare_view(self.spark(), self.layout, self.view_contents, self.application, label)
            if result is not None:
                yield result

    def view_contents(self) -> Contents:
        """Return the contents of the log, of any epoch; empty without a record."""
        return self._current() or {}

    def explain_view(self, settings: ViewSettings, targets: Sequence[Target]) -> ViewExplanation:
        """Explain the upkeep of a view."""
        by_label = {target.table.label: target for target in targets}
        view = self.view_definitions({}, by_label).checked(settings)
        tables = {label: self.layout.sql_name(by_label[label]) for label in view.columns}
        root = view.quote(view.root.name)
        pairs = (f"{root}.{view.quote(each.column)} <=> anchors.a{n}" for n, each in enumerate(view.anchor))
        mirrored = all(self._found(by_label[label]) is not None for label in view.columns)
        select = view.select(tables, ("anchors", " AND ".join(pairs)))
        return ViewExplanation(view, select, mirrored, dict.fromkeys((alias.name for alias in view.aliases), None))

    def drop_views(self) -> list[str]:
        """Drop the tables and the records of views that the file no longer has; return their labels."""
        kept = {settings.label for settings in self.views}
        gone = [each for each in views_of(self.view_contents()) if each.view.label not in kept]
        begun = {each.view.label: each.view for each in gone if each.reached or each.next}

        def decide(contents: Contents) -> Commit | None:
            change = changed(contents, [each for each in views_of(contents) if each.view.label in kept])
            return Commit(change) if change != Change() else None

        if gone:
            self.append_without_epoch("views dropped", decide)
        for view in begun.values():  # only now, because a step of a running job would build a dropped table again
            if self.layout.catalog is None:
                self.layout.place(view).remove()
            else:
                self.spark().sql(f"DROP TABLE IF EXISTS {self.layout.sql_name(view)}")
        return list(dict.fromkeys(each.view.label for each in gone))
