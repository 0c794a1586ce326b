"""A target table inside a transaction: the steps that bring rows into it, whose statements a store fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import COUNT, MISSING
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ, Mode
from airflow_cdc_provider.engine.sinks.staged import Staged


class TargetTable(ABC):
    """What is done to one target table. No statement here ends the transaction: rows go by DELETE, not by TRUNCATE."""

    mode: Mode

    def apply(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Apply the staged changes of one piece.

        :returns: keys of rows that lack values which neither the stream nor the table has.
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
        # Values that were not sent are those of the rows as they are before anything of this piece is applied.
        lacking = self.fill_missing(staged) if MISSING in staged.columns else ()
        self.apply_mirror(staged)
        return lacking

    def clear(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        """Clear the table of rows that are read again, all when ``None``; a changelog says so by a truncate or deletes.

        :returns: the ``_seq`` in a changelog of the rows that follow.
        """
        if self.mode == "mirror":
            self.delete(keys)
        elif not self.empty():
            return self.log_delete(keys, applied)
        return FIRST_READ

    @abstractmethod
    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        """Delete the rows with the given keys, all rows when ``None``."""

    @abstractmethod
    def fill_missing(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Fill staged values that were not sent from the table's rows under the keys ``o0``, ….

        :returns: keys of rows that the table does not have.
        """

    @abstractmethod
    def apply_mirror(self, staged: Staged) -> None:
        """Free all staged keys, then write the rows that are not ``erased``."""

    def copy(self, batches: Iterator[pa.RecordBatch], applied: LogPosition, seq: int) -> int:
        """Insert rows of the source; in a changelog as events of kind ``r``, at ``applied`` and ``seq``.

        Not asked of a sink that brings all rows aside.

        :param batches: see :meth:`.contract.Sink.write_chunk`.
        :returns: rows written.
        """
        raise NotImplementedError

    def apply_counted(self, staged: Staged) -> None:
        """Add and remove copies of rows; asked only of a sink that takes tables without a key.

        :raises TargetConflict: when there are fewer than are to be removed.
        """
        raise NotImplementedError

    def apply_changelog(self, staged: Staged) -> None:
        """Append the changes; asked only of a sink that keeps changelogs, as what follows."""
        raise NotImplementedError

    def empty(self) -> bool:
        """Whether the table has no rows."""
        raise NotImplementedError

    def log_delete(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        """Say that rows are about to be read again: a truncate, or a delete of each key.

        :returns: the ``_seq`` of the rows that follow. They come after all that was read at the same LSN before.
        """
        raise NotImplementedError

    def members(self, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`; two keys are one if their texts are, unless types say more."""
        return members_by_text(members, keys)


def members_by_text(members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> Sequence[tuple[int, int]]:
    """Tell which keys are which members by their texts."""
    places = {member: place for place, member in enumerate(members)}
    texts = zip(*(column.to_pylist() for column in keys), strict=True)
    return [(n, places[text]) for n, text in enumerate(texts) if text in places]
