"""The query over messages that have been read, once more: what a target should hold.

Most queries run as a batch over all of them. A query that gives a row once nothing changes it any more, as windows are
told when they are closed, runs as a stream: Spark closes windows in streams only. It takes all messages as one batch,
by which it comes to a watermark, and then gives what that closes. The sink has what had been closed by the watermark of
its last unit, which may be earlier than what all messages come to; the stream then runs again with the delay that leads
to just that watermark. Both watermarks are the latest time less the delay, see ``EventTimeWatermarkExec`` in Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.kafka.ranges import MessageRange
from airflow_cdc_provider.engine.run import existing_record
from airflow_cdc_provider.engine.sinks.base import Target
from airflow_cdc_provider.engine.topics import messages
from airflow_cdc_provider.engine.topics.checkpoint import Checkpoint
from airflow_cdc_provider.engine.topics.cluster import Topics
from airflow_cdc_provider.engine.topics.job import failure_of
from airflow_cdc_provider.engine.topics.position import Position
from airflow_cdc_provider.engine.topics.query import result
from airflow_cdc_provider.engine.topics.settings import Offsets, TopicSource
from airflow_cdc_provider.engine.topics.stage import RESULT_OP, TopicTexts, key_of, last_of_each


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
    position = Position.of(existing_record(branch))
    batch = position.applied - position.base - 1
    return Reach(position.offsets, 0 if batch < 0 else checkpoint.watermark(batch))


@dataclass(frozen=True)
class Replay:
    """The query over messages that have been read.

    :param first: offsets at which they begin, of those that are still there.
    :param late: messages before these have been read, too.
    :param until: the offsets at which they end.
    :param reach: how far the sink is, which says what has been closed.
    :param checkpoint: the pipeline's; what is needed of another one for a while stands beside it.
    """

    spark: SparkSession
    source: TopicSource
    first: Offsets
    late: bool
    until: Callable[[], Offsets]
    reach: Callable[[], Reach]
    checkpoint: Checkpoint

    @classmethod
    def of(cls, spark: SparkSession, topics: Topics, position: Position, checkpoint: Checkpoint) -> Replay:
        """That of all messages which a pipeline has read."""
        there = topics.beginnings(topics.described(position.offsets.keys()))
        begun = {
            topic: {p: position.begun.get(topic, {}).get(p, 0) for p in partitions}
            for topic, partitions in there.items()
        }
        first = {topic: {p: max(begun[topic][p], n) for p, n in found.items()} for topic, found in there.items()}
        reach = Reach(position.offsets, 0)
        return cls(spark, topics.source, first, first != begun, lambda: position.offsets, lambda: reach, checkpoint)

    def rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """The rows of the result as texts, under the names of the target's columns.

        :param keyed: of each key the last one, unless that says that the row is gone.
        """
        raw = messages.raw_range(self.spark, self.source, self.first, self.until())
        try:
            texts = _texts(result(self.spark, self.source, raw), target.table, keyed)
        except PySparkException as e:
            raise failure_of(str(e)) from e
        yield from _at_last(texts, target.table, keyed)

    def closed_rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """As :meth:`rows`, of what nothing changes any more."""
        reach = self.reach()
        texts_of = partial(_texts, table=target.table, keyed=keyed)
        ran = self._run(reach.offsets, self.source, texts_of)
        column, delay = self.source.watermark
        if column and ran.latest is not None and ran.latest - round(delay * 1000) > reach.watermark:
            longer = replace(self.source, watermark=(column, (ran.latest - reach.watermark) / 1000))
            ran = self._run(reach.offsets, longer, texts_of)
        if ran.told:
            yield from _at_last(pa.concat_tables(ran.told), target.table, keyed)

    def _run(self, end: Offsets, source: TopicSource, texts_of: Callable[[DataFrame], pa.Table]) -> _Ran:
        ran = _Ran()
        checkpoint = Checkpoint(f"{self.checkpoint.url.rstrip('/')}-verify-{uuid.uuid4().hex}")
        try:
            rows = result(self.spark, source, messages.raw_stream_of_range(self.spark, source, self.first, end))
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

    def ranges(self, end: Offsets) -> list[MessageRange]:
        """The messages of each partition that have been read."""
        raw = messages.raw_range(self.spark, self.source, self.first, end)
        keys = f.sum(f.coalesce(f.crc32("key"), f.lit(0)))
        counted = raw.groupBy("topic", "partition").agg(f.count("*"), keys).collect()
        found = {(topic, str(p)): (count, total) for topic, p, count, total in counted}
        return [
            MessageRange(topic, int(p), self.first[topic][p], offset, *found.get((topic, p), (0, 0)))
            for topic, partitions in sorted(end.items())
            for p, offset in sorted(partitions.items(), key=lambda each: int(each[0]))
        ]


@dataclass
class _Ran:
    """What a stream has told, and the latest time that it has seen, in milliseconds since 1970."""

    told: list[pa.Table] = field(default_factory=list)
    latest: int | None = None


def _texts(rows: DataFrame, table: Table, keyed: bool) -> pa.Table:
    schema = ", ".join(f"{name} string" for name in (*_names(table), RESULT_OP))
    return rows.mapInArrow(TopicTexts(table, keyed), schema).toArrow()


def _at_last(texts: pa.Table, table: Table, keyed: bool) -> list[pa.RecordBatch]:
    if keyed:
        # Spark has put the partitions one after the other, as the stage of a unit does.
        last = last_of_each(texts, key_of(table))
        texts = last.filter(pc.fill_null(pc.not_equal(last[RESULT_OP], "d"), True))
    columns = [column.name for column in table.columns]
    batches: list[pa.RecordBatch] = texts.select(_names(table)).rename_columns(columns).combine_chunks().to_batches()
    return batches


def _names(table: Table) -> list[str]:
    return [f"c{i}" for i in range(len(table.columns))]
