"""Keeps views equal to their SELECTs within a transaction that changes their tables.

The mirror is the only state. Before rows change, their *images* are noted: the columns that views read, as they are in
the mirror. At the end of the transaction the rows whose images differ are known. Each of them reaches anchors over the
joins, from its old and from its new image, through the tables as they are now. The rows of these anchors are computed
again, and the differences are written::

    old images ── apply the unit ── rows whose images differ ── affected anchors ─┬─ recompute, write the differences
                                                                                  └─ too many: queue them

The tables after the change suffice. Suppose that the rows of an anchor differ before and after. Then some combination
of joined rows, with NULLs where an outer join finds none, exists in only one of the two states. If none of its rows has
changed, an outer join finds a row in the other state that it did not find in this one, and that row has changed; take
the combination with it instead. So a combination has changed rows; take one with no other changed row on its way to the
root. All rows on the way are the same in both states, so the way leads through the tables as they are now, and begins
at the old or the new image of the changed row. WHERE and other conditions are ignored on the way: more anchors than
needed do no harm, since they are recomputed to what they are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from airflow_cdc_provider.engine.core.errors import ViewRefused
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.views.version import ViewVersion


class ViewUpkeep(ABC):
    """The upkeep of a pipeline's views in one transaction.

    :param versions: the versions in the record.
    """

    def __init__(self, versions: Sequence[ViewVersion]) -> None:
        self._versions = [version for version in versions if version.moves]
        self._newest = {version.view.label: version.number for version in versions}
        read: dict[str, set[str]] = {}
        for version in self._versions:
            for label, columns in version.view.columns.items():
                read.setdefault(label, set()).update(columns)
        self._read = {label: tuple(sorted(columns)) for label, columns in read.items()}
        self._noted: set[str] = set()

    # -- provided by a store -----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, label: str, columns: Sequence[str]) -> None:
        """Create a temporary table for images of a table's rows."""

    @abstractmethod
    def _note_staged(self, staged: Staged) -> None:
        """Note the images of the rows that a piece is about to change, and the keys that it adds."""

    @abstractmethod
    def _note_rows(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the images of the rows with some keys, or of all rows."""

    @abstractmethod
    def _note_new(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note which rows have been added since the images were noted."""

    @abstractmethod
    def _find_anchors(self, version: ViewVersion, labels: Collection[str]) -> int:
        """Find the affected anchors whose rows are built; return their number."""

    @abstractmethod
    def _recompute(self, version: ViewVersion) -> None:
        """Compute the rows of the found anchors, and write the differences."""

    @abstractmethod
    def _queue(self, version: ViewVersion) -> None:
        """Put the found anchors into the version's queue."""

    @abstractmethod
    def _execute(self, statement: str) -> None:
        """Execute a statement of the SQL standard."""

    @abstractmethod
    def _end(self, version: ViewVersion, before: LogPosition) -> None:
        """Let a version no longer move with the mirror.

        :param before: the position up to which it has all changes.
        """

    @abstractmethod
    def _record(self, version: ViewVersion, behind: LogPosition | None, anchors: int, seconds: float) -> None:
        """Record what was done for a version in this transaction."""

    # -- the steps ---------------------------------------------------------------------------------

    def note(self, staged: Staged) -> None:
        """Note the rows that a piece is about to change."""
        if self._watches(staged.label):
            if staged.truncate:
                self._note_rows(staged.label, None)
            if staged.relation is not None:
                self._note_staged(staged)

    def note_before_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the rows that are about to be read again, all if ``None``."""
        if self._watches(label):
            self._note_rows(label, keys)

    def note_after_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the rows that have been read."""
        if self._watches(label):
            self._note_new(label, keys)

    def _watches(self, label: str) -> bool:
        """Return whether a view reads a table, and prepare to note its rows."""
        columns = self._read.get(label)
        if columns is None:
            return False
        if label not in self._noted:
            self._begin(label, columns)
            self._noted.add(label)
        return True

    def settle(self, before: LogPosition) -> None:
        """Bring the views up to what the tables are now; queue what would take too long.

        :param before: the applied LSN before this transaction.
        """
        for version in self._versions:
            labels = self._noted & version.view.columns.keys()
            if labels and version.number == self._newest[version.view.label]:
                self._settle(version, labels, before)
            elif labels:
                self._settle_or_end(version, labels, before)

    def _settle_or_end(self, version: ViewVersion, labels: Collection[str], before: LogPosition) -> None:
        """Bring a version up to date whose successor is being built, or end it if it cannot be computed.

        Otherwise a definition that cannot be computed could not be replaced by one that can.
        """
        self._execute("SAVEPOINT cdc_view")
        try:
            self._settle(version, labels, before)
        except ViewRefused:
            self._execute("ROLLBACK TO SAVEPOINT cdc_view")
            self._end(version, before)

    def _settle(self, version: ViewVersion, labels: Collection[str], before: LogPosition) -> None:
        started = time.monotonic()
        anchors = self._find_anchors(version, labels)
        failpoint("after-view-anchors")
        if not anchors:
            return
        behind = version.behind
        if version.settings.refresh or anchors > version.settings.max_rows:
            self._queue(version)
            behind = before if behind is None else behind
        else:
            self._recompute(version)
        failpoint("after-view-settled")
        self._record(version, behind, anchors, time.monotonic() - started)
