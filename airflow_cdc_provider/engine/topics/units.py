"""Units of topics: how batches of Spark become commits of the sinks, in which the offsets change with the rows."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark import Accumulator
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.errors import CdcError
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.run import Run, existing_record
from airflow_cdc_provider.engine.sinks.base import Record, StagedPiece
from airflow_cdc_provider.engine.topics import messages
from airflow_cdc_provider.engine.topics.checkpoint import Checkpoint
from airflow_cdc_provider.engine.topics.cluster import Topics
from airflow_cdc_provider.engine.topics.position import Position
from airflow_cdc_provider.engine.topics.settings import TopicSource
from airflow_cdc_provider.engine.topics.stage import TopicStage


@dataclass
class _Branch:
    """A sink, and what it has."""

    run: Run
    applied: int


class TopicUnits:
    """Brings batches into all sinks of a run, one after the other.

    :param position: where the sink that has least is.
    :param base: number of the last unit before the query's first batch.
    :param missed: see :class:`.AvroTexts`.
    :ivar applied: number of the last unit that all sinks have.
    :ivar position: what the records say by now.
    :ivar changes: rows that the query has returned, committed.
    :ivar tables: the same by table.
    :ivar dead_letters: messages that were written to another topic.
    :ivar seconds: time spent in batches that held rows.
    :ivar batch_seconds: the last of them.
    """

    def __init__(
        self,
        spark: SparkSession,
        run: Run,
        position: Position,
        base: int,
        checkpoint: Checkpoint,
        missed: Accumulator[frozenset[int]],
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
        self._branches = [_Branch(branch, existing_record(branch.pipeline).applied) for branch in run.branches]
        (target,) = existing_record(run.branches[0].pipeline).targets
        self._table = target.table

    @property
    def applied(self) -> int:
        """Number of the last unit that all sinks have."""
        return min(branch.applied for branch in self._branches)

    def bring(self, rows: DataFrame, batch: int) -> None:
        """Bring a batch into all sinks; those that have it already leave it out.

        It is computed in any case: without that, Spark would have no state for the next one.

        :param rows: that the query returns.
        :param batch: Spark's number of it.
        :raises CdcError: when it cannot be brought into a sink; others may have it then.
        """
        started = time.monotonic()
        unit, offsets = self._base + batch + 1, self._checkpoint.offsets(batch)
        self._missed.value = frozenset()
        noted = Position.noted(offsets, self._checkpoint.id(), self._base, self._topics(offsets))
        if len(self._branches) > 1:
            rows = rows.persist()
        try:
            staged = [self._staged(branch.run, rows, unit, batch) for branch in self._branches]
        finally:
            if len(self._branches) > 1:
                rows.unpersist()
        # Once nothing but a commit can fail, as each attempt writes them again; and after the rows, as these decide
        # which messages cannot be read.
        buried = self._bury(offsets) if unit > self.applied else 0
        pieces = [
            self._commit(branch, unit, found, noted) for branch, found in zip(self._branches, staged, strict=True)
        ]
        failpoint("before-spark-commit")
        self.position = replace(self.position, applied=self.applied, **noted)
        self.dead_letters += buried
        self._count(max(pieces, key=lambda each: sum(piece.changes for piece in each)), started)

    def _staged(self, run: Run, rows: DataFrame, unit: int, batch: int) -> list[StagedPiece]:
        """Stage a batch for a sink."""
        stage = TopicStage(run.sink, run.epoch, f"{run.epoch}_{batch}", self._table, unit)
        found = [pickle.loads(row.message) for row in rows.mapInArrow(stage, "message binary").collect()]
        for message in found:
            if isinstance(message, CdcError):
                raise message
        return found

    def _commit(
        self, branch: _Branch, unit: int, staged: list[StagedPiece], noted: Mapping[str, Any]
    ) -> list[StagedPiece]:
        """Commit a batch; what of it the sink did not have yet."""
        run = branch.run
        committed = run.sink.commit(run.epoch, unit - 1, unit, staged, noted)
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
        """The ids of the topics that have been read; a pattern may match a new one any time."""
        known = self.position.topics
        new = offsets.keys() - known.keys()
        return {**known, **{topic.name: topic.id for topic in Topics(self._source).described(new)}} if new else known

    def _bury(self, offsets: Mapping[str, Mapping[str, int]]) -> int:
        """Write the batch's messages that cannot be read to the topic for them: before the unit, so that none is lost.

        A unit that is brought in again, after a crash or a commit that failed, has them written again; their headers
        tell which are one.
        """
        source = self._source
        if not source.dead_letters or offsets == self.position.offsets:
            return 0
        raw = messages.raw_range(self._spark, source, self.position.offsets, offsets)
        bad = messages.troubled(raw, source, self._missed.value).persist()
        try:
            count = bad.count()
            if count:
                bad.write.format("kafka").options(**source.client_options, topic=source.dead_letters).save()
        finally:
            bad.unpersist()
        return count

    @property
    def _source(self) -> TopicSource:
        source = self._run.pipeline.topics
        assert source is not None
        return source


def records_of(run: Run) -> list[Record]:
    """The commit records of all sinks of a run."""
    return [existing_record(branch.pipeline) for branch in run.branches]
