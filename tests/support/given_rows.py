"""Rows that a test gives to a sink in place of those of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from airflow_cdc_provider.engine.core.record import Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows


class GivenRows(SourceRows):
    """Rows from memory.

    :param finish: returns their watermark.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], finish: Callable[[], Watermark]) -> None:
        self._batches = batches
        self._finish = finish

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self._batches)

    def finish(self) -> Watermark:
        return self._finish()
