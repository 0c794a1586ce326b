"""Whether targets hold what the query makes of the messages that have been read, and which keys differ.

The messages from where the pipeline began up to the record's offsets are read once more, as a batch, and go through the
same query. What comes out is one side of a comparison as :mod:`.engine.verify` makes it, and the sink's rows are the
other. While a stream runs, messages are read up to the ends of their topics, and keys that differ are read again until
they come to rest.

A changelog has one event for each row of the result, so the two are compared row by row, copies counted. Where a key is
told again (a window that has changed, an update of Debezium's), the row that each key has at last is compared.

Of two things only one direction can be known. A window that is told once it is closed does not stand in the target
before: such rows of the batch are left out. And where retention has removed messages that had been read, so are rows of
the target that none of those still there has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import UnknownTable
from airflow_cdc_provider.engine.kafka.ranges import MessageRange
from airflow_cdc_provider.engine.row_side import Rowset, RowSide, changelog_rows, keyed_rows, mirror_rows
from airflow_cdc_provider.engine.run import existing_record, sink_of
from airflow_cdc_provider.engine.session import spark_session
from airflow_cdc_provider.engine.sides import Sides
from airflow_cdc_provider.engine.sinks.base import Target
from airflow_cdc_provider.engine.slot import wait_until
from airflow_cdc_provider.engine.topics import messages
from airflow_cdc_provider.engine.topics.cluster import Topics, behind, reached
from airflow_cdc_provider.engine.topics.gate import pass_gate
from airflow_cdc_provider.engine.topics.job import failure_of
from airflow_cdc_provider.engine.topics.position import Position
from airflow_cdc_provider.engine.topics.query import Shape, output_of, result, shape_of
from airflow_cdc_provider.engine.topics.settings import Offsets, TopicSource
from airflow_cdc_provider.engine.topics.stage import RESULT_OP, TopicTexts, key_of, last_of_each
from airflow_cdc_provider.engine.verify import PASS_TIMEOUT, Report, compare_sides, not_reached

Shaped: TypeAlias = Callable[[Target, Iterable[pa.RecordBatch]], Iterator[Rowset]]

_BUCKETS = 1 << 10


def verify(pipeline: Pipeline, live: bool, report: Report) -> dict[str, Any]:
    """Compare the result of the query with what the sinks have, see :func:`.commands.verify`.

    :param live: a stream runs.
    :returns: also ``ranges``, the messages that were compared, see :class:`.MessageRange`; and ``begins_late``, whether
        retention has removed some that had been read.
    """
    assert pipeline.topics is not None
    topics = Topics(pipeline.topics)
    tables: list[dict[str, Any]] = []
    not_compared: set[str] = set()
    with spark_session(pipeline, "verify") as spark:
        shape = shape_of(spark, pipeline)
        slowest = min((Position.of(existing_record(branch)) for branch in pipeline.branches), key=lambda p: p.applied)
        pass_gate(topics, slowest)
        replay = Replay.of(spark, topics, slowest)
        for branch in pipeline.branches:
            way = _way_of(branch, shape)
            (target,) = existing_record(branch).targets
            if way is None:
                not_compared.add(target.table.label)
                continue
            catch_up = partial(_catch_up, branch, topics) if live else None
            until = topics.ends if live else partial(_read, branch)
            opened = partial(_sides, branch, replace(replay, until=until), way)
            (found,) = compare_sides([target], opened, catch_up, report)
            place = {"sink": branch.sink.place} if len(pipeline.sinks) > 1 else {}
            tables.append(found.as_dict(sink_of(branch), target) | place)
        ranges = replay.ranges(slowest.offsets)
    return {
        "equal": all(table["equal"] for table in tables),
        "tables": tables,
        "live": live,
        "lag_bytes": None,
        "lag_messages": behind(slowest.offsets, topics.ends()),
        "not_compared": sorted(not_compared),
        "ranges": [each.as_dict() for each in ranges],
        "begins_late": replay.late,
    }


@dataclass(frozen=True)
class Way:
    """How the two sides are made alike.

    :param keyed: the row that each key has at last is compared, otherwise all rows with their copies.
    :param source, target: what makes rows comparable.
    :param closing: windows come once they are closed.
    """

    keyed: bool
    source: Shaped
    target: Shaped
    closing: bool


def _way_of(branch: Pipeline, shape: Shape) -> Way | None:
    """How a sink is compared; ``None`` where events tell keys again, and there is no key to go by."""
    output = output_of(branch)
    closing = shape.stateful and output == "append"
    if branch.sink.mode == "mirror":
        return Way(True, mirror_rows, mirror_rows, closing)
    if not shape.told and (closing or not shape.stateful):
        return Way(False, mirror_rows, mirror_rows, closing)
    return Way(True, keyed_rows, changelog_rows, closing) if shape.table.key else None


@dataclass(frozen=True)
class Replay:
    """The query over messages that have been read.

    :param first: offsets at which they begin, of those that are still there.
    :param late: messages before these have been read, too.
    :param until: the offsets at which they end.
    """

    spark: SparkSession
    source: TopicSource
    first: Offsets
    late: bool
    until: Callable[[], Offsets]

    @classmethod
    def of(cls, spark: SparkSession, topics: Topics, position: Position) -> Replay:
        """That of all messages which a pipeline has read."""
        there = topics.beginnings(topics.described(position.offsets.keys()))
        begun = {
            topic: {p: position.begun.get(topic, {}).get(p, 0) for p in partitions}
            for topic, partitions in there.items()
        }
        first = {topic: {p: max(begun[topic][p], n) for p, n in found.items()} for topic, found in there.items()}
        return cls(spark, topics.source, first, first != begun, lambda: position.offsets)

    def rows(self, keyed: bool, target: Target, keys: object = None) -> Iterator[pa.RecordBatch]:
        """The rows of the result as texts, under the names of the target's columns.

        :param keyed: of each key the last one, unless that says that the row is gone.
        """
        table = target.table
        raw = messages.raw_range(self.spark, self.source, self.first, self.until())
        names = [f"c{i}" for i in range(len(table.columns))]
        try:
            found = result(self.spark, self.source, raw)
            schema = ", ".join(f"{name} string" for name in (*names, RESULT_OP))
            texts = found.mapInArrow(TopicTexts(table, keyed), schema).toArrow()
        except PySparkException as e:
            raise failure_of(str(e)) from e
        if keyed:
            # Spark has put the partitions one after the other, as the stage of a unit does.
            last = last_of_each(texts, key_of(table))
            texts = last.filter(pc.fill_null(pc.not_equal(last[RESULT_OP], "d"), True))
        columns = [column.name for column in table.columns]
        yield from texts.select(names).rename_columns(columns).combine_chunks().to_batches()

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


def _sides(branch: Pipeline, replay: Replay, way: Way, target: Target) -> AbstractContextManager[Sides]:
    sink = sink_of(branch)
    if sink.missing([target]):
        raise UnknownTable(
            f"the target {target.schema}.{target.name} is gone",
            "Run `airflow-cdc drop`, then `airflow-cdc run`: it begins again from the first messages.",
        )
    compared = target if way.keyed else replace(target, table=replace(target.table, key=()))
    made = RowSide(compared, partial(replay.rows, way.keyed), way.source)
    found = RowSide(compared, sink.rows, way.target)
    return nullcontext(
        Sides(
            target.table,
            replace(made, shaped=_Within(made.shaped, found)) if way.closing else made,
            replace(found, shaped=_Within(found.shaped, made)) if replay.late else found,
            _BUCKETS,
        )
    )


@dataclass(frozen=True)
class _Within:
    """Leaves out rows whose key the other side does not have."""

    shaped: Shaped
    other: RowSide

    def __call__(self, target: Target, batches: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
        other = self.other
        there = {
            text for rowset in other.shaped(other.target, other.rows(other.target, None)) for text in rowset.key_texts
        }
        for rowset in self.shaped(target, batches):
            kept = [i for i, text in enumerate(rowset.key_texts) if text in there]
            yield Rowset(
                [rowset.keys[i] for i in kept],
                [rowset.key_texts[i] for i in kept],
                [rowset.contents[i] for i in kept],
                [rowset.cells[i] for i in kept],
            )


def _read(branch: Pipeline) -> Offsets:
    return Position.of(existing_record(branch)).offsets


def _catch_up(branch: Pipeline, topics: Topics) -> None:
    """Wait until the sink has all messages that there are now."""
    ends = topics.ends()
    if not wait_until(lambda: reached(_read(branch), ends), PASS_TIMEOUT):
        raise not_reached(f"the ends of {topics.source.place}")
