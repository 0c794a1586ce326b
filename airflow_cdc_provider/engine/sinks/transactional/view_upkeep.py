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

If the key of a row is the only anchor that it affects, and the view reads all columns of the table, then almost every
row of a unit has another image, and only its key is noted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol

from airflow_cdc_provider.engine.core.errors import ViewRefused
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.views.version import ViewVersion


class Images(ABC):
    """The keys of a table's noted rows, and their images in some columns.

    :ivar read: the columns; none if only the keys are noted.
    """

    read: tuple[str, ...]

    @abstractmethod
    def note_staged(self, staged: Staged) -> None:
        """Note the images of the rows that a piece is about to change, and the keys that it adds."""

    @abstractmethod
    def note_rows(self, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the images of the rows with some keys, or of all rows."""

    @abstractmethod
    def note_new(self, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note which rows have been added since the images were noted; without a key, all rows."""

    @abstractmethod
    def anchors(self, key: Sequence[str]) -> str:
        """Return the query of the noted keys as ``a0`` …, in the order of these columns."""

    @abstractmethod
    def changed(self, read: Sequence[str], name: str) -> str:
        """Create a temporary table of the old and new images of rows that differ in some columns.

        :param read: the columns, which the table has as ``r0`` … in their order.
        :returns: the table, quoted.
        """


class Affected(Protocol):
    """The anchors of a version that a transaction affects, and their rows."""

    @property
    def tables(self) -> Mapping[str, str]:
        """Return by label of a source table the mirror table, quoted."""

    def find(self, queries: Sequence[str]) -> int:
        """Keep the distinct anchors of some queries whose rows are built; return their number."""

    def recompute(self) -> int:
        """Compute the rows of the found anchors, and write the differences; return their number."""

    def queue(self) -> None:
        """Put the found anchors into the version's queue."""


class ViewUpkeep(ABC):
    """The upkeep of a pipeline's views in one transaction.

    :param targets: the recorded targets by label, at least those that views read.
    :param versions: the versions in the record.
    """

    join_operator: ClassVar[str] = "JOIN"
    """The operator of the joins from changed rows to the root."""

    def __init__(self, targets: Mapping[str, Target], versions: Sequence[ViewVersion]) -> None:
        self._targets = targets
        self._versions = [version for version in versions if version.moves]
        self._newest = {version.view.label: version.number for version in versions}
        self._images: dict[str, Images] = {}

    # -- provided by a store -----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, label: str, columns: Sequence[str]) -> Images:
        """Return the images, none so far, of a table's rows in some columns."""

    @abstractmethod
    def _affected(self, version: ViewVersion) -> Affected:
        """Return the work on the affected anchors of a version."""

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
        images = self._images_of(staged.label, changed=not staged.truncate)
        if images is not None and staged.truncate:
            images.note_rows(None)
        if images is not None and staged.relation is not None:
            images.note_staged(staged)

    def note_before_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the rows that are about to be read again, all if ``None``."""
        images = self._images_of(label)
        if images is not None:
            images.note_rows(keys)

    def note_after_reread(self, label: str, keys: Collection[tuple[str, ...]] | None) -> None:
        """Note the rows that have been read."""
        images = self._images_of(label)
        if images is not None:
            images.note_new(keys)

    def _needs_keys(self, version: ViewVersion, label: str) -> bool:
        """Return whether the keys of changed rows of a table are enough for a version.

        They are not if changes wait in the queue, because an equal image would then delay the view for nothing.
        """
        if label != version.view.keyed_root or version.settings.refresh:
            return False
        return {column.name for column in self._targets[label].table.columns} <= set(version.view.columns[label])

    def _images_of(self, label: str, changed: bool = False) -> Images | None:
        """Return the images of a table's rows; ``None`` if no view reads it.

        :param changed: whether almost all rows will be others, unlike those that are read or written again.
        """
        readers = [version for version in self._versions if label in version.view.columns]
        if readers and label not in self._images:
            compared = [each for each in readers if not (changed and self._needs_keys(each, label))]
            columns = {column for each in compared for column in each.view.columns[label]}
            self._images[label] = self._begin(label, sorted(columns))
        return self._images.get(label)

    def settle(self, before: LogPosition) -> None:
        """Bring the views up to what the tables are now; queue what would take too long.

        :param before: the applied LSN before this transaction.
        """
        for version in self._versions:
            labels = self._images.keys() & version.view.columns.keys()
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
        affected = self._affected(version)
        anchors = affected.find(self._ways(version, labels, affected.tables))
        failpoint("after-view-anchors")
        if not anchors:
            return
        behind = version.behind
        if version.settings.refresh or anchors > version.settings.max_rows:
            affected.queue()
            behind = before if behind is None else behind
        elif not affected.recompute():
            return
        failpoint("after-view-settled")
        self._record(version, behind, anchors, time.monotonic() - started)

    def _ways(self, version: ViewVersion, labels: Collection[str], tables: Mapping[str, str]) -> list[str]:
        """Return the queries of the anchors that the noted rows of some tables affect."""
        view, found = version.view, []
        changed = {}
        for n, label in enumerate(sorted(labels)):
            images, columns = self._images[label], view.columns[label]
            if set(columns) <= set(images.read):  # otherwise only keys were noted, or columns for other views
                changed[label] = images.changed(columns, f"cdc_changed_{version.number}_{n}")
            else:
                found.append(images.anchors([each.column for each in view.anchor]))
        return found + view.walks(changed, tables, self.join_operator)
