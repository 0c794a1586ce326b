"""The stream job: runs a query over the log, and watches it until it has done what was asked for.

Spark cuts the stream into batches. The position at which the stream goes on is in the sink's commit record only. So
each query begins with a new checkpoint, in which Spark keeps the progress of this query.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine.core import errors
from airflow_cdc_provider.engine.core.errors import CdcError, StreamFailed, TableLocked
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, describe, row
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.postgres.lock_holders import naming_holders
from airflow_cdc_provider.engine.postgres.server_identity import QUERY
from airflow_cdc_provider.engine.postgres.slots import SlotState, emit_marker, read_slot
from airflow_cdc_provider.engine.runs.foreach_batch import ForeachBatch, Query
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.view_work import ViewWork, keeping_views
from airflow_cdc_provider.engine.sources.postgres.provision.gate import Passage
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import InlineStaging
from airflow_cdc_provider.engine.sources.postgres.stream.local_query import LocalQuery, LocalStaging
from airflow_cdc_provider.engine.sources.postgres.stream.sink_fanout import SinkFanout
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import (
    LocalProcesses,
    SourceOptions,
    postgres_cdc,
)
from airflow_cdc_provider.engine.spark.local_sockets import socket_directory
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

log = logging.getLogger(__name__)
_ACKNOWLEDGE_SECONDS = 30.0
_STARTS = 5
_POLL_SECONDS = 0.05
_LOCAL_POLL_SECONDS = 0.02


class StreamJob:
    """Follows the log until it is asked to stop.

    :param spark: the session of the query; without one the query runs in this process, see :mod:`.local_query`.
    :param report: called after every batch and about once a second.
    """

    def __init__(
        self, spark: SparkSession | None, run: Run, record: Record, report: Callable[[StreamProgress], None]
    ) -> None:
        self._spark = spark
        self._run = run
        self._pipeline = run.pipeline
        self._report = report
        self._began = record.applied
        self._origin = RecordedSlot.of(record.identity).origin
        self._staging = InlineStaging() if spark is not None else LocalStaging()
        self._sinks = SinkFanout(run, record, self._staging)
        if spark is not None:
            self._batches = ForeachBatch(run, self._write_batch, _batch_failure, _query_failure)
        else:
            self._batches = ForeachBatch(run, self._write_batch, _batch_failure, _local_failure, _LOCAL_POLL_SECONDS)
        self._passage: Passage | None = None
        self._passage_before: Passage | None = None
        self._catalog_locked: str | None = None
        self._views: ViewWork | None = None

    def follow(self, target: Lsn | None) -> StreamProgress:
        """Apply the log until everything up to ``target`` is durable, or forever when ``None``.

        It ends early when the run is asked to stop.

        :raises CdcError: when the stream cannot go on.
        """
        with keeping_views(self._run) as views, contextlib.ExitStack() as stack:
            self._views = views
            self._sweep()
            spare_modules()
            if self._spark is None or not isinstance(self._staging, InlineStaging):
                return self._follow(self._start_here(), target, views)
            directory = stack.enter_context(socket_directory())
            stack.enter_context(self._staging.serving(directory, self._run.lag.idle))
            return self._follow(self._start(self._spark, directory), target, views)

    def _follow(self, query: Query, target: Lsn | None, views: ViewWork) -> StreamProgress:
        try:
            with self._batches.watched(query):
                try:
                    self._watch(query, target, views)
                finally:
                    self._sinks.halt()
        except DRIVER_ERRORS as e:
            raise driver_failure(e, describe(postgres_settings(self._pipeline).dsn)) from e
        finally:
            # If the sink is out of reach, leftovers are removed at the next start; the error in flight says more.
            with contextlib.suppress(CdcError, *DRIVER_ERRORS):
                self._sweep()
        self._report(self._progress())
        if self._sinks.refusal is not None:
            raise self._sinks.refusal
        return self._progress()

    def _watch(self, query: Query, target: Lsn | None, views: ViewWork) -> None:
        """Watch source and query while batches are applied, until the target is applied and acknowledged."""
        beat = time.monotonic()
        with connected(postgres_settings(self._pipeline).dsn, settings={"synchronous_commit": "local"}) as source:
            self._gate(source)  # by now the address may lead to another server than at the start
            self._check_catalog(source)
            while not self._run.stopping and not self._done(target, views):
                if self._batches.ended(query):
                    break
                self._run.check()
                views.check()
                if time.monotonic() - beat >= self._pipeline.stream.heartbeat:
                    beat = time.monotonic()
                    self._run.budget.look(self._gate(source))
                    self._check_catalog(source)
                    emit_marker(source, "heartbeat")
                self._report(self._progress())
            self._await_acknowledgement(source, query)

    def _done(self, target: Lsn | None, views: ViewWork) -> bool:
        """Return whether everything up to ``target`` is durable, views included, or the stream cannot go on."""
        if not self._sinks.done(target):
            return False
        return self._sinks.refusal is not None or target is None or views.finish(target)

    def _check_catalog(self, source: Connection) -> None:
        """Check whether the catalog has changed; if a table is locked, try again at the next heartbeat."""
        try:
            with naming_holders():  # here, since the session outlives this check and would name them only at its end
                self._sinks.check_catalog(source)
        except TableLocked as e:
            if self._catalog_locked is None:
                log.warning("looking at the catalog waits: %s", e.message)
            self._catalog_locked = e.message
        else:
            self._catalog_locked = None

    def _progress(self) -> StreamProgress:
        sinks = self._sinks
        return StreamProgress(
            sinks.applied,
            sinks.changes,
            sinks.seconds,
            sinks.tables.copy(),
            sinks.batch_seconds,
            sinks.waiting or self._catalog_locked or (self._views.waiting if self._views is not None else None),
        )

    def _source_options(self) -> SourceOptions:
        pipeline = self._pipeline
        return SourceOptions(
            postgres_settings(pipeline).log_dsn,
            postgres_settings(pipeline).slot,
            postgres_settings(pipeline).publication,
            self._origin,
            self._sinks.applied,
            pipeline.stream.max_batch_bytes,
            pipeline.stream.heartbeat,
            self._run.piece_store,
            self._run.epoch,
        )

    def _start_here(self) -> LocalQuery:
        return LocalQuery(replace(self._source_options(), trigger=0.0, patience=_LOCAL_POLL_SECONDS), self._batches)

    def _start(self, spark: SparkSession, directory: str) -> StreamingQuery:
        options = replace(
            self._source_options(),
            trigger=self._pipeline.stream.trigger,
            local=LocalProcesses.of(spark, directory),
        )
        spark.dataSource.register(postgres_cdc(options))
        for _ in range(_STARTS):
            pieces = spark.readStream.format("postgres_cdc").load()
            query = (
                pieces.writeStream.queryName(f"airflow-cdc {self._pipeline.name}")
                .foreachBatch(self._batches)
                .option("checkpointLocation", self._run.state.new_checkpoint(self._run.epoch))
                .trigger(processingTime="0 seconds")  # the source waits
                .start()
            )
            with contextlib.ExitStack() as failing:
                failing.callback(query.stop)
                late = self._comes_late(query)
                failing.pop_all()
            if not late:
                break
        return query

    def _comes_late(self, query: StreamingQuery) -> bool:
        """Wait for the source's process; return whether it did not come up in the ten seconds that Spark gives it.

        That happens on a busy machine. Nothing has been read then, so no failure is counted: the query can begin again.
        """
        # The status of a query that fails says so a moment before the query becomes inactive.
        undecided = ("Initializing", "Terminated")
        while query.isActive and query.status["message"].startswith(undecided) and not self._run.stopping:
            self._run.check()
            self._run.wait(_POLL_SECONDS)
        late = not query.isActive and "Python worker failed to connect back" in str(query.exception())
        if late:
            log.warning("the source's process did not come up within ten seconds, which Spark does not wait beyond")
        return late

    def _gate(self, source: Connection) -> SlotState:
        """Check that the source can still continue; it has saved by now what was seen the time before.

        :raises StreamFailed: when this is another server than the log is read from. Then the passage says nothing
            about that one, and its timeline in the record would vouch for changes of another history.
        """
        self._origin.require(row(source, f"SELECT {QUERY}"), postgres_settings(self._pipeline).dsn)
        passage = self._sinks.gate(source)
        self._passage_before, self._passage = self._passage, passage
        self._run.lag.observe_slot(passage.slot)
        return passage.slot

    def _await_acknowledgement(self, source: Connection, query: Query) -> None:
        """Wait until the slot is acknowledged up to what is applied, as it is when Spark next asks for an offset."""
        applied, slot = self._sinks.applied, postgres_settings(self._pipeline).slot
        if applied == self._began:
            return

        def acknowledged() -> bool:
            state = read_slot(source, slot)
            if state is not None:
                self._run.lag.observe_slot(state)
            return state is None or state.confirmed_flush_lsn >= applied or self._batches.ended(query)

        await_condition(acknowledged, _ACKNOWLEDGE_SECONDS)

    def _sweep(self) -> None:
        self._run.commit_record.sweep(self._run.epoch)
        for branch in self._run.branches:
            branch.sink.discard(self._run.epoch)

    def _write_batch(self, pieces: Any, _: int) -> None:
        if self._passage_before is not None:
            self._sinks.record_source(self._passage_before)
        self._sinks.write_batch(pieces)
        self._report(self._progress())


def _batch_failure(number: int, text: str) -> CdcError:
    return StreamFailed(
        f"a Spark task of batch {number} failed: {text.splitlines()[0]}",
        "Start again: the stream goes on from the last commit. The task's error is in Spark's log.",
        f"a Spark task of batch {number} failed",
    )


def _local_failure(text: str) -> CdcError:
    return StreamFailed(
        f"the stream failed: {text.splitlines()[0] if text else 'without a message'}",
        "Start again: the stream goes on from the last commit. The log has the whole error.",
        "the stream failed",
    )


def _query_failure(text: str) -> CdcError:
    """Return the error that the source's process raised, by its text: only Spark talks to that process."""
    _, found, tail = text.rpartition(f"{errors.__name__}.")
    if found:
        name, _, message = tail.splitlines()[0].strip().partition(": ")
        kind = getattr(errors, name, StreamFailed)  # the class decides whether the job begins again
        solution = getattr(kind, "remedy", "Start again: the stream goes on from the last commit.")
        return cast(CdcError, kind(message, solution))
    return StreamFailed(
        f"the streaming query ended: {text.splitlines()[0] if text else 'without a message'}",
        "Start again: the stream goes on from the last commit. Spark's log has the whole error.",
        "the streaming query ended",
    )
