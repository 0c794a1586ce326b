"""Truncates that messages of Debezium's tell: what they do to a target whose topic has several partitions.

A truncate empties the table between two changes of its log, and a topic has only an order within each partition. It can
be followed where every partition has it, as the sink for Kafka writes it, in one transaction: in each partition, what
stands before it is gone by it, and what stands behind it came later.

A unit may reach it in one partition and not in others. So the unit that comes to it first ends with a failure; where it
stands in all partitions is noted in the sinks' records, and the query begins again behind it in all of them. The unit
then begins with the truncate. A mirror has no need of what stood before it; a changelog gets that first, from all
partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import Accumulator
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.effect import OP, Effect
from airflow_cdc_provider.engine.core.errors import BadRecord
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.bad_messages import SetAside, emptying, stage_effect, stage_rows
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics, UnitNumber, behind_truncates
from airflow_cdc_provider.engine.sources.kafka.query import result
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import without
from airflow_cdc_provider.engine.sources.kafka.spark_failures import failure_of
from airflow_cdc_provider.engine.sources.kafka.staging_task import SEGMENT_BITS, SEGMENTS
from airflow_cdc_provider.engine.sources.kafka.topics import Topics

_VISIBLE_SECONDS = 15.0
"""How long a transaction's other partitions are waited for: brokers show them one after the other."""


class Truncating(SetAside):
    """The query begins again behind a truncate, which the next unit begins with."""


@dataclass(frozen=True)
class Truncates:
    """Follows truncates, for the units of a run.

    :param position: with the truncates that the next unit begins with.
    :param missed: see :class:`.AvroTexts`.
    """

    spark: SparkSession
    run: Run
    source: TopicSettings
    table: Table
    position: RecordedTopics
    missed: Accumulator[frozenset[int]]

    @contextmanager
    def noticed(
        self, start: Callable[[], Offsets], end: Offsets, unit: UnitNumber, applied: Sequence[UnitNumber]
    ) -> Iterator[None]:
        """Stage a unit, and if it comes to a truncate, note where that stands in all partitions.

        :param start: tells the offsets from which on the unit's messages are.
        :param end: the offsets before which they are.
        :param applied: the last unit of each of the run's sinks.
        :raises Truncating: when it has been noted.
        :raises BadRecord: when it cannot be followed.
        """
        try:
            yield
        except (PySparkException, Py4JJavaError, message_view.Truncated) as e:  # the last from a part that was tried
            met = e if isinstance(e, message_view.Truncated) else failure_of(str(e))
            if not isinstance(met, message_view.Truncated):
                raise
            found = [*self.position.truncates, *self._found(met, start(), end)]
            for branch, last in zip(self.run.branches, applied, strict=True):
                if last < unit:
                    branch.sink.note_source(branch.epoch, {"truncates": found})
            place = f"message {met.offset} of {met.topic}[{met.partition}]"
            raise Truncating(f"{place} is a truncate", "The query begins again behind it.") from e

    def staged(self, run: Run, unit: UnitNumber) -> list[StagedPiece]:
        """Stage for a sink what a unit begins with, by the truncates that are noted."""
        pieces: list[StagedPiece] = []
        start, floors = self.position.offsets, self.position.truncated
        for number, truncate in enumerate(self.position.truncates):
            if run.sink.mode == "changelog":
                raw = message_view.raw_range(self.spark, self.source, _within(start, truncate), truncate)
                raw = without(behind_truncates(raw, floors), self.position.skipped)
                rows = result(self.spark, self.source, raw, self.missed)
                pieces += stage_rows(run, rows, self.table, f"{unit}_before{number}", unit, number)
                pieces.append(stage_effect(run, unit, _event(self.table, unit, number)))
                start = floors = truncate
        if run.sink.mode == "mirror" and self.position.truncates:
            pieces.append(stage_effect(run, unit, emptying(self.table)))
        return pieces

    def _found(self, met: message_view.Truncated, start: Offsets, end: Offsets) -> list[Offsets]:
        """Find the offsets of a unit's truncates in all partitions, in their order."""
        topics = Topics(self.source)
        if len(end) > 1:
            raise _refused(met, "the target holds rows of other topics, too")
        there = topics.described(end.keys())
        wanted = {str(p) for topic in there for p in range(topic.partitions)}
        found = self._read(start, end)
        known = found.keys()

        def all_there() -> bool:
            ahead = self._read(end, topics.ends(there)) if any(wanted - each.keys() for each in found.values()) else {}
            for name in known & ahead.keys():
                found[name] = {**ahead[name], **found[name]}
            return all(wanted <= each.keys() for each in found.values())

        if not await_condition(all_there, _VISIBLE_SECONDS, 1.0):
            raise _refused(met, "it does not stand in every partition, and its order among their changes is unknown")
        first = min(wanted, key=int)
        ordered: list[Mapping[str, int]] = sorted(found.values(), key=lambda each: each[first])
        return [{met.topic: each} for each in ordered[:SEGMENTS]]

    def _read(self, start: Offsets, end: Offsets) -> dict[str, dict[str, int]]:
        """Read where truncates stand, by what tells them apart."""
        raw = without(message_view.raw_range(self.spark, self.source, _within(start, end), end), self.position.skipped)
        found: dict[str, dict[str, int]] = {}
        for row in message_view.truncates(behind_truncates(raw, self.position.floors), self.source).collect():
            found.setdefault(row.identity, {})[str(row.partition)] = row.offset
        return found


def _within(start: Offsets, end: Offsets) -> Offsets:
    """Return offsets to read from, none behind that to which is read."""
    return {
        topic: {p: min(start.get(topic, {}).get(p, 0), last) for p, last in partitions.items()}
        for topic, partitions in end.items()
    }


def _event(table: Table, unit: UnitNumber, number: int) -> Effect:
    """Return the event of a changelog."""
    numbers = {"commit_lsn": unit, "seq": ((number + 1) << SEGMENT_BITS) - 1, "xid": unit & 0xFFFFFFFF}
    numbers["commit_ts"] = time.time_ns() // 1000
    columns = {f"c{i}": pa.nulls(1, pa.large_string()) for i in range(len(table.columns))}
    told = {name: pa.array([value], pa.int64()) for name, value in numbers.items()}
    return Effect(table.label, False, pa.table({OP: ["t"], **told, **columns}))


def _refused(met: message_view.Truncated, why: str) -> BadRecord:
    what = f"message {met.offset} of {met.topic}[{met.partition}] is a truncate that cannot be followed: {why}"
    return BadRecord(
        what,
        "Nothing of its batch was applied. To leave the rows where they are: `airflow-cdc skip --topic"
        f" {met.topic} --partition {met.partition} --offset {met.offset}`. Otherwise run `airflow-cdc drop`, empty the"
        " target, and begin behind the truncate (source.starting: latest), at a new snapshot of the connector's.",
        what,
    )
