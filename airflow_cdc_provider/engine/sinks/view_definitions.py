"""Makes the recorded views those of the pipeline file, and lets them follow changes of their tables.

A view has *versions*. A new definition is another version, which takes the place of the former one once it is built.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.errors import CannotFollow, ConfigError, ForeignTable, UnknownColumn
from airflow_cdc_provider.engine.core.findings import Caution
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

log = logging.getLogger(__name__)


class ViewDefinitions(ABC):
    """The recorded versions of views, for changes that are recorded in one step.

    :param views: the views of the pipeline file.
    :param targets: the recorded targets by label.
    """

    def __init__(self, views: Sequence[ViewSettings], targets: Mapping[str, Target]) -> None:
        self.views = views
        self.targets = targets

    # -- provided by a store -----------------------------------------------------------------------

    @abstractmethod
    def versions(self) -> list[ViewVersion]:
        """Return the recorded versions in the order of their numbers."""

    @abstractmethod
    def parse(self, settings: ViewSettings, tables: Mapping[str, Table]) -> View:
        """Parse a view in the store's dialect."""

    @abstractmethod
    def checked(self, settings: ViewSettings) -> View:
        """Parse a view, and let the store check it; the targets' tables exist.

        :raises ConfigError: when it cannot be maintained.
        """

    @abstractmethod
    def exists(self, version: ViewVersion) -> bool:
        """Return whether the table of a version's rows exists."""

    @abstractmethod
    def taken(self, settings: ViewSettings) -> bool:
        """Return whether the store has a table with the name of a view."""

    @abstractmethod
    def create_record(self) -> None:
        """Create the record of views, which records of earlier versions of the engine lack."""

    @abstractmethod
    def add(self, settings: ViewSettings, view: View) -> None:
        """Record a version that is to be built."""

    @abstractmethod
    def resettle(self, version: ViewVersion, settings: ViewSettings) -> None:
        """Record other settings of a version, with the same SELECT."""

    @abstractmethod
    def end(self, version: ViewVersion) -> None:
        """Let a version no longer move with the mirror; remove it if readers do not see it yet."""

    # -- definitions -------------------------------------------------------------------------------

    def _by_label(self) -> dict[str, list[ViewVersion]]:
        found: dict[str, list[ViewVersion]] = {}
        for version in self.versions():
            found.setdefault(version.view.label, []).append(version)
        return found

    def check(self) -> None:
        """Check the views of the file; change nothing.

        :raises ConfigError: when one of them cannot be maintained.
        :raises ForeignTable: when the name of one of them is taken.
        """
        recorded = self._by_label()
        for settings in self.views:
            self.checked(settings)
            self.require_free(settings, recorded.get(settings.label, ()))

    @contextmanager
    def excusing(self, settings: ViewSettings) -> Iterator[None]:
        """Excuse a new definition of a view for columns that the tables lack, during a check.

        It may be meant for a change of a table that the stream has yet to follow.

        :raises Caution: in place of the error.
        """
        versions = self._by_label().get(settings.label, [])
        try:
            yield
        except UnknownColumn as e:
            if not versions or not versions[-1].kept:
                raise
            raise Caution(
                f"The new definition of view {settings.label} does not fit the tables as they have been copied so far,"
                f" and waits until it does: {e.message}."
            ) from e

    def require_free(self, settings: ViewSettings, versions: Collection[ViewVersion]) -> None:
        """Refuse a name that a table of others has.

        :param versions: those of the view.
        :raises ForeignTable: when the name is taken.
        """
        if not any(version.in_place for version in versions) and self.taken(settings):
            raise ForeignTable(
                f"view {settings.label}: the sink has a table of this name that is not the pipeline's",
                "Drop or rename the table, or give the view another name.",
            )

    def reconcile(self) -> None:
        """Make the versions those of the file: begin new definitions, and end views that the file no longer has.

        A view whose table has been dropped is built again.

        :raises ConfigError: as :meth:`check`.
        :raises ForeignTable: as :meth:`check`.
        """
        self.create_record()
        recorded = self._by_label()
        for settings in self.views:
            versions = recorded.pop(settings.label, [])
            newest = versions[-1] if versions else None
            if newest is not None and newest.kept and newest.settings.sql == settings.sql:
                if newest.relation and not self.exists(newest):  # someone has dropped its table
                    self._replace(versions, settings, self.checked(settings))
                elif newest.settings != settings:
                    self.resettle(newest, settings)
                continue
            try:
                view = self.checked(settings)
            except UnknownColumn as e:
                if newest is None or not newest.kept:
                    raise
                log.warning("%s; it is tried again when the stream follows a change of that table", e.message)
                continue
            self.require_free(settings, versions)
            self.add(settings, view)
            for version in versions:
                if not version.in_place:
                    self.end(version)
        for versions in recorded.values():
            for version in versions:
                self.end(version)

    def rebuild(self, labels: Collection[str]) -> None:
        """Let the views over some tables be built again; until then they stay as they are."""
        for versions in self._by_label().values():
            if any(each.kept and each.view.columns.keys() & set(labels) for each in versions) and versions[-1].kept:
                self._replace(versions, versions[-1].settings, versions[-1].view)

    def end_over(self, labels: Collection[str]) -> None:
        """Let views over some tables, which leave the pipeline, no longer move with the mirror."""
        for version in self.versions():
            if version.view.columns.keys() & set(labels):
                self.end(version)

    def _replace(self, versions: Sequence[ViewVersion], settings: ViewSettings, view: View) -> None:
        self.add(settings, view)
        for version in versions:
            self.end(version)

    def follow(self, before: Table, after: Table) -> None:
        """Let views follow a change of a table that they read, before it is made.

        A view whose columns keep type and meaning stays. Another one is built again. If it lacks a column, the file may
        already have a definition for the changed table.

        :raises CannotFollow: when a view does not fit the changed table.
        """
        change = redefinition(before, after)
        changed = {column.name for column in (*change.added, *change.retyped)} | {*change.dropped, *change.replaced}
        changed |= {name for pair in change.renamed for name in pair}
        tables = {label: target.table for label, target in self.targets.items()} | {after.label: after}
        wanted = {settings.label: settings for settings in self.views}
        for label, versions in self._by_label().items():
            newest = versions[-1]
            for version in versions[:-1]:
                if changed & (set(version.view.columns.get(before.label, ())) | set(before.key)) or change.key:
                    self.end(version)  # readers see it until its successor is built
            if before.label not in newest.view.columns or not newest.kept:
                continue
            if label not in wanted:
                for version in versions:
                    self.end(version)
                continue
            try:
                view = self.parse(wanted[label], tables)
            except ConfigError as e:
                raise CannotFollow(
                    f"view {label} cannot follow a change of {before.label}: {e.message}",
                    f"Nothing from this change on has been applied. Change the `sql` of {label} in the pipeline file so"
                    " that it fits the changed table, or remove the view from the file; then start again.",
                ) from e
            used = set(newest.view.columns[before.label])
            # Rows are noted by their key, which must not become another one before the end of the transaction.
            if view != newest.view or changed & (used | set(before.key)) or change.key:
                self._replace(versions, wanted[label], view)
