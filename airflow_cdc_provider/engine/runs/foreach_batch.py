"""The batches of a streaming query: one at a time, none once the query is to stop, and none that fails unheard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine.core.errors import CdcError, Retry, StreamFailed, values_hidden
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.spark.worker_memory import release_batches

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_ERRORS: tuple[type[Exception], ...] = (CdcError, *DRIVER_ERRORS)


class Batches:
    """What Spark calls with each batch (``foreachBatch``), and what tells why it has called no more.

    :param bring: brings a batch into the sinks; takes its rows and its number.
    :param batch_failure: the error for what Spark says of a batch that failed; takes the batch's number and the text.
    :param query_failure: the same for a query that has ended; takes the text.
    """

    def __init__(
        self,
        run: Run,
        bring: Callable[[DataFrame, int], None],
        batch_failure: Callable[[int, str], CdcError],
        query_failure: Callable[[str], CdcError],
    ) -> None:
        self._run = run
        self._bring = bring
        self._batch_failure = batch_failure
        self._query_failure = query_failure
        self._one = threading.Lock()
        self._stopped = False
        self._failure: CdcError | None = None

    def __call__(self, rows: DataFrame, number: int) -> None:
        """Bring a batch in. Whatever goes wrong must be raised, or Spark would commit the batch."""
        with self._one:
            if self._stopped:
                raise StreamFailed("the stream has been stopped", "Start again: it goes on from the last commit.")
            release_batches()
            try:
                self._bring(rows, number)
            except _ERRORS as e:
                self._failure = e if isinstance(e, CdcError) else driver_failure(e, f"committing batch {number}")
                if values_hidden():  # Spark prints what is raised, with all that it came of
                    raise self._failure from None
                raise
            except (PySparkException, Py4JJavaError) as e:  # the latter for jobs that PySpark has no class for
                if not self._run.stopping:
                    self._failure = self._batch_failure(number, str(e))
                raise

    def ended(self, query: StreamingQuery) -> bool:
        """Wait a little, and say whether the query has ended.

        :raises CdcError: what it has ended with.
        """
        self._run.wait(_POLL_SECONDS)
        if query.isActive:
            return False
        failure = query.exception()
        if failure is not None:
            raise self._failure or self._query_failure(str(failure)) from failure
        return True

    @contextmanager
    def watched(self, query: StreamingQuery) -> Iterator[None]:
        """Do what goes on beside the batches, and stop the query after that, between two batches.

        :raises CdcError: what a batch failed with for good, in place of an outage that what went on beside it met: a
            run that another has overtaken is not to be begun again because a broker did not answer it.
        """
        try:
            try:
                yield
            finally:
                self._stop(query)
        except Exception as e:
            outage = getattr(e, "retry", Retry.RETRY) is Retry.RETRY  # an error of a driver is none of ours yet
            if outage and self._failure is not None and self._failure.retry is not Retry.RETRY:
                raise self._failure from e
            raise

    def _stop(self, query: StreamingQuery) -> None:
        """Let a batch that has begun end, and turn away one that begins now."""
        with self._one:
            self._stopped = True
        try:
            query.stop()
        except (Py4JError, PySparkException) as e:  # the error at hand, if there is one, is the one to be told
            log.warning("the streaming query did not end: %s", str(e).splitlines()[0])
