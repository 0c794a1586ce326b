"""The query over messages that have been read, once more: what a target should hold.

Most queries run as a batch over all of them. A query that gives a row once nothing changes it any more, as windows are
told when they are closed, runs as a stream: Spark closes windows in streams only. It takes all messages as one batch,
by which it comes to a watermark, and then gives what that closes. The sink has what had been closed by the watermark of
its last unit, which may be earlier than what all messages come to; the stream then runs again with the delay that leads
to just that watermark. Both watermarks are the latest time less the delay, see ``EventTimeWatermarkExec`` in Spark.
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
from airflow_cdc_provider.engine.sources.kafka.spark_failures import failure_of
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

    :param offsets: before which all has been read.
    :param watermark: of the last unit, in milliseconds since 1970: what ended before it was closed.
    """

    offsets: Offsets
    watermark: int


def reach_of(branch: Pipeline, checkpoint: Checkpoint) -> Reach:
    """How far a sink is by now."""
    position = RecordedTopics.of(existing_record(branch))
    batch = position.applied - position.base - 1
    return Reach(position.offsets, 0 if batch < 0 else checkpoint.watermark(batch))


@dataclass(frozen=True)
class Replay:
    """The query over messages that have been read.

    :param first: offsets at which they begin, of those that are still there.
    :param late: messages before these have been read, too.
    :param until: the offsets at which they end.
    :param reach: how far the sink is, which says what has been closed.
    :param passed: what the sink's record says at the moment of messages that are left out, as they were passed over, or
        as a truncate has taken them: a stream goes on meanwhile, and sinks may stand at different units.
    :param checkpoint: the pipeline's; what is needed of another one for a while stands beside it.
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
        """That of all messages which a pipeline has read."""
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
        """The rows of the result as texts, under the names of the target's columns.

        :param keyed: of each key the last one, unless that says that the row is gone.
        """
        with self._queried() as found:
            texts = _texts(found, target.table, keyed)
        yield from _at_last(texts, target.table, keyed)

    def sums(self, target: Target, buckets: int) -> Mapping[int, Sequence[int]]:
        """The sums of the rows' hashes, see :func:`.hash_sums.add_up`; of each key, if there is one, the last row.

        Messages have to tell whole rows.
        """
        table = target.table
        with self._queried() as found:
            hashes = by_place(found, table).mapInArrow(TopicHashes(table), HASHES).toArrow()
        return summed(hashes, bool(table.key), buckets)

    @contextmanager
    def _queried(self) -> Iterator[DataFrame]:
        """The rows of the result, with what Spark fails with told as ours."""
        end, passed = self.until(), self.passed()
        raw = behind_truncates(message_view.raw_range(self.spark, self.source, self.first, end), passed.truncated)
        try:
            yield result(self.spark, self.source, without(raw, passed.skipped))
        except PySparkException as e:
            raise failure_of(str(e)) from e

    def closed_rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """As :meth:`rows`, of what nothing changes any more."""
        reach, skips = self.reach(), self.passed().skipped
        texts_of = partial(_texts, table=target.table, keyed=keyed)
        ran = self._run(reach.offsets, self.source, skips, texts_of)
        column, delay = self.source.watermark
        if column and ran.latest is not None and ran.latest - round(delay * 1000) > reach.watermark:
            longer = replace(self.source, watermark=(column, (ran.latest - reach.watermark) / 1000))
            ran = self._run(reach.offsets, longer, skips, texts_of)
        if ran.told:
            yield from _at_last(pa.concat_tables(ran.told), target.table, keyed)

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
                .foreachBatch(lambda found, _: ran.told.append(texts_of(found)))
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
            raise failure_of(str(e)) from e
        finally:
            checkpoint.remove()
        return ran

    def ranges(self, topics: Topics, end: Offsets) -> list[MessageRange]:
        """The messages of each partition that have been read, as a plain consumer gets them."""
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
    """What a stream has told, and the latest time that it has seen, in milliseconds since 1970."""

    told: list[pa.Table] = field(default_factory=list)
    latest: int | None = None


def _texts(rows: DataFrame, table: Table, keyed: bool) -> pa.Table:
    schema = ", ".join(f"{name} string" for name in (*places_of(table), RESULT_OP))
    return by_place(rows, table).mapInArrow(TopicTexts(table, keyed), schema).toArrow()


def summed(hashes: pa.Table, keyed: bool, buckets: int) -> Mapping[int, Sequence[int]]:
    """Add up what :class:`.TopicHashes` has made, in the order of the rows.

    :param keyed: of each key the last row.
    """
    last = last_of_each(hashes, ["key"]) if keyed else hashes
    sums: dict[int, list[int]] = {}
    contents = np.stack([last[name].to_numpy() for name in ("first", "second")], axis=1)
    add_up(sums, last["hash"].to_numpy(), contents, buckets)
    return sums


def _at_last(texts: pa.Table, table: Table, keyed: bool) -> list[pa.RecordBatch]:
    if keyed:
        # Spark has put the partitions one after the other, as the stage of a unit does.
        last = last_texts(texts, table)
        texts = last.filter(pc.fill_null(pc.not_equal(last[RESULT_OP], "d"), True))
    columns = [column.name for column in table.columns]
    batches: list[pa.RecordBatch] = texts.select(places_of(table)).rename_columns(columns).combine_chunks().to_batches()
    return batches
