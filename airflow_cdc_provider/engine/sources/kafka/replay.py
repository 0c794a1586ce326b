"""Runs the query again over messages that have been read, to find what a target should hold.

Most queries run as a batch over all messages. A query that returns only final rows, such as windows once they are
closed, runs as a stream because Spark closes windows only in streams. The stream takes all messages as one batch, which
sets a watermark, and then returns the windows that it closes. The sink has the windows closed by the watermark of its
last unit, which may be earlier than that of all messages. If so, the stream runs again with the delay that leads to
exactly that watermark. Both watermarks are the latest time minus the delay, see ``EventTimeWatermarkExec`` in Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.comparison.hash_sums import add_up
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.kafka.message_ranges import MessageRange, ranges_of
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics, behind_truncates
from airflow_cdc_provider.engine.sources.kafka.query import result
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, without
from airflow_cdc_provider.engine.sources.kafka.spark_failures import spark_failure
from airflow_cdc_provider.engine.sources.kafka.staging_task import (
    HASHES,
    RESULT_OP,
    TopicHashes,
    TopicTexts,
    by_place,
    last_of_each,
    last_texts,
    places_of,
)
from airflow_cdc_provider.engine.sources.kafka.topics import Topics


@dataclass(frozen=True)
class Reach:
    """How far a sink is.

    :param offsets: offsets before which everything has been read.
    :param watermark: of the last unit, in milliseconds since 1970; windows that ended before it were closed.
    """

    offsets: Offsets
    watermark: int


def reach_of(branch: Pipeline, checkpoint: Checkpoint) -> Reach:
    """Return how far a sink is by now."""
    position = RecordedTopics.of(existing_record(branch))
    batch = position.applied - position.base - 1
    return Reach(position.offsets, 0 if batch < 0 else checkpoint.watermark(batch))


@dataclass(frozen=True)
class Replay:
    """The query over messages that have been read.

    :param first: offsets of the first messages that still exist.
    :param late: earlier messages have been read, too.
    :param until: returns the offsets at which the messages end.
    :param reach: returns how far the sink is, which determines the closed windows.
    :param passed: returns the current position in the sink's record, with skipped messages and truncates. It can change
        while a stream runs, and differ between sinks.
    :param checkpoint: the pipeline's checkpoint; temporary ones are created next to it.
    """

    spark: SparkSession
    source: TopicSettings
    first: Offsets
    late: bool
    until: Callable[[], Offsets]
    reach: Callable[[], Reach]
    passed: Callable[[], RecordedTopics]
    checkpoint: Checkpoint

    @classmethod
    def of(cls, spark: SparkSession, topics: Topics, position: RecordedTopics, checkpoint: Checkpoint) -> Replay:
        """Return the replay of all messages that a pipeline has read."""
        there = topics.beginnings(topics.described(position.offsets.keys()))
        begun = {
            topic: {p: position.begun.get(topic, {}).get(p, 0) for p in partitions}
            for topic, partitions in there.items()
        }
        first = {topic: {p: max(begun[topic][p], n) for p, n in found.items()} for topic, found in there.items()}
        reach = Reach(position.offsets, 0)
        return cls(
            spark,
            topics.source,
            first,
            first != begun,
            lambda: position.offsets,
            lambda: reach,
            lambda: position,
            checkpoint,
        )

    def rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the result as texts, under the names of the target's columns.

        :param keyed: keep only the last row of each key, and none if that deletes the row.
        """
        with self._queried() as found:
            texts = _texts(found, target.table, keyed)
        yield from _at_last(texts, target.table, keyed)

    def sums(self, target: Target, buckets: int) -> Mapping[int, Sequence[int]]:
        """Return the sums of the rows' hashes, see :func:`.hash_sums.add_up`; with a key, of the last row of each.

        Messages must contain whole rows.
        """
        table = target.table
        with self._queried() as found:
            hashes = by_place(found, table).mapInArrow(TopicHashes(table), HASHES).toArrow()
        return summed(hashes, bool(table.key), buckets)

    @contextmanager
    def _queried(self) -> Iterator[DataFrame]:
        """Yield the rows of the result, translating Spark's errors into errors of the engine."""
        end, passed = self.until(), self.passed()
        raw = behind_truncates(message_view.raw_range(self.spark, self.source, self.first, end), passed.truncated)
        try:
            yield result(self.spark, self.source, without(raw, passed.skipped))
        except PySparkException as e:
            raise spark_failure(str(e)) from e

    def closed_rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """Yield what :meth:`rows` does, but only final rows."""
        reach, skips = self.reach(), self.passed().skipped
        texts_of = partial(_texts, table=target.table, keyed=keyed)
        ran = self._run(reach.offsets, self.source, skips, texts_of)
        column, delay = self.source.watermark
        if column and ran.latest is not None and ran.latest - round(delay * 1000) > reach.watermark:
            longer = replace(self.source, watermark=(column, (ran.latest - reach.watermark) / 1000))
            ran = self._run(reach.offsets, longer, skips, texts_of)
        if ran.tables:
            yield from _at_last(pa.concat_tables(ran.tables), target.table, keyed)

    def _run(
        self, end: Offsets, source: TopicSettings, skips: Collection[Skip], texts_of: Callable[[DataFrame], pa.Table]
    ) -> _Ran:
        ran = _Ran()
        checkpoint = Checkpoint(f"{self.checkpoint.url.rstrip('/')}-verify-{uuid.uuid4().hex}")
        checkpoint.prepare()
        try:
            raw = message_view.raw_stream_of_range(self.spark, source, self.first, end)
            rows = result(self.spark, source, without(raw, skips))
            query = (
                rows.writeStream.outputMode("append")
                .foreachBatch(lambda found, _: ran.tables.append(texts_of(found)))
                .option("checkpointLocation", checkpoint.url)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            for progress in query.recentProgress:
                if latest := progress["eventTime"].get("max"):
                    moment = round(datetime.fromisoformat(latest).timestamp() * 1000)
                    ran.latest = moment if ran.latest is None else max(ran.latest, moment)
        except PySparkException as e:
            raise spark_failure(str(e)) from e
        finally:
            checkpoint.remove()
        return ran

    def ranges(self, topics: Topics, end: Offsets) -> list[MessageRange]:
        """Return the messages of each partition that have been read, as a plain consumer receives them."""
        found: list[MessageRange] = []
        for topic in topics.described(end.keys()):
            first = self.first.get(topic.name, {})
            ends = {int(p): offset for p, offset in end[topic.name].items()}
            starts = {p: first.get(str(p), 0) for p in ends}
            some = {p: starts[p] for p in ends if starts[p] < ends[p]}
            counted = {p: MessageRange(topic.name, p, starts[p], ends[p], 0, 0) for p in ends}
            if some:
                counted |= {each.partition: each for each in ranges_of(topics.cluster, topic, some, ends)}
            found += [counted[p] for p in sorted(counted)]
        return found


@dataclass
class _Ran:
    """The results of a stream, and the latest time in its messages, in milliseconds since 1970."""

    tables: list[pa.Table] = field(default_factory=list)
    latest: int | None = None


def _texts(rows: DataFrame, table: Table, keyed: bool) -> pa.Table:
    schema = ", ".join(f"{name} string" for name in (*places_of(table), RESULT_OP))
    return by_place(rows, table).mapInArrow(TopicTexts(table, keyed), schema).toArrow()


def summed(hashes: pa.Table, keyed: bool, buckets: int) -> Mapping[int, Sequence[int]]:
    """Add up the hashes of :class:`.TopicHashes`, in the order of the rows.

    :param keyed: use only the last row of each key.
    """
    last = last_of_each(hashes, ["key"]) if keyed else hashes
    sums: dict[int, list[int]] = {}
    contents = np.stack([last[name].to_numpy() for name in ("first", "second")], axis=1)
    add_up(sums, last["hash"].to_numpy(), contents, buckets)
    return sums


def _at_last(texts: pa.Table, table: Table, keyed: bool) -> list[pa.RecordBatch]:
    if keyed:
        # Spark returns the partitions in order, as in the staging of a unit.
        last = last_texts(texts, table)
        texts = last.filter(pc.fill_null(pc.not_equal(last[RESULT_OP], "d"), True))
    columns = [column.name for column in table.columns]
    batches: list[pa.RecordBatch] = texts.select(places_of(table)).rename_columns(columns).combine_chunks().to_batches()
    return batches
