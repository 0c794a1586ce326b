"""The definitions of a Delta sink's views, and their changes, which an entry of the log records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, require_apart
from airflow_cdc_provider.engine.sinks.delta.view_check import checked_view, table_exists
from airflow_cdc_provider.engine.sinks.delta.view_record import DeltaView, changed, views_of
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, targets_of
from airflow_cdc_provider.engine.sinks.view_definitions import ViewDefinitions
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion


class DeltaViewDefinitions(ViewDefinitions):
    """The views in the contents of the log, and their changes.

    :param spark: returns a session.
    :param targets: the targets by label; by default the recorded ones.
    """

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        layout: Layout,
        views: Sequence[ViewSettings],
        contents: Contents,
        targets: Mapping[str, Target] | None = None,
    ) -> None:
        super().__init__(views, targets_of(contents) if targets is None else targets)
        self._spark = spark
        self._layout = layout
        self._contents = contents
        self._found = {view.number: view for view in views_of(contents)}

    @property
    def change(self) -> Change:
        """Return the change of the record."""
        return changed(self._contents, self._found.values())

    def versions(self) -> list[ViewVersion]:
        """Return the versions after the change."""
        return [self._found[number].version(self._contents) for number in sorted(self._found)]

    def parse(self, settings: ViewSettings, tables: Mapping[str, Table]) -> View:
        """Parse a view in the dialect of Spark."""
        return parse_view(settings, tables, "spark")

    def checked(self, settings: ViewSettings) -> View:
        """Parse a view, and let Spark analyze it."""
        require_apart(self._layout, list(self.targets.values()), self.views)
        return checked_view(self._spark(), self._layout, settings, self.targets)

    def exists(self, version: ViewVersion) -> bool:
        """Return whether the table of a version's rows exists, or its first build has been begun."""
        return self._found[version.number].reached is None or self._table_exists(version.settings)

    def taken(self, settings: ViewSettings) -> bool:
        """Return whether there is a table with the name of a view, which a first build may just have created."""
        own = [view for view in views_of(self._contents) if view.view.label == settings.label]
        if any(view.next for view in own) and not any(view.reached for view in own):
            return False
        return self._table_exists(settings)

    def _table_exists(self, settings: ViewSettings) -> bool:
        return table_exists(self._spark, self._layout, settings)

    def create_record(self) -> None:
        """Do nothing: the log has any sections."""

    def add(self, settings: ViewSettings, view: View) -> None:
        """Record a version that is to be built."""
        number = max([*self._found, *(view.number for view in views_of(self._contents))], default=0) + 1
        self._found[number] = DeltaView(number, settings, view)

    def resettle(self, version: ViewVersion, settings: ViewSettings) -> None:
        """Record other settings of a version, with the same SELECT."""
        self._found[version.number] = replace(self._found[version.number], settings=settings)

    def end(self, version: ViewVersion) -> None:
        """Let a version no longer move with the mirror; remove it if readers do not see it yet."""
        view = self._found[version.number]
        if view.reached is None and view.next is None:
            del self._found[version.number]
        else:  # a step that was begun may have written the table, with its number
            self._found[version.number] = replace(view, kept=False)
