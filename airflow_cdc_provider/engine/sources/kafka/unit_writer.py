"""Writes units of topics: turns Spark's batches into commits of the sinks, which change offsets together with rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import Accumulator
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sinks.staged import MissingValues, StagedPiece
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.bad_messages import Blame, stage_rows, unknown
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.message_order import require_unshuffled
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics, UnitNumber, with_truncates
from airflow_cdc_provider.engine.sources.kafka.query import lineage_in
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings, topic_settings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import without
from airflow_cdc_provider.engine.sources.kafka.topics import Topics
from airflow_cdc_provider.engine.sources.kafka.truncate_messages import Truncates

# The topic decides whether a message is too large, not the producer, whose own limit is one MiB.
_WHATEVER_SIZE = {"kafka.max.request.size": str(1 << 30), "kafka.buffer.memory": str(1 << 30)}


@dataclass
class _Branch:
    """A sink, and the last unit that it has."""

    run: Run
    applied: UnitNumber


class TopicUnitWriter:
    """Writes batches to all sinks of a run, one after the other.

    :param position: the position of the sink that has least.
    :param base: number of the last unit before the query's first batch.
    :param missed: see :class:`.AvroTexts`.
    :param in_order: rows must be in the order of their messages, see :mod:`.message_order`. :ivar applied: number of
        the last unit that all sinks have. :ivar position: the current position in the records. :ivar changes: number of
        committed rows of the query. :ivar tables: the same by table. :ivar dead_letters: number of messages written to
        another topic. :ivar seconds: seconds spent in batches with rows. :ivar batch_seconds: seconds of the last of
        them.
    """

    def __init__(
        self,
        spark: SparkSession,
        run: Run,
        position: RecordedTopics,
        base: int,
        checkpoint: Checkpoint,
        missed: Accumulator[frozenset[int]],
        in_order: bool,
    ) -> None:
        self.position = position
        self.changes = 0
        self.tables: Counter[str] = Counter()
        self.dead_letters = 0
        self.seconds = 0.0
        self.batch_seconds: float | None = None
        self._spark = spark
        self._run = run
        self._base = base
        self._checkpoint = checkpoint
        self._missed = missed
        self._in_order = in_order
        self._branches = [_Branch(branch, existing_record(branch.pipeline).applied) for branch in run.branches]
        (target,) = existing_record(run.branches[0].pipeline).targets
        self._table = target.table

    @property
    def applied(self) -> UnitNumber:
        """Return the number of the last unit that all sinks have."""
        return min(branch.applied for branch in self._branches)

    def write_batch(self, rows: DataFrame, batch: int) -> None:
        """Write a batch to all sinks that do not have it yet.

        The batch is always computed, because otherwise Spark would lack the state for the next one.

        :param rows: the result of the query.
        :param batch: Spark's number of the batch.
        :raises CdcError: when the batch cannot be written to a sink; other sinks may have it then.
        """
        started = time.monotonic()
        unit, offsets = UnitNumber(self._base + batch + 1), self._checkpoint.offsets(batch)
        self._missed.value = frozenset()
        noted = RecordedTopics.noted(offsets, self._checkpoint.id(), self._base, self._topics(offsets))
        if self._in_order:
            require_unshuffled(rows)
        truncates = Truncates(self._spark, self._run, self._source, self._table, self.position, self._missed)
        applied = [branch.applied for branch in self._branches]
        beginning = partial(self._beginning, offsets)
        with truncates.noticed(beginning, offsets, unit, applied), self._blaming(offsets, unit):
            staged = self._staged(rows, unit, batch)
            if self.position.truncates:
                noted |= {"truncates": (), "truncated": self.position.floors}
                staged = [
                    [replace(piece, index=n) for n, piece in enumerate([*truncates.staged(branch.run, unit), *found])]
                    for branch, found in zip(self._branches, staged, strict=True)
                ]
        # Each attempt writes these messages again, so write them once only the commit can still fail. The rows come
        # first because they determine which messages cannot be read.
        dead_letters = self._write_dead_letters(offsets) if unit > self.applied else 0
        with self._blaming(offsets, unit):
            pieces = [
                self._commit(branch, unit, found, noted) for branch, found in zip(self._branches, staged, strict=True)
            ]
        failpoint("before-spark-commit")
        self.position = replace(self.position, applied=self.applied, **noted)
        self.dead_letters += dead_letters
        self._count(max(pieces, key=lambda each: sum(piece.changes for piece in each)), started)

    def _staged(self, rows: DataFrame, unit: UnitNumber, batch: int) -> list[list[StagedPiece]]:
        """Stage a batch for all sinks."""
        if len(self._branches) > 1:
            rows = rows.persist()
        try:
            segment = len(self.position.truncates)
            return [stage_rows(branch.run, rows, self._table, str(batch), unit, segment) for branch in self._branches]
        finally:
            if len(self._branches) > 1:
                rows.unpersist()

    @contextmanager
    def _blaming(self, offsets: Offsets, unit: UnitNumber) -> Iterator[None]:
        """Attribute a failure to messages, unless a sink already has the unit and thus has accepted its messages."""
        try:
            yield
        except (CdcError, MissingValues, PySparkException, Py4JJavaError) as e:
            verdict = self._verdict(e, offsets, unit)
            if verdict is None:
                raise
            raise verdict from e

    def _verdict(self, failure: Exception, offsets: Offsets, unit: UnitNumber) -> CdcError | None:
        applied = any(branch.applied >= unit for branch in self._branches)
        end = with_truncates(offsets, self.position.floors)
        start = partial(self._beginning, end)
        blame = Blame(self._spark, self._run, self._source, self._table, self.position)
        if isinstance(failure, MissingValues):
            return unknown(failure) if applied else blame.lacking(failure, start, end, unit)
        return None if applied else blame.verdict(failure, start, end, unit)

    def _beginning(self, offsets: Offsets) -> Offsets:
        """Return the first offsets of a batch from its last ones; new topics and partitions begin at their first
        message.
        """
        known = self.position.offsets
        new = {topic for topic, found in offsets.items() if found.keys() - known.get(topic, {}).keys()}
        topics = Topics(self._source)
        first = topics.beginnings(topics.described(new)) if new else {}
        return {topic: {**first.get(topic, {}), **known.get(topic, {})} for topic in offsets}

    def _commit(
        self, branch: _Branch, unit: UnitNumber, staged: list[StagedPiece], noted: Mapping[str, Any]
    ) -> list[StagedPiece]:
        """Commit a batch, and return the pieces that the sink did not have yet."""
        run = branch.run
        committed = run.sink.commit(run.epoch, UnitNumber(unit - 1), unit, staged, noted)
        branch.applied = max(branch.applied, unit)
        return staged if committed else []

    def _count(self, pieces: list[StagedPiece], started: float) -> None:
        gained = sum(piece.changes for piece in pieces)
        if gained:
            self.changes += gained
            for piece in pieces:
                self.tables.update(piece.changes_by_table)
            self.batch_seconds = time.monotonic() - started
            self.seconds += self.batch_seconds
            self._run.history.batch(gained, self.batch_seconds, self.applied)
        self._run.lag.advance(self.applied)

    def _topics(self, offsets: Mapping[str, object]) -> Mapping[str, str]:
        """Return the ids of the topics that have been read; a pattern may match a new topic at any time."""
        known = self.position.topics
        new = offsets.keys() - known.keys()
        return {**known, **{topic.name: topic.id for topic in Topics(self._source).described(new)}} if new else known

    def _write_dead_letters(self, offsets: Mapping[str, Mapping[str, int]]) -> int:
        """Write the batch's unreadable messages to their topic, before the unit, so that none is lost.

        If a unit is written again, after a crash or a failed commit, its messages are written again. Their headers
        identify copies.
        """
        source, position = self._source, self.position
        start, end = with_truncates(position.offsets, position.truncated), with_truncates(offsets, position.floors)
        if not source.dead_letters or start == end:
            return 0
        raw = message_view.raw_range(self._spark, source, start, end)
        skips = [each for each in position.skipped if each.within(start, end)]
        lineage = lineage_in(self._spark, source)
        bad = message_view.dead_letter_rows(without(raw, skips), source, lineage, self._missed.value)
        if skips:
            bad = bad.union(message_view.set_aside(raw, skips))
        bad = bad.persist()
        try:
            count = bad.count()
            if count:
                options = {**_WHATEVER_SIZE, **source.client_options, "topic": source.dead_letters}
                bad.write.format("kafka").options(**options).save()
        finally:
            bad.unpersist()
        return count

    @property
    def _source(self) -> TopicSettings:
        return topic_settings(self._run.pipeline)


def records_of(run: Run) -> list[Record]:
    """Return the commit records of all sinks of a run."""
    return [existing_record(branch.pipeline) for branch in run.branches]
