"""Finds the messages that make a unit fail, and sets them aside or names them.

Parts of the unit run through the query as a batch, without the state of other units, and are staged in all sinks. Sinks
that can rehearse a commit do so. This finds messages that fail alone. If the query keeps state, this is a message whose
row or group is refused. A failure that only the accumulated state causes, such as a sum that becomes too large, cannot
be attributed to a message.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TypeVar

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from airflow_cdc_provider.engine.core.effect import ERASED, Effect
from airflow_cdc_provider.engine.core.errors import (
    BadRecord,
    CdcError,
    LimitExceeded,
    StreamFailed,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sinks.contract import Rehearsing
from airflow_cdc_provider.engine.sinks.staged import MissingValues, StagedPiece
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.culprits import Culprit, UnitMessages, culprits, first_failing_message
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics, UnitNumber, behind_truncates
from airflow_cdc_provider.engine.sources.kafka.query import result
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, noted, without
from airflow_cdc_provider.engine.sources.kafka.spark_failures import CORRECT, spark_failure
from airflow_cdc_provider.engine.sources.kafka.staging_task import TopicStagingTask, by_place

MOST = 20
"""Maximum number of messages of a unit to set aside. If more are refused, the messages are probably not at fault."""
_OF_VALUES = (ValueRefused, LimitExceeded)
# A conflict may also be caused by a trigger or by a constraint between rows, so a person has to decide.
_REFUSALS = (*_OF_VALUES, TargetConflict)

E = TypeVar("E", CdcError, MissingValues)


class SetAside(StreamFailed):
    """Messages have been marked as skipped in the sinks' records: the query restarts without them."""


def stage_rows(
    run: Run, rows: DataFrame, table: Table, name: str, unit: UnitNumber, segment: int = 0
) -> list[StagedPiece]:
    """Stage the rows of the query for a sink.

    :param name: a name that no other attempt of a unit has.
    :param segment: see :class:`.TopicStagingTask`.
    :raises CdcError: the error of a task that was refused.
    """
    stage = TopicStagingTask(run.sink, run.epoch, f"{run.epoch}_{name}", table, unit, segment, run.pipeline.transform)
    messages = by_place(rows, table).mapInArrow(stage, "message binary").collect()
    found = [pickle.loads(row.message) for row in messages]
    for message in found:
        if isinstance(message, CdcError):
            raise message
    return found


def stage_effect(run: Run, unit: UnitNumber, effect: Effect) -> StagedPiece:
    """Stage the effect of a truncate for a sink."""
    staged = run.sink.stage(run.epoch, f"{run.epoch}_{unit}_truncate_{uuid.uuid4().hex[:8]}", [effect])
    return StagedPiece("", "", 0, 0, b"", tuple(staged), frozenset(), LOG_START)


def emptying(table: Table) -> Effect:
    """Return the effect of a truncate on a mirror."""
    columns = {f"c{i}": pa.array([], pa.large_string()) for i in range(len(table.columns))}
    return Effect(table.label, True, pa.table({ERASED: pa.array([], pa.bool_())} | columns))


@dataclass(frozen=True)
class Blame:
    """Finds the messages that make a unit fail.

    :param position: the position at which the unit begins, with its truncates and skipped messages.
    """

    spark: SparkSession
    run: Run
    source: TopicSettings
    table: Table
    position: RecordedTopics
    _numbers: Iterator[int] = field(default_factory=count)

    def verdict(
        self, failure: Exception, start: Callable[[], Offsets], end: Offsets, unit: UnitNumber
    ) -> CdcError | None:
        """Return why a unit fails: messages set aside or named; ``None`` for any other cause.

        :param start: returns the offsets of the unit's first messages.
        :param end: the offsets after its last messages.
        :raises CdcError: when a part of the unit fails for another reason.
        """
        error = _error_of(failure)
        if not isinstance(error, _REFUSALS) or self.run.stopping:
            return None
        whole = UnitMessages.between(start(), end)
        skips: list[Skip] = []
        for each in culprits(whole, partial(self._failure, unit, CdcError)):
            if each.part.size > 1:
                return _together(each.part, each.error)
            skips.append(_skip(each))
            if not self.source.dead_letters or not isinstance(each.error, _OF_VALUES) or len(skips) > MOST:
                return _named(skips[0] if len(skips) > MOST else skips[-1])
        if not skips:
            return _together(whole, error)
        for branch in self.run.branches:
            branch.sink.record_source(branch.epoch, noted([*self.position.skipped, *skips]))
        places = ", ".join(each.place for each in skips)
        return SetAside(
            f"messages are written to {self.source.dead_letters}: {places}",
            "No action is needed: the query restarts without them.",
        )

    def lacking(
        self, missing: MissingValues, start: Callable[[], Offsets], end: Offsets, unit: UnitNumber
    ) -> BadRecord:
        """Return the error for updates with omitted values of rows that neither unit nor target has completely.

        :param start, end: see :meth:`verdict`.
        :raises CdcError: when a part of the unit fails for another reason.
        """
        if self.run.stopping or not any(isinstance(branch.sink, Rehearsing) for branch in self.run.branches):
            return unknown(missing)
        found = first_failing_message(UnitMessages.between(start(), end), partial(self._failure, unit, MissingValues))
        return unknown(missing) if found is None else unknown(found[1], found[0])

    def _failure(self, unit: UnitNumber, kind: type[E], part: UnitMessages) -> E | None:
        """Return the failure of a part of a unit if it is of this kind; others may stem from missing context."""
        try:
            self._rehearse(part, unit)
        except (MissingValues, CdcError, PySparkException, Py4JJavaError) as e:
            error = e if isinstance(e, MissingValues) else _error_of(e)
            if not isinstance(error, (MissingValues, *_REFUSALS)):
                raise error from e
            return error if isinstance(error, kind) else None
        return None

    def _rehearse(self, part: UnitMessages, unit: UnitNumber) -> None:
        """Run the reversible steps of a part of a unit."""
        self.run.check()
        if self.run.stopping:
            raise StreamFailed("the stream has been stopped", "Start it again: it continues from the last commit.")
        for branch in self.run.branches:
            rows = result(self.spark, self.source, self._messages(part, branch))
            staged = stage_rows(branch, rows, self.table, f"{unit}_try{next(self._numbers)}", unit)
            if isinstance(branch.sink, Rehearsing):
                branch.sink.rehearse(branch.epoch, [*self._first(branch, unit), *staged])

    def _first(self, branch: Run, unit: UnitNumber) -> list[StagedPiece]:
        """Return the first piece of a mirror, which empties it, so that rows deleted by then cannot cause refusals."""
        if branch.sink.mode != "mirror" or not self.position.truncates:
            return []
        return [replace(stage_effect(branch, unit, emptying(self.table)), index=-1)]

    def _messages(self, part: UnitMessages, branch: Run) -> DataFrame:
        """Return the messages of a part for a sink; a changelog also gets those before the unit's truncates."""
        raw = message_view.raw_range(self.spark, self.source, part.start, part.end)
        if branch.sink.mode == "mirror":
            return without(behind_truncates(raw, self.position.floors), self.position.skipped)
        truncates = [
            Skip(topic, int(p), offset, offset)
            for each in self.position.truncates
            for topic, found in each.items()
            for p, offset in found.items()
        ]
        return without(behind_truncates(raw, self.position.truncated), [*self.position.skipped, *truncates])


def _error_of(error: Exception) -> CdcError:
    return error if isinstance(error, CdcError) else spark_failure(str(error))


def unknown(missing: MissingValues, part: UnitMessages | None = None) -> BadRecord:
    """Return the error for updates of rows that the target does not have and no message describes completely.

    :param part: the first of these updates, if it is known.
    """
    rows = "; ".join(f"{label}, key {', '.join(min(keys))}" for label, keys in sorted(missing.keys.items()))
    anew = (
        "let the connector make a new snapshot of the table, run `airflow-cdc drop`, empty the target, and begin there"
    )
    update, remedy = "an update", anew
    if part is not None:
        ((topic, partition, offset, _),) = part.ranges
        place = f"--topic {topic} --partition {partition} --offset {offset}"
        update = f"message {offset} of {topic}[{partition}], an update,"
        remedy = (
            f"to leave out the row as its insert was left out, run `airflow-cdc skip {place}` and start again;"
            f" otherwise {anew}"
        )
    what = f"{update} omits unchanged values of a row that the target does not have"
    return BadRecord(
        f"{what} ({rows})",
        f"Nothing of its batch was applied. No message read so far contains the whole row: {remedy}.",
        what,
    )


def _named(skip: Skip) -> BadRecord:
    """Return the error that names a message, so that a person can decide about it."""
    what = f"message {skip.first} of {skip.topic}[{skip.partition}] cannot be applied"
    return BadRecord(
        f"{what}: {skip.cause}",
        f"{CORRECT}; or skip this message with `airflow-cdc skip --topic {skip.topic} --partition {skip.partition}"
        f" --offset {skip.first}`. Then start again.",
        what,
    )


def _together(part: UnitMessages, error: CdcError) -> CdcError:
    """Return the error for messages that fail only together."""
    return type(error)(
        f"messages {part.place}: {error.message}; none of them is refused alone",
        "Nothing of their batch was applied. They conflict with each other, or with the state of the query."
        " If the target is too narrow, change it. Otherwise skip some of them with `airflow-cdc skip --topic …"
        " --partition … --offset FIRST-LAST`, and start again.",
        f"messages {part.place} are refused together; none of them is refused alone",
    )


def _skip(found: Culprit) -> Skip:
    ((topic, partition, offset, _),) = found.part.ranges
    return Skip(topic, int(partition), offset, offset, found.error.message)
