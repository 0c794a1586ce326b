"""Follows the log in this process, without Spark: for few changes, which take less time than Spark's start.

Reader, staging tasks, unit writers and the order of commit and acknowledgement are those of the stream under Spark.
Batches follow each other in one thread. Spark's checkpoint is not missed: where the stream goes on is in the sink's
commit record only, and a query under Spark begins with a new checkpoint, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_cdc_provider.engine.core.errors import CdcError, values_hidden
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import (
    PiecePartition,
    SlotStreamReader,
    SourceOptions,
)
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import PIECE, StagingTask

log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""Pieces of a batch, by the columns of :mod:`.spark_source`."""


class LocalStaging:
    """Stages batches in this process, see :class:`.Staging`; its offers are not used."""

    def __init__(self) -> None:
        self.offers: list[Callable[[], StagingTask]] = []

    def stage(self, pieces: Rows, task: StagingTask, listener: Callable[[object], None] | None = None) -> list[Any]:
        """Stage one piece after the other."""
        messages = []
        for piece in pieces:
            messages.append(task.message({name: piece[name] for name in PIECE}))
            if listener is not None:
                listener(messages[-1])
        return messages


class LocalQuery:
    """A thread that cuts the log into batches and writes them, with the interface of Spark's ``StreamingQuery``.

    :param write: writes a batch; takes its pieces and its number.
    """

    def __init__(self, options: SourceOptions, write: Callable[[Rows, int], None]) -> None:
        self._reader = SlotStreamReader(options)
        self._write = write
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """Return the error that has ended the query."""
        return self._failure

    def stop(self) -> None:
        """End the query between two batches."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            try:
                self._follow()
            finally:
                self._reader.stop()
        except BaseException as e:  # raised in the thread that watches the query
            if not isinstance(e, (CdcError, *DRIVER_ERRORS)):
                log.error("the stream failed", exc_info=not values_hidden())
            self._failure = e

    def _follow(self) -> None:
        reader, number = self._reader, 0
        start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
        while not self._stopping.is_set():
            end = reader.latestOffset(start, limit)
            if end == start:
                continue
            partitions = [each for each in reader.partitions(start, end) if isinstance(each, PiecePartition)]
            self._write([row for partition in partitions for row in partition.rows], number)
            start, number = end, number + 1
