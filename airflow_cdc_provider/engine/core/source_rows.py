"""The rows of a chunk or of a re-read, on their way from the source to a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.record import Watermark


class SourceRows(ABC):
    """The rows of one read, which are read at the source while the sink takes them.

    A sink takes them once and to the end, either with :meth:`batches` or, if :attr:`can_copy` is true, with
    :meth:`copy_data`. Then it calls :meth:`finish` once, and commits the rows with the watermark that this returns.

    :ivar can_copy: whether the rows are also available as Postgres's COPY writes them.
    """

    can_copy: bool = False

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as text, with the columns in the order of ``target.table.columns``; names mean nothing."""

    def copy_data(self, constants: Sequence[tuple[str, str]], binary: bool) -> Iterator[bytes]:
        """Yield the rows as the source's COPY writes them, some bytes at a time.

        :param constants: text and SQL type of each further column, whose value is the same in all rows.
        :param binary: whether COPY writes its binary format; else it writes text.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> Watermark:
        """Complete the read at the source and return its watermark."""

    def changed(self, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> SourceRows:
        """Return these rows with a function applied to each batch; they are not available from COPY."""
        return _ChangedRows(self, change)


class _ChangedRows(SourceRows):
    def __init__(self, rows: SourceRows, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        self._rows = rows
        self._change = change

    def batches(self) -> Iterator[pa.RecordBatch]:
        # A StopIteration from the function raises RuntimeError here; with map() it would end the rows early.
        return (self._change(batch) for batch in self._rows.batches())

    def finish(self) -> Watermark:
        return self._rows.finish()
