"""The interface of a stream to whatever stages its batches: Spark's tasks or this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask


class Staging(Protocol):
    """Stages the batches of a stream.

    :ivar offers: functions that return how each sink would stage the next batch; they are called between two batches,
        possibly in another thread.
    """

    offers: list[Callable[[], StagingTask]]

    def stage(self, pieces: Any, task: StagingTask, listener: Callable[[object], None] | None = None) -> list[Any]:
        """Stage a batch.

        :param pieces: the batch as the query hands it over, with the columns of :mod:`.spark_source`.
        :param listener: called in any thread with messages while others are still to come; perhaps with none.
        :returns: the messages of the task, one a piece, in no order.
        """
