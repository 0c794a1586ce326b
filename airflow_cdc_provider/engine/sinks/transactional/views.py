"""The part of a sink with transactions that keeps views, and the keeper that builds and drains them between units."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.transactional.reads import TransactionalSink
from airflow_cdc_provider.engine.sinks.transactional.record import Tx
from airflow_cdc_provider.engine.sinks.transactional.view_store import TooSlow, ViewStore
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

log = logging.getLogger(__name__)
Step: TypeAlias = Callable[[ViewStore, ViewVersion], None]

FIRST_PORTION = 10_000
"""Root rows of the first range of a build, and anchors of the first portion of a queue."""
MOST_SECONDS = 1.0
"""Seconds that a step should take at most, because a unit may wait for it."""
LEAST_PORTION = 1
"""The smallest portion, which may take as long as it needs."""
_INDEX_SECONDS = 1.0
RETRY_SECONDS = 10.0
"""Seconds until another attempt to change a view that others have locked."""


class TransactionalViews(TransactionalSink[Tx]):
    """The part of a sink with transactions that keeps views.

    :ivar views: the views of the pipeline file.
    """

    views: tuple[ViewSettings, ...]

    @abstractmethod
    def _view_store(self, tx: Tx, applied: LogPosition) -> ViewStore:
        """Return the versions of the views, in a transaction that holds the epoch."""

    @abstractmethod
    def _create_indexes(self, version: ViewVersion) -> None:
        """Create the indexes that a view's upkeep needs and that do not exist."""

    def keeps_views(self) -> bool:
        """Return whether the file or the record has views."""
        return bool(self.views or self.view_versions())

    @abstractmethod
    def view_versions(self) -> Sequence[ViewVersion]:
        """Return the recorded versions of the views."""

    def view_keeper(self, epoch: int) -> ViewKeeper:
        """Return the keeper of the views."""
        return ViewKeeper(self, epoch)

    @contextmanager
    def view_store(self, epoch: int) -> Iterator[ViewStore]:
        """Yield the versions of the views, for a step of the keeper.

        :raises Fenced: when another run has the epoch.
        """
        with self._fenced(epoch, "unit") as (tx, applied):
            yield self._view_store(tx, applied)

    def create_view_indexes(self, version: ViewVersion) -> None:
        """Create missing indexes for a version, unless the file asks to print them only."""
        if version.settings.indexes == "create":
            self._create_indexes(version)

    def _end_views(self, tx: Tx, applied: LogPosition, labels: Collection[str]) -> None:
        self._view_store(tx, applied).end_over(labels)

    def _redefine_views(self, tx: Tx, applied: LogPosition, before: Target, after: Target) -> None:
        """Let the views follow a change of a table."""
        if before.table.to_dict() != after.table.to_dict():
            self._view_store(tx, applied).follow(before.table, after.table)


class _Indexing(threading.Thread):
    """Creates the missing indexes of a view.

    :ivar error: the error that has ended it.
    :ivar reported: whether the log says that it takes long.
    """

    def __init__(self, sink: TransactionalViews[Any], version: ViewVersion) -> None:
        super().__init__(name="view indexes", daemon=True)
        self._sink = sink
        self._version = version
        self.error: Exception | None = None
        self.reported = False

    def run(self) -> None:
        try:
            self._sink.create_view_indexes(self._version)
        except Exception as e:  # raised by the keeper
            self.error = e


class ViewKeeper:
    """Builds and drains the views of a sink, step by step, between units.

    :param epoch: the epoch of the run.
    :param now: returns seconds of a monotonic clock.
    """

    def __init__(self, sink: TransactionalViews[Any], epoch: int, now: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._epoch = epoch
        self._now = now
        self._reconciled = False
        self._portions: dict[int, int] = {}
        self._refreshed: dict[int, float] = {}
        self._blocked_until: dict[int, float] = {}
        self._indexed: set[int] = set()
        self._drained: set[int] = set()
        self._indexing: dict[int, _Indexing] = {}
        self._turn = 0

    def reconcile(self) -> None:
        """Make the recorded views those of the file, once.

        :raises ConfigError: when a view of the file cannot be maintained.
        """
        if not self._reconciled:
            with self._sink.view_store(self._epoch) as store:
                store.reconcile()
            self._reconciled = True
            failpoint("after-view-reconciled")

    def step(self, everything: bool = False) -> bool:
        """Do the next step; return whether there was one.

        :param everything: drain all queues, also those that are to be refreshed later.
        :raises Fenced: when another run has the epoch.
        :raises ConfigError: when a view of the file cannot be maintained.
        """
        self.reconcile()
        self._turn += 1
        # Most of the time there is nothing to do, so the epoch, for which units wait, is not locked to find that out.
        if not any(self._is_wanted(version, everything) for version in self._sink.view_versions()):
            return False
        chosen: tuple[ViewVersion, Step] | None = None
        try:
            with self._sink.view_store(self._epoch) as store:
                chosen = next(self._steps(store, everything), None)
                if chosen is None:
                    return False
                version, step = chosen
                if step != self._index:
                    step(store, version)
            if step == self._index:  # outside of the transaction
                step(store, version)
        except TooSlow:
            return True
        except Blocked as e:
            if chosen is not None:  # otherwise a long unit has the epoch
                log.warning("view %s has to wait: %s", chosen[0].view.label, e.message)
                self._blocked_until[chosen[0].number] = self._now() + RETRY_SECONDS
            return False
        return True

    def reached(self, target: LogPosition) -> bool:
        """Return whether all views are built and have all changes up to a position."""
        if not self._reconciled:
            return False
        kept = [version for version in self._sink.view_versions() if version.kept]
        return all(version.in_place and (version.behind is None or version.behind >= target) for version in kept)

    def _steps(self, store: ViewStore, everything: bool) -> Iterator[tuple[ViewVersion, Step]]:
        """Yield the steps that can be done, beginning with another version each time."""
        versions = [version for version in store.versions() if version.kept]
        consistent = all(version.complete for version in versions) or store.is_consistent()
        place = self._turn % len(versions) if versions else 0
        for version in versions[place:] + versions[:place]:
            if not self._is_wanted(version, everything):
                continue
            # Drained once before it is exchanged, so that readers do not see older rows than before.
            late = version.behind is not None and version.number not in self._drained
            if version.in_place or (version.complete and late):
                yield version, self._drain
            elif version.complete:
                yield version, self._exchange
            elif consistent and not version.relation:
                yield version, self._begin
            elif consistent:
                yield version, self._build if version.number in self._indexed else self._index

    def _is_wanted(self, version: ViewVersion, everything: bool) -> bool:
        """Return whether a version has a next step now, if the mirror is consistent."""
        if not version.kept or self._now() < self._blocked_until.get(version.number, 0.0):
            return False
        if version.number in self._indexing and self._indexing[version.number].is_alive():
            return False
        due = self._refreshed.get(version.number, 0.0) + (version.settings.refresh or 0.0)
        return not version.in_place or (version.behind is not None and (everything or self._now() >= due))

    def _begin(self, store: ViewStore, version: ViewVersion) -> None:
        store.begin(version)

    def _index(self, store: ViewStore, version: ViewVersion) -> None:
        """Create missing indexes in a thread, because that may wait for readers, and other views must not."""
        work = self._indexing.get(version.number)
        if work is None:
            log.info("creating missing indexes for view %s", version.view.label)
            work = self._indexing[version.number] = _Indexing(self._sink, version)
            work.start()
        work.join(_INDEX_SECONDS)
        if not work.is_alive():
            del self._indexing[version.number]
            if work.error is not None:
                raise work.error
            self._indexed.add(version.number)
        elif not work.reported:
            work.reported = True
            log.warning("view %s waits for its indexes, which wait for transactions to end", version.view.label)

    def _build(self, store: ViewStore, version: ViewVersion) -> None:
        with self._timed(version) as count:
            store.build(version, count)

    def _exchange(self, store: ViewStore, version: ViewVersion) -> None:
        store.exchange(version)

    def _drain(self, store: ViewStore, version: ViewVersion) -> None:
        with self._timed(version) as count:
            if not store.drain(version, count):
                self._refreshed[version.number] = self._now()
                self._drained.add(version.number)

    @contextmanager
    def _timed(self, version: ViewVersion) -> Iterator[int]:
        """Yield the size of the next portion, and adapt it to the time that the block takes."""
        count = self._portions.get(version.number, FIRST_PORTION)
        started = self._now()
        try:
            yield count
        except TooSlow:
            self._portions[version.number] = max(count // 10, LEAST_PORTION)
            raise
        taken = self._now() - started
        if taken > MOST_SECONDS:
            count = max(count // 2, LEAST_PORTION)
        elif taken < MOST_SECONDS / 3:
            count *= 2
        self._portions[version.number] = count
