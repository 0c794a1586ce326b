"""The stream job of a pipeline over topics: runs Spark's query until the requested end.

Unlike the stream of a database's log, it continues with Spark's checkpoint, which contains the state of windows. But
the commit record determines the position, see :mod:`.position`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.foreach_batch import ForeachBatch
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.view_work import ViewWork, keeping_views
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.avro_texts import unknown_schemas
from airflow_cdc_provider.engine.sources.kafka.bad_messages import SetAside
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.gate import pass_gate
from airflow_cdc_provider.engine.sources.kafka.position import (
    RecordedTopics,
    UnitNumber,
    behind_truncates,
    continues_checkpoint,
    most_advanced,
)
from airflow_cdc_provider.engine.sources.kafka.query import QueryResult, keeps_last, output_of, query_result, result
from airflow_cdc_provider.engine.sources.kafka.query_difference import table_difference
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, topic_settings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import without
from airflow_cdc_provider.engine.sources.kafka.spark_failures import spark_failure, with_topic_remedy
from airflow_cdc_provider.engine.sources.kafka.topics import Topics, behind, reached, with_all
from airflow_cdc_provider.engine.sources.kafka.unit_writer import TopicUnitWriter, records_of
from airflow_cdc_provider.engine.spark.worker_memory import spare_modules

log = logging.getLogger(__name__)

_EARLIEST = -2
_TELLING_SECONDS, _LOOK_SECONDS = 5.0, 0.05
_OPEN_SECONDS = 15.0


def follower(
    pipeline: Pipeline, unit: UnitNumber | None, catch_up: bool
) -> tuple[Callable[..., StreamProgress], Callable[[StreamProgress], bool]]:
    """Return a function that reads topics until the requested end, and one that tells whether the end is reached.

    :param unit: the unit to reach.
    :param catch_up: stop at the current ends of the topics.
    """
    goal = Goal.now(Topics(topic_settings(pipeline))) if catch_up else None

    def follow(
        spark: SparkSession | None, run: Run, record: Record, tell: Callable[[StreamProgress], None]
    ) -> StreamProgress:
        assert spark is not None, "the source has no workload that is known"
        return TopicJob(spark, run, tell).follow(unit, goal)

    def has_reached(done: StreamProgress) -> bool:
        if goal is not None:
            records = map(existing_record, pipeline.branches)
            return all(reached(RecordedTopics.of(record).offsets, goal.written) for record in records)
        return unit is not None and done.applied >= unit

    return follow, has_reached


@dataclass(frozen=True)
class Goal:
    """The ends of topics when a catch-up job begins.

    :param written: the ends after all messages, including open transactions and the messages after them.
    :param readable: the ends before the first open transaction, if there is one.
    """

    written: Offsets
    readable: Offsets

    @classmethod
    def now(cls, topics: Topics) -> Goal:
        """Return the current ends of the topics; messages written during the call may be missing."""
        named = topics.named()
        return cls(topics.written_ends(named), topics.ends(named))


class TopicJob:
    """Reads topics until the requested end.

    :param report: called after every batch and about once a second.
    """

    def __init__(self, spark: SparkSession, run: Run, report: Callable[[StreamProgress], None]) -> None:
        source = topic_settings(run.pipeline)
        self._spark = spark
        self._run = run
        self._source = source
        self._report = report
        self._topics = Topics(source)
        self._checkpoint = Checkpoint.of(run.pipeline)
        self._look_at_records()
        self._batches = self._new_batches()
        self._brought: int | None = None  # number of the last batch that Spark has handed over
        self._late: dict[int, int] = {}
        self._last_progress = ""  # start time in Spark's last progress report
        self._before = StreamProgress(self._slowest.applied)  # by earlier queries, before messages were set aside
        self._lag: int | None = None
        self._held: tuple[Offsets, float] | None = None  # offsets before an awaited transaction, and since when

    def follow(self, target: UnitNumber | None, goal: Goal | None) -> StreamProgress:
        """Apply messages until unit ``target`` or all messages before ``goal``; forever if neither is given.

        A transaction that a producer leaves open holds up all messages behind it. The job waits a little for its end,
        because a busy producer soon ends its transactions. It does not wait forever, so that the caller cannot hang on
        an abandoned transaction.

        :returns: the progress. The job ends early when the run is asked to stop.
        :raises CdcError: when the query cannot go on.
        """
        while True:
            try:
                return self._follow(target, goal)
            except SetAside as e:
                log.warning("%s", e.message)
                self._before = self._progress(None)
                self._batches, self._brought = self._new_batches(), None
                self._look_at_records()

    def _follow(self, target: UnitNumber | None, goal: Goal | None) -> StreamProgress:
        with keeping_views(self._run) as views:
            return self._follow_with(views, target, goal)

    def _follow_with(self, views: ViewWork, target: UnitNumber | None, goal: Goal | None) -> StreamProgress:
        query = self._start()
        beat = time.monotonic()
        with self._batches.watched(query):
            while not self._run.stopping and not (self._done(target, goal) and views.finish(self._units.applied)):
                if self._batches.ended(query):
                    break
                self._run.check()
                views.check()
                if time.monotonic() - beat >= self._run.pipeline.stream.heartbeat:
                    beat = time.monotonic()
                    self._look()
                self._report(self._progress(query))
            self._await_count(query)
        self._look()
        self._report(self._progress(query))
        return self._progress(query)

    def _new_batches(self) -> ForeachBatch:
        return ForeachBatch(self._run, self._batch, lambda number, text: spark_failure(text), spark_failure)

    def _look_at_records(self) -> None:
        records = records_of(self._run)
        self._slowest = min(records, key=lambda record: record.applied)
        self._positions = [RecordedTopics.of(record) for record in records]

    def _start(self) -> StreamingQuery:
        # Notes for all sinks may have reached only one of them.
        skips = tuple(sorted({skip for position in self._positions for skip in position.skipped}))
        slowest = RecordedTopics.of(self._slowest)
        truncates = max((p.truncates for p in self._positions if p.applied == slowest.applied), key=len)
        position = replace(slowest, skipped=skips, truncates=truncates)
        self._run.commit_record.sweep(self._run.epoch)
        queried = require_query(self._spark, self._run.pipeline, self._slowest)
        ends = pass_gate(self._topics, position)
        first = most_advanced(self._positions)
        base = first.base
        if not continues_checkpoint(self._positions, self._checkpoint.find(first), self._checkpoint.url):
            self._checkpoint.remove()
            base = position.applied
        self._checkpoint.prepare()
        missed = unknown_schemas(self._spark)
        in_order = not queried.stateful and keeps_last(self._run.pipeline, queried.has_ops)
        self._units = TopicUnitWriter(self._spark, self._run, position, base, self._checkpoint, missed, in_order)
        self._lag = behind(position.offsets, ends)
        spare_modules()
        # New partitions, and topics that newly match a pattern, are read from their beginning.
        starting = with_all(position.offsets, self._topics.named(), lambda topic, partition: _EARLIEST)
        raw = message_view.raw_stream(self._spark, self._source, starting)
        raw = behind_truncates(without(raw, skips), position.floors)
        rows = result(self._spark, self._source, raw, missed)
        return (
            rows.writeStream.queryName(f"airflow-cdc {self._run.pipeline.name}")
            .outputMode(output_of(self._run.pipeline))
            .foreachBatch(self._batches)
            .option("checkpointLocation", self._checkpoint.url)
            .trigger(processingTime=f"{int(self._run.pipeline.stream.trigger * 1000)} milliseconds")
            .start()
        )

    def _done(self, target: UnitNumber | None, goal: Goal | None) -> bool:
        if target is not None and self._units.applied >= target:
            return True
        if goal is None:
            return False
        offsets = self._units.position.offsets
        if reached(offsets, goal.written):
            return True
        if not reached(offsets, goal.readable):
            return False
        if self._held is None or self._held[0] != offsets:
            self._held = (offsets, time.monotonic())
        if time.monotonic() - self._held[1] < _OPEN_SECONDS:
            return False
        log.warning(
            "%s messages of %s have not been read because they are in or behind a transaction that a producer has left"
            " open. The brokers end it after its transaction.timeout.ms; `kafka-transactions.sh find-hanging` lists"
            " transactions that will not end.",
            behind(offsets, goal.written),
            self._source.place,
        )
        return True

    def _look(self) -> None:
        """Check that the topics can still continue what the sinks have, and update the lag."""
        position = self._units.position
        self._lag = behind(position.offsets, pass_gate(self._topics, position))

    def _batch(self, rows: DataFrame, number: int) -> None:
        self._brought = number
        try:
            self._units.write_batch(rows, number)
        except CdcError as e:
            with_topic_remedy(e)
            raise

    def _progress(self, query: StreamingQuery | None) -> StreamProgress:
        """Return the progress; without a query, late rows are those counted before."""
        units = self._units
        counts = {}
        if self._source.dead_letters:
            counts["dead_letters"] = units.dead_letters
        if self._source.late == "count":
            counts["late"] = 0 if query is None else self._count_late(query)
        return self._before.plus(
            StreamProgress(
                units.applied,
                units.changes,
                units.seconds,
                units.tables.copy(),
                units.batch_seconds,
                counts=counts,
                lag_messages=self._lag,
            )
        )

    def _await_count(self, query: StreamingQuery) -> None:
        """Wait for Spark to report the last batch, after writing it to its log, before the query is stopped."""
        if self._source.late != "count" or self._brought is None:
            return
        last, deadline = self._brought, time.monotonic() + _TELLING_SECONDS
        while last not in self._late and query.isActive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._count_late(query)

    def _count_late(self, query: StreamingQuery) -> int:
        """Return the number of rows that Spark has dropped so far because their window was closed."""
        latest = query.lastProgress
        if latest is not None and latest["timestamp"] != self._last_progress:
            self._last_progress = latest["timestamp"]
            for progress in query.recentProgress:
                if "addBatch" in progress["durationMs"]:  # otherwise Spark was idle, and names the next batch
                    operators: list[dict[str, Any]] = progress["stateOperators"]
                    self._late[progress["batchId"]] = sum(each["numRowsDroppedByWatermark"] for each in operators)
        return sum(self._late.values())


def require_query(spark: SparkSession, pipeline: Pipeline, record: Record) -> QueryResult:
    """Refuse a query other than the one for which the record's target was created.

    :returns: the result of the query.
    :raises ConfigError: naming the difference.
    """
    queried = query_result(spark, pipeline)
    _require_same(pipeline.transform.table(queried.table), record.targets[0].table)
    if queried.stateful != RecordedTopics.of(record).stateful:
        raise ConfigError(
            f"source.sql keeps {'state' if queried.stateful else 'no state'}, but the pipeline has been provisioned"
            f" with a query that keeps {'none' if queried.stateful else 'some'}",
            "Put it back, or use another pipeline name; no checkpoint has the state that the query would need.",
        )
    return queried


def _require_same(now: Table, recorded: Table) -> None:
    """Refuse a query that returns a table other than the targets'."""
    if now.to_dict() != recorded.to_dict():
        raise ConfigError(
            "source.sql, source.columns or source.key return columns other than those of the target:\n"
            f"{table_difference(recorded, now)}",
            "Put them back, or use another pipeline name for the other result.",
        )
