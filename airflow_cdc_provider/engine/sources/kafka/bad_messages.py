"""What is done about a unit that fails because of what its messages hold: they are found, and set aside or named.

Parts of the unit go through the query as a batch, without the state of others, and into the staging of all sinks; those
that can tell also say whether they would commit it. So a message is found that fails by itself, also where the query
keeps state: its row or its group is what is refused then. What only the state brings about, such as a sum that becomes
too large, has no message to blame.
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
from airflow_cdc_provider.engine.sources.kafka.culprits import Culprit, Part, culprits, tipping
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics, UnitNumber, behind_truncates
from airflow_cdc_provider.engine.sources.kafka.query import result
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, noted, without
from airflow_cdc_provider.engine.sources.kafka.spark_failures import CORRECT, failure_of
from airflow_cdc_provider.engine.sources.kafka.staging_task import TopicStage, by_place

MOST = 20
"""Messages of a unit that are set aside; where more are refused, it is not the messages that are wrong."""
_OF_VALUES = (ValueRefused, LimitExceeded)
# A trigger, or a constraint between rows, may be at fault as well as the message, so that is for people to decide.
_REFUSALS = (*_OF_VALUES, TargetConflict)

E = TypeVar("E", CdcError, MissingValues)


class SetAside(StreamFailed):
    """Messages are passed over from here on, by the sinks' records: the query begins again without them."""


def stage_rows(
    run: Run, rows: DataFrame, table: Table, name: str, unit: UnitNumber, segment: int = 0
) -> list[StagedPiece]:
    """Stage what the query returns for a sink.

    :param name: one that no other attempt of a unit has.
    :param segment: see :class:`.TopicStage`.
    :raises CdcError: what a task was refused for.
    """
    stage = TopicStage(run.sink, run.epoch, f"{run.epoch}_{name}", table, unit, segment, run.pipeline.transform)
    told = by_place(rows, table).mapInArrow(stage, "message binary").collect()
    found = [pickle.loads(row.message) for row in told]
    for message in found:
        if isinstance(message, CdcError):
            raise message
    return found


def stage_effect(run: Run, unit: UnitNumber, effect: Effect) -> StagedPiece:
    """Stage what a truncate does to a sink."""
    staged = run.sink.stage(run.epoch, f"{run.epoch}_{unit}_truncate_{uuid.uuid4().hex[:8]}", [effect])
    return StagedPiece("", "", 0, 0, b"", tuple(staged), frozenset(), LOG_START)


def emptying(table: Table) -> Effect:
    """What a truncate does to a mirror."""
    columns = {f"c{i}": pa.array([], pa.large_string()) for i in range(len(table.columns))}
    return Effect(table.label, True, pa.table({ERASED: pa.array([], pa.bool_())} | columns))


@dataclass(frozen=True)
class Blame:
    """Finds what in a unit makes it fail.

    :param position: where the unit begins: with which truncates, and without which messages.
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
        """Return why a unit fails: messages that have been set aside, or are named; ``None`` for anything else.

        :param start: tells the offsets from which on the unit's messages are.
        :param end: the offsets before which they are.
        :raises CdcError: what else a part of the unit fails of.
        """
        error = _error_of(failure)
        if not isinstance(error, _REFUSALS) or self.run.stopping:
            return None
        whole = Part.between(start(), end)
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
            branch.sink.note_source(branch.epoch, noted([*self.position.skipped, *skips]))
        places = ", ".join(each.place for each in skips)
        return SetAside(f"messages go to {self.source.dead_letters}: {places}", "The query begins again without them.")

    def lacking(
        self, missing: MissingValues, start: Callable[[], Offsets], end: Offsets, unit: UnitNumber
    ) -> BadRecord:
        """Return the error for updates that leave values out of rows which a unit and a target do not have as a whole.

        :param start, end: see :meth:`verdict`.
        :raises CdcError: what else a part of the unit fails of.
        """
        if self.run.stopping or not any(isinstance(branch.sink, Rehearsing) for branch in self.run.branches):
            return unknown(missing)
        found = tipping(Part.between(start(), end), partial(self._failure, unit, MissingValues))
        return unknown(missing) if found is None else unknown(found[1], found[0])

    def _failure(self, unit: UnitNumber, kind: type[E], part: Part) -> E | None:
        """Return what a part of a unit fails of, if it is of some kind: others may come of what it is without."""
        try:
            self._rehearse(part, unit)
        except (MissingValues, CdcError, PySparkException, Py4JJavaError) as e:
            error = e if isinstance(e, MissingValues) else _error_of(e)
            if not isinstance(error, (MissingValues, *_REFUSALS)):
                raise error from e
            return error if isinstance(error, kind) else None
        return None

    def _rehearse(self, part: Part, unit: UnitNumber) -> None:
        """Bring a part of a unit as far as can be taken back."""
        self.run.check()
        if self.run.stopping:
            raise StreamFailed("the stream has been stopped", "Start again: it goes on from the last commit.")
        for branch in self.run.branches:
            rows = result(self.spark, self.source, self._messages(part, branch))
            staged = stage_rows(branch, rows, self.table, f"{unit}_try{next(self._numbers)}", unit)
            if isinstance(branch.sink, Rehearsing):
                branch.sink.rehearse(branch.epoch, [*self._first(branch, unit), *staged])

    def _first(self, branch: Run, unit: UnitNumber) -> list[StagedPiece]:
        """Return what a mirror gets first: it is emptied, and rows that are gone by then refuse nothing."""
        if branch.sink.mode != "mirror" or not self.position.truncates:
            return []
        return [replace(stage_effect(branch, unit, emptying(self.table)), index=-1)]

    def _messages(self, part: Part, branch: Run) -> DataFrame:
        """Return what a sink gets of a part: a changelog also what stands in front of the unit's truncates."""
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
    return error if isinstance(error, CdcError) else failure_of(str(error))


def unknown(missing: MissingValues, part: Part | None = None) -> BadRecord:
    """Return the error for updates of rows that the target does not have, and that messages do not tell as a whole.

    :param part: the first of them, if it is known.
    """
    told = "; ".join(f"{label}, key {', '.join(min(keys))}" for label, keys in sorted(missing.keys.items()))
    anew = (
        "let the connector make a new snapshot of the table, run `airflow-cdc drop`, empty the target, and begin there"
    )
    update, remedy = "an update", anew
    if part is not None:
        ((topic, partition, offset, _),) = part.ranges
        place = f"--topic {topic} --partition {partition} --offset {offset}"
        update = f"message {offset} of {topic}[{partition}], an update,"
        remedy = (
            f"pass this one by `airflow-cdc skip {place}` and start again, if the row is to be left out as its insert"
            f" was; otherwise {anew}"
        )
    what = f"{update} leaves values out, as they stay, of a row that the target does not have"
    return BadRecord(
        f"{what} ({told})",
        f"Nothing of its batch was applied. No message that was read has the whole row: {remedy}.",
        what,
    )


def _named(skip: Skip) -> BadRecord:
    """Return the error that names a message, for people to decide about it."""
    what = f"message {skip.first} of {skip.topic}[{skip.partition}] cannot be brought in"
    return BadRecord(
        f"{what}: {skip.cause}",
        f"{CORRECT}; or pass this one by `airflow-cdc skip --topic {skip.topic} --partition {skip.partition}"
        f" --offset {skip.first}`. Then start again.",
        what,
    )


def _together(part: Part, error: CdcError) -> CdcError:
    """Return the error for messages of which none is to blame by itself."""
    return type(error)(
        f"messages {part.place}: {error.message}; none of them is refused by itself",
        "Nothing of their batch was applied. They do not go together, or not with what the query has added up before."
        " Change the target if it is too narrow; otherwise pass some of them by `airflow-cdc skip --topic … --partition"
        " … --offset FIRST-LAST`, and start again.",
        f"messages {part.place} are refused together; none of them is by itself",
    )


def _skip(found: Culprit) -> Skip:
    ((topic, partition, offset, _),) = found.part.ranges
    return Skip(topic, int(partition), offset, offset, found.error.message)
