"""Builds the views of a Delta sink, and brings them to later moments, step by step, while units are applied."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.errors import StreamFailed, ViewRefused
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.sinks.delta.spark_errors import SPARK_ERRORS, first_line, is_refused_by_table
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout
from airflow_cdc_provider.engine.sinks.delta.table_versions import VersionGone, is_gone
from airflow_cdc_provider.engine.sinks.delta.view_record import DeltaView, is_consistent, views_of
from airflow_cdc_provider.engine.sinks.delta.view_rows import ViewRows
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents, targets_of

log = logging.getLogger(__name__)

LEAST_SECONDS = 2.0
"""Seconds between steps of a view without ``refresh``: a step takes seconds, whatever it changes."""

_MOST_REBUILDS = 3
"""Rebuilds in a row for versions that are gone; then the error is not that."""

_REFUSED = re.compile(r"SQLSTATE: 22")
"""Marks errors in values, such as a division by zero."""


class MovesViews(Protocol):
    """A sink whose views are moved step by step; see :mod:`.delta.views`."""

    @property
    def layout(self) -> Layout:
        """Return the settings of the tables."""

    @property
    def application(self) -> str:
        """Return the name under which tables record the numbers of commits."""

    def spark(self) -> SparkSession:
        """Return a session for views."""

    def recorded(self, epoch: int) -> Contents:
        """Return the contents of the log.

        :raises Fenced: when another run has the epoch.
        """

    def reconcile_views(self, epoch: int) -> None:
        """Make the recorded views those of the file."""

    def pin_view(self, epoch: int, view: DeltaView, rebuild: bool) -> DeltaView | None:
        """Decide to bring a view to the present moment; return ``None`` if it has changed meanwhile.

        :param rebuild: whether all rows are to be computed.
        """

    def record_view(self, epoch: int, view: DeltaView, anchors: int, seconds: float) -> None:
        """Record that a view has reached its next moment."""


class DeltaViewKeeper:
    """Builds and moves the views of a sink; see :class:`.contract.ViewKeeper`.

    :param epoch: the epoch of the run.
    :param now: returns seconds of a monotonic clock.
    """

    def __init__(self, sink: MovesViews, epoch: int, now: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._epoch = epoch
        self._now = now
        self._reconciled = False
        self._moved: dict[int, float] = {}
        self._rebuilds: dict[int, int] = {}
        self._turn = 0

    def reconcile(self) -> None:
        """Make the recorded views those of the file, once."""
        if not self._reconciled:
            self._sink.reconcile_views(self._epoch)
            self._reconciled = True
            failpoint("after-view-reconciled")

    def step(self, everything: bool = False) -> bool:
        """Do the next step; return whether there was one.

        :param everything: move all views, also those that are to be refreshed later.
        """
        self.reconcile()
        self._turn += 1
        contents = self._sink.recorded(self._epoch)
        view = next(self._due(contents, everything), None)
        if view is None:
            return False
        pinned = view if view.next is not None else self._sink.pin_view(self._epoch, view, rebuild=view.reached is None)
        if pinned is not None:
            failpoint("after-view-pinned")
            self._move(pinned)
            self._moved[view.number] = self._now()
        return True

    def reached(self, target: LogPosition) -> bool:
        """Return whether all views are built and have all changes up to a position."""
        if not self._reconciled:
            return False
        contents = self._sink.recorded(self._epoch)
        versions = [view.version(contents) for view in _newest(contents)]
        return all(version.in_place and (version.behind is None or version.behind >= target) for version in versions)

    def _due(self, contents: Contents, everything: bool) -> Iterator[DeltaView]:
        """Yield the views that a step can move, beginning with another one each time."""
        views = _newest(contents)
        place = self._turn % len(views) if views else 0
        for view in views[place:] + views[:place]:
            if view.next is not None:
                yield view
            elif view.reached is None:
                if is_consistent(contents, view.view.columns):
                    yield view
            elif view.moved(contents) and (
                everything or (self._is_due(view) and is_consistent(contents, view.view.columns))
            ):
                yield view

    def _is_due(self, view: DeltaView) -> bool:
        return self._now() >= self._moved.get(view.number, float("-inf")) + (view.settings.refresh or LEAST_SECONDS)

    def _move(self, view: DeltaView) -> None:
        """Bring a view to its next moment, and record that.

        :raises ViewRefused: when its rows cannot be computed or written.
        """
        started = self._now()
        try:
            anchors = self._write(view)
        except (VersionGone, *SPARK_ERRORS) as e:
            self._recover(view, e)
            return
        self._rebuilds.pop(view.number, None)
        failpoint("after-view-written")
        self._sink.record_view(self._epoch, view, anchors, self._now() - started)
        failpoint("after-view-moved")

    def _write(self, view: DeltaView) -> int:
        """Bring the table of a view to its next moment; return the number of affected anchors."""
        assert view.next is not None
        targets = targets_of(self._sink.recorded(self._epoch))
        rows = ViewRows(self._sink.spark(), self._sink.layout, targets, view.view)
        if view.rebuild or view.reached is None:
            rows.build(view.next, self._sink.application)
            return 0
        return rows.move(view.reached, view.next, self._sink.application)

    def _recover(self, view: DeltaView, error: Exception) -> None:
        """Decide to rebuild a view if a version that the step needs is gone; otherwise raise the error by its name.

        The rebuild replaces whatever the step has or has not written.
        """
        rebuilds = self._rebuilds.get(view.number, 0) + 1
        if (isinstance(error, VersionGone) or is_gone(error)) and rebuilds <= _MOST_REBUILDS:
            self._rebuilds[view.number] = rebuilds
            log.warning("view %s is built again: %s", view.view.label, first_line(error))
            self._sink.pin_view(self._epoch, view, rebuild=True)
            return
        if _REFUSED.search(str(error)) or is_refused_by_table(error):
            raise ViewRefused.by(view.view.label, first_line(error)) from error
        raise StreamFailed(
            f"view {view.view.label} could not be brought up to date: {first_line(error)}",
            "Start again: the step is repeated. If the error recurs, check that Spark can read the mirror's tables and"
            " write the view's.",
        ) from error


def _newest(contents: Contents) -> list[DeltaView]:
    """Return the newest version of each view that moves."""
    found = {view.view.label: view for view in views_of(contents)}
    return [view for view in found.values() if view.kept]
