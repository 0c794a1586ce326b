"""Applies Debezium's truncates to targets whose topic has several partitions.

A truncate empties the table between two changes of its log, but a topic is ordered only within each partition. A
truncate can be applied if every partition contains it in one transaction, as the Kafka sink writes it. In each
partition, messages before it are removed by it, and messages behind it are later.

A unit may reach the truncate in some partitions only. So the first unit that reaches it ends with a failure. Its
offsets in all partitions are noted in the sinks' records, and the query restarts behind it in all of them. The next
unit then begins with the truncate. A mirror does not need the messages before it; a changelog gets them first, from all
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
from airflow_cdc_provider.engine.sources.kafka.spark_failures import spark_failure
from airflow_cdc_provider.engine.sources.kafka.staging_task import SEGMENT_BITS, SEGMENTS
from airflow_cdc_provider.engine.sources.kafka.topics import Topics

_VISIBLE_SECONDS = 15.0
"""Seconds to wait for a transaction's other partitions, which brokers show one after the other."""


class Truncating(SetAside):
    """The query restarts behind a truncate, with which the next unit begins."""


@dataclass(frozen=True)
class Truncates:
    """Applies truncates, for the units of a run.

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
        """Run the staging of a unit; if it reaches a truncate, note its offsets in all partitions.

        :param start: returns the offsets of the unit's first messages.
        :param end: the offsets after its last messages.
        :param applied: the last unit of each of the run's sinks.
        :raises Truncating: when a truncate has been noted.
        :raises BadRecord: when the truncate cannot be applied.
        """
        try:
            yield
        except (PySparkException, Py4JJavaError, message_view.Truncated) as e:  # the last from a part that was tried
            met = e if isinstance(e, message_view.Truncated) else spark_failure(str(e))
            if not isinstance(met, message_view.Truncated):
                raise
            found = [*self.position.truncates, *self._found(met, start(), end)]
            for branch, last in zip(self.run.branches, applied, strict=True):
                if last < unit:
                    branch.sink.record_source(branch.epoch, {"truncates": found})
            place = f"message {met.offset} of {met.topic}[{met.partition}]"
            raise Truncating(f"{place} is a truncate", "No action is needed: the query restarts behind it.") from e

    def staged(self, run: Run, unit: UnitNumber) -> list[StagedPiece]:
        """Stage the beginning of a unit for a sink, with the noted truncates."""
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
        """Return the offsets of a unit's truncates in all partitions, in order."""
        topics = Topics(self.source)
        if len(end) > 1:
            raise _refused(met, "the target also contains rows of other topics")
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
            raise _refused(met, "it is missing from some partitions, so its order among their changes is unknown")
        first = min(wanted, key=int)
        ordered: list[Mapping[str, int]] = sorted(found.values(), key=lambda each: each[first])
        return [{met.topic: each} for each in ordered[:SEGMENTS]]

    def _read(self, start: Offsets, end: Offsets) -> dict[str, dict[str, int]]:
        """Return the offsets of truncates, by the text that identifies each."""
        raw = without(message_view.raw_range(self.spark, self.source, _within(start, end), end), self.position.skipped)
        found: dict[str, dict[str, int]] = {}
        for row in message_view.truncates(behind_truncates(raw, self.position.floors), self.source).collect():
            found.setdefault(row.identity, {})[str(row.partition)] = row.offset
        return found


def _within(start: Offsets, end: Offsets) -> Offsets:
    """Return offsets to read from, none after the offset to read to."""
    return {
        topic: {p: min(start.get(topic, {}).get(p, 0), last) for p, last in partitions.items()}
        for topic, partitions in end.items()
    }


def _event(table: Table, unit: UnitNumber, number: int) -> Effect:
    """Return the event of a truncate for a changelog."""
    numbers = {"commit_lsn": unit, "seq": ((number + 1) << SEGMENT_BITS) - 1, "xid": unit & 0xFFFFFFFF}
    numbers["commit_ts"] = time.time_ns() // 1000
    columns = {f"c{i}": pa.nulls(1, pa.large_string()) for i in range(len(table.columns))}
    fields = {name: pa.array([value], pa.int64()) for name, value in numbers.items()}
    return Effect(table.label, False, pa.table({OP: ["t"], **fields, **columns}))


def _refused(met: message_view.Truncated, why: str) -> BadRecord:
    what = f"message {met.offset} of {met.topic}[{met.partition}] is a truncate that cannot be applied: {why}"
    return BadRecord(
        what,
        "Nothing of its batch was applied. To keep the rows, run `airflow-cdc skip --topic"
        f" {met.topic} --partition {met.partition} --offset {met.offset}`. Otherwise run `airflow-cdc drop`, empty the"
        " target, and begin behind the truncate (source.starting: latest) with a new snapshot by the connector.",
        what,
    )
