"""A target table inside a transaction: the steps that write rows to it, with statements that a store provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import COUNT, MISSING
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ, Mode
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.sinks.staged import Staged


class TargetTable(ABC):
    """The work on one target table. No statement here ends the transaction: rows are removed by DELETE, not by
    TRUNCATE.
    """

    mode: Mode

    def apply(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Apply the staged changes of one piece.

        :returns: keys of rows that lack values, which are neither in the stream nor in the table.
        """
        if self.mode == "changelog":
            if staged.relation is not None:
                self.apply_changelog(staged)
            return ()
        if staged.truncate:
            self.delete(None)
        if staged.relation is None:
            return ()
        if COUNT in staged.columns:
            self.apply_counted(staged)
            return ()
        # Values that were not sent come from the rows before anything of this piece is applied.
        lacking = self.fill_missing(staged) if MISSING in staged.columns else ()
        self.apply_mirror(staged)
        return lacking

    def clear(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        """Remove rows that are read again, all if ``None``; a changelog gets a truncate or deletes instead.

        :returns: the ``_seq`` in a changelog of the rows that follow.
        """
        if self.mode == "mirror":
            self.delete(keys)
        elif not self.empty():
            return self.log_delete(keys, applied)
        return FIRST_READ

    @abstractmethod
    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        """Delete the rows with the given keys, all rows if ``None``."""

    @abstractmethod
    def fill_missing(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Fill staged values that were not sent from the table's rows under the keys ``o0``, ….

        :returns: keys of rows that the table does not have.
        """

    @abstractmethod
    def apply_mirror(self, staged: Staged) -> None:
        """Free all staged keys, then write the rows that are not ``erased``."""

    def copy(self, rows: SourceRows, applied: LogPosition, seq: int) -> int:
        """Insert rows of the source; in a changelog as events of kind ``r``, at ``applied`` and ``seq``.

        Not called for a sink that writes all rows aside.

        :returns: number of written rows.
        """
        raise NotImplementedError

    def apply_counted(self, staged: Staged) -> None:
        """Add and remove copies of rows; called only for a sink that accepts tables without a key.

        :raises TargetConflict: when there are fewer copies than are to be removed.
        """
        raise NotImplementedError

    def apply_changelog(self, staged: Staged) -> None:
        """Append the changes; like the following methods, called only for a sink that keeps changelogs."""
        raise NotImplementedError

    def empty(self) -> bool:
        """Return whether the table has no rows."""
        raise NotImplementedError

    def log_delete(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        """Append the events that announce a re-read: a truncate, or a delete of each key.

        :returns: the ``_seq`` of the rows that follow, after all earlier reads at the same LSN.
        """
        raise NotImplementedError

    def members(self, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> Sequence[tuple[int, int]]:
        """Match keys against the keys of re-reads; keys are equal if their texts are, unless types require more."""
        return members_by_text(members, keys)


def members_by_text(members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> Sequence[tuple[int, int]]:
    """Match keys against the keys of re-reads by their texts."""
    places = {member: place for place, member in enumerate(members)}
    texts = zip(*(column.to_pylist() for column in keys), strict=True)
    return [(n, places[text]) for n, text in enumerate(texts) if text in places]
