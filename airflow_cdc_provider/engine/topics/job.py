"""The job of a pipeline over topics: Spark's query, and what watches it until it has done what was asked for.

Other than the stream of a database's log, it goes on with Spark's checkpoint, in which the state of windows is. What it
goes on from is said by the commit record all the same: see :mod:`.position`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine.batches import Batches
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, GateClosed, StreamFailed
from airflow_cdc_provider.engine.garbage import spare_modules
from airflow_cdc_provider.engine.run import Run, existing_record
from airflow_cdc_provider.engine.sinks.base import Record
from airflow_cdc_provider.engine.stream import StreamProgress
from airflow_cdc_provider.engine.topics import messages
from airflow_cdc_provider.engine.topics.avro import carried_error, unknown_schemas
from airflow_cdc_provider.engine.topics.checkpoint import Checkpoint
from airflow_cdc_provider.engine.topics.cluster import Topics, behind, reached, with_all
from airflow_cdc_provider.engine.topics.gate import pass_gate
from airflow_cdc_provider.engine.topics.position import REPAIR, Position, foremost, goes_on
from airflow_cdc_provider.engine.topics.query import output_of, result, shape_of
from airflow_cdc_provider.engine.topics.settings import Offsets
from airflow_cdc_provider.engine.topics.units import TopicUnits, records_of

log = logging.getLogger(__name__)

_LOST = re.compile(r"OffsetOutOfRange|KAFKA_DATA_LOSS|failOnDataLoss|UNABLE_TO_DETECT_PARTITION_OFFSET_CHANGED")
_BEGINS_LATE = re.compile(r"ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO")
_EARLIEST = -2
_TELLING_SECONDS, _LOOK_SECONDS = 5.0, 0.05


def follower(
    pipeline: Pipeline, unit: int | None, catch_up: bool
) -> tuple[Callable[..., StreamProgress], Callable[[StreamProgress], bool]]:
    """What reads topics until it has come as far as is asked, and what tells whether it has.

    :param unit: to be reached.
    :param catch_up: reach the ends that the topics have now.
    """
    assert pipeline.topics is not None
    goal = Topics(pipeline.topics).ends() if catch_up else None

    def follow(spark: SparkSession, run: Run, record: Record, tell: Callable[[StreamProgress], None]) -> StreamProgress:
        return TopicJob(spark, run, tell).follow(unit, goal)

    def has_reached(done: StreamProgress) -> bool:
        if goal is not None:
            return all(reached(Position.of(existing_record(branch)).offsets, goal) for branch in pipeline.branches)
        return unit is not None and done.applied >= unit

    return follow, has_reached


class TopicJob:
    """Reads topics until told otherwise.

    :param report: called after every batch and about once a second.
    """

    def __init__(self, spark: SparkSession, run: Run, report: Callable[[StreamProgress], None]) -> None:
        source = run.pipeline.topics
        assert source is not None
        self._spark = spark
        self._run = run
        self._source = source
        self._report = report
        self._topics = Topics(source)
        self._checkpoint = Checkpoint.of(run.pipeline)
        records = records_of(run)
        self._slowest = min(records, key=lambda record: record.applied)
        self._positions = [Position.of(record) for record in records]
        self._batches = Batches(run, self._batch, lambda number, text: failure_of(text), failure_of)
        self._brought: int | None = None  # the number of the last batch that Spark has handed over
        self._late: dict[int, int] = {}
        self._told = ""  # when what Spark has told last began
        self._lag: int | None = None

    def follow(self, target: int | None, goal: Offsets | None) -> StreamProgress:
        """Bring in messages until unit ``target`` has been applied, or all before ``goal``; for ever with neither.

        :returns: what was done. Ends early when the run is asked to stop.
        :raises CdcError: when the query cannot go on.
        """
        query = self._start()
        beat = time.monotonic()
        with self._batches.watched(query):
            while not self._run.stopping and not self._done(target, goal):
                if self._batches.ended(query):
                    break
                self._run.check()
                if time.monotonic() - beat >= self._run.pipeline.stream.heartbeat:
                    beat = time.monotonic()
                    self._look()
                self._report(self._progress(query))
            self._await_count(query)
        self._look()
        self._report(self._progress(query))
        return self._progress(query)

    def _start(self) -> StreamingQuery:
        position = Position.of(self._slowest)
        self._run.commit_record.sweep(self._run.epoch)
        shape = shape_of(self._spark, self._run.pipeline)
        _require_same(shape.table.to_dict(), self._slowest.targets[0].table.to_dict(), self._run.pipeline.name)
        if shape.stateful != position.stateful:
            raise ConfigError(
                f"source.sql keeps {'state' if shape.stateful else 'no state'}, but the pipeline has been provisioned"
                f" with a query that keeps {'none' if shape.stateful else 'some'}",
                "Put it back, or use another pipeline name: the state that the query would need is of no checkpoint.",
            )
        ends = pass_gate(self._topics, position)
        first = foremost(self._positions)
        base = first.base
        if not goes_on(self._positions, self._checkpoint.find(first), self._checkpoint.url):
            self._checkpoint.remove()
            base = position.applied
        missed = unknown_schemas(self._spark)
        self._units = TopicUnits(self._spark, self._run, position, base, self._checkpoint, missed)
        self._lag = behind(position.offsets, ends)
        spare_modules()
        # New partitions, and topics that a pattern matches by now, are read from their beginning.
        starting = with_all(position.offsets, self._topics.named(), lambda topic, partition: _EARLIEST)
        rows = result(self._spark, self._source, messages.raw_stream(self._spark, self._source, starting), missed)
        return (
            rows.writeStream.queryName(f"airflow-cdc {self._run.pipeline.name}")
            .outputMode(output_of(self._run.pipeline))
            .foreachBatch(self._batches)
            .option("checkpointLocation", self._checkpoint.url)
            .trigger(processingTime=f"{int(self._run.pipeline.stream.trigger * 1000)} milliseconds")
            .start()
        )

    def _done(self, target: int | None, goal: Offsets | None) -> bool:
        if target is not None and self._units.applied >= target:
            return True
        return goal is not None and reached(self._units.position.offsets, goal)

    def _look(self) -> None:
        """Look whether the topics can still continue what the sinks have, and how far they are ahead."""
        position = self._units.position
        self._lag = behind(position.offsets, pass_gate(self._topics, position))

    def _batch(self, rows: DataFrame, number: int) -> None:
        self._brought = number
        self._units.bring(rows, number)

    def _progress(self, query: StreamingQuery) -> StreamProgress:
        units = self._units
        counts = {}
        if self._source.dead_letters:
            counts["dead_letters"] = units.dead_letters
        if self._source.late == "count":
            counts["late"] = self._count_late(query)
        return StreamProgress(
            units.applied,
            units.changes,
            units.seconds,
            units.tables.copy(),
            units.batch_seconds,
            counts=counts,
            lag_messages=self._lag,
        )

    def _await_count(self, query: StreamingQuery) -> None:
        """Let Spark tell of the last batch, which it does when its own log has it, before the query is stopped."""
        if self._source.late != "count" or self._brought is None:
            return
        last, deadline = self._brought, time.monotonic() + _TELLING_SECONDS
        while last not in self._late and query.isActive and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._count_late(query)

    def _count_late(self, query: StreamingQuery) -> int:
        """Rows that Spark has left out so far, as their window was closed."""
        latest = query.lastProgress
        if latest is not None and latest["timestamp"] != self._told:
            self._told = latest["timestamp"]
            for progress in query.recentProgress:
                if "addBatch" in progress["durationMs"]:  # else Spark was idle, and names the batch that comes next
                    operators: list[dict[str, Any]] = progress["stateOperators"]
                    self._late[progress["batchId"]] = sum(each["numRowsDroppedByWatermark"] for each in operators)
        return sum(self._late.values())


def failure_of(text: str) -> CdcError:
    """What Spark has ended a batch or the query for, by its words."""
    told = messages.bad_record(text) or carried_error(text)
    if told is not None:
        return told
    said = next((line for line in text.splitlines() if line.strip()), "without a message")
    if _BEGINS_LATE.search(text):
        return GateClosed(
            f"the first messages of a partition that came later are gone from it, unread: {said}",
            "If the query keeps no state, remove the pipeline's checkpoint (source.checkpoint, or checkpoint in its"
            " state) and start again: it goes on from the commit record, with what the partition still has. Otherwise:"
            f" {REPAIR} So that it does not happen again, raise the topic's retention.",
        )
    if _LOST.search(text):
        return GateClosed(
            f"messages that have not been read are gone from their topic: {said}",
            "Start again: what is missing is then looked for, and told with the repair.",
        )
    return StreamFailed(
        f"the streaming query ended: {said}",
        "Start again: it goes on from the last commit. Spark's log has the whole error.",
    )


def _require_same(now: dict[str, Any], recorded: dict[str, Any], pipeline: str) -> None:
    """Refuse a query that returns another table than the targets were made for."""
    if now != recorded:
        raise ConfigError(
            f"source.sql, source.columns or source.key of pipeline {pipeline!r} return other columns than the target"
            " was made for",
            "Put them back, or use another pipeline name for the other result.",
        )
