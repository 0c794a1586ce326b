"""Processes the batches of a streaming query: one at a time, none after a request to stop, and no failure unnoticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from airflow_cdc_provider.engine.core.errors import CdcError, Retry, StreamFailed, values_hidden
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.spark.worker_memory import release_batches

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_ERRORS: tuple[type[Exception], ...] = (CdcError, *DRIVER_ERRORS)


class Query(Protocol):
    """The part of Spark's ``StreamingQuery`` that is needed here."""

    @property
    def isActive(self) -> bool:
        """Return whether the query runs."""

    def exception(self) -> BaseException | None:
        """Return the error that has ended the query."""

    def stop(self) -> None:
        """End the query."""


class ForeachBatch:
    """The function that Spark calls with each batch (``foreachBatch``); it also reports why the query has ended.

    :param write_batch: writes a batch into the sinks; takes its rows and its number.
    :param batch_failure: returns the error for a failed batch; takes the batch's number and Spark's text.
    :param query_failure: returns the error for a query that has ended; takes Spark's text.
    :param poll: seconds between two looks at the query.
    """

    def __init__(
        self,
        run: Run,
        write_batch: Callable[[Any, int], None],
        batch_failure: Callable[[int, str], CdcError],
        query_failure: Callable[[str], CdcError],
        poll: float = _POLL_SECONDS,
    ) -> None:
        self._run = run
        self._write_batch = write_batch
        self._batch_failure = batch_failure
        self._query_failure = query_failure
        self._poll = poll
        self._one = threading.Lock()
        self._stopped = False
        self._failure: CdcError | None = None

    def __call__(self, rows: Any, number: int) -> None:
        """Write a batch; every failure must be raised, because Spark would commit the batch otherwise."""
        with self._one:
            if self._stopped:
                raise StreamFailed(
                    "the stream has been stopped", "Start the pipeline again; it continues from the last commit."
                )
            release_batches()
            try:
                self._write_batch(rows, number)
            except _ERRORS as e:
                self._failure = e if isinstance(e, CdcError) else driver_failure(e, f"committing batch {number}")
                if values_hidden():  # Spark prints the exception with all its causes
                    raise self._failure from None
                raise
            except (PySparkException, Py4JJavaError) as e:  # the latter for errors that PySpark has no class for
                if not self._run.stopping:
                    self._failure = self._batch_failure(number, str(e))
                raise

    def ended(self, query: Query) -> bool:
        """Wait briefly, and return whether the query has ended.

        :raises CdcError: if it has failed.
        """
        self._run.wait(self._poll)
        if query.isActive:
            return False
        failure = query.exception()
        if failure is not None:
            if self._failure is None and isinstance(failure, _ERRORS):  # of a query in this process
                raise failure
            raise self._failure or self._query_failure(str(failure)) from failure
        return True

    @contextmanager
    def watched(self, query: Query) -> Iterator[None]:
        """Run the block concurrently with the batches, and stop the query after that, between two batches.

        :raises CdcError: the final error of a batch instead of a transient error of the block. For example, a run that
            has lost its epoch to another must not be restarted because a broker did not answer it.
        """
        try:
            try:
                yield
            finally:
                self._stop(query)
        except Exception as e:
            outage = getattr(e, "retry", Retry.RETRY) is Retry.RETRY  # errors of a driver have no retry directive
            if outage and self._failure is not None and self._failure.retry is not Retry.RETRY:
                raise self._failure from e
            raise

    def _stop(self, query: Query) -> None:
        """Let a running batch finish, and refuse one that begins now."""
        with self._one:
            self._stopped = True
        try:
            query.stop()
        except (Py4JError, PySparkException) as e:  # only logged, because an error of the block matters more
            log.warning("the streaming query did not end: %s", str(e).splitlines()[0])
