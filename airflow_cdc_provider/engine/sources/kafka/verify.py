"""Compares targets with the result of the query over the messages that have been read, and reports differing keys.

One side of the comparison, see :mod:`.comparison.compare`, is the result of a :class:`.Replay`; the other side is the
sink's rows. While a stream runs, messages are read up to the ends of their topics; if windows are written once closed,
they are read up to the sink's position. Differing keys are read again until they settle.

A changelog has one event for each row of the result, so the two are compared row by row, including duplicates. If a key
occurs repeatedly (a changed window, or a Debezium update), the last row of each key is compared.

If retention has removed messages that had been read, target rows without a message are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.comparison.compare import (
    PASS_TIMEOUT,
    ReportTableProgress,
    compare_sides,
    not_reached,
    ranges_in,
)
from airflow_cdc_provider.engine.comparison.fetched_side import (
    Rows,
    Rowset,
    RowSide,
    changelog_rows,
    event_sort_key,
    keyed_rows,
    mirror_rows,
)
from airflow_cdc_provider.engine.comparison.side import UNKNOWN, RowKey, Sides
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.gate import pass_gate
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.query import QueryResult, output_of, query_result
from airflow_cdc_provider.engine.sources.kafka.replay import Replay, reach_of
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, OutputMode, topic_settings
from airflow_cdc_provider.engine.sources.kafka.staging_task import UNSENT
from airflow_cdc_provider.engine.sources.kafka.topics import Topics, behind, reached
from airflow_cdc_provider.engine.spark.session import spark_session

Shaped: TypeAlias = Callable[[Target, Iterable[pa.RecordBatch]], Iterator[Rowset]]

_BUCKETS = 1 << 10


def verify(pipeline: Pipeline, live: bool, report: ReportTableProgress) -> dict[str, Any]:
    """Compare the result of the query with the sinks, see :func:`.commands.verify`.

    :param live: a stream is running.
    :returns: also ``ranges``, the messages that were compared, see :class:`.MessageRange`; and ``begins_late``, whether
        retention has removed messages that had been read.
    """
    topics = Topics(topic_settings(pipeline))
    tables: list[dict[str, Any]] = []
    not_compared: set[str] = set()
    with spark_session(pipeline.spark_start, "verify") as spark:
        result = query_result(spark, pipeline)
        slowest = min((_position(branch) for branch in pipeline.branches), key=lambda p: p.applied)
        pass_gate(topics, slowest)
        checkpoint, output = Checkpoint.of(pipeline), output_of(pipeline)
        replay = Replay.of(spark, topics, slowest, checkpoint)
        for branch in pipeline.branches:
            way = _way_of(branch.sink.mode, output, result)
            (target,) = existing_record(branch).targets
            if way is None:
                not_compared.add(target.table.label)
                continue
            catch_up = partial(_catch_up, branch, topics) if live else None
            until = topics.ends if live else partial(_read, branch)
            reach = partial(reach_of, branch, checkpoint)
            passed = partial(_position, branch)
            opened = partial(_sides, branch, replace(replay, until=until, reach=reach, passed=passed), way)
            (found,) = compare_sides([target], opened, catch_up, report)
            place = {"sink": branch.sink.place} if len(pipeline.sinks) > 1 else {}
            tables.append(found.as_dict() | ranges_in(sink_of(branch), target) | place)
        slowest = min((_position(branch) for branch in pipeline.branches), key=lambda p: p.applied)
        ranges = replay.ranges(topics, slowest.offsets)
    return {
        "equal": all(table["equal"] for table in tables),
        "tables": tables,
        "live": live,
        "lag_bytes": None,
        "lag_messages": behind(slowest.offsets, topics.written_ends()),
        "not_compared": sorted(not_compared),
        "ranges": [each.as_dict() for each in ranges],
        "begins_late": replay.late,
    }


@dataclass(frozen=True)
class Way:
    """The way in which the two sides are made comparable.

    :param keyed: compare the last row of each key, otherwise all rows including duplicates.
    :param source, target: functions that make rows comparable.
    :param closing: the query returns only final rows, such as closed windows.
    :param hashed: rows of the source are complete, and can be hashed by the executors.
    """

    keyed: bool
    source: Shaped
    target: Shaped
    closing: bool
    hashed: bool = False


def _way_of(mode: Mode, output: OutputMode, result: QueryResult) -> Way | None:
    """Return how a sink is compared; ``None`` if events repeat keys, but the table has no key.

    :param output: the output mode of the pipeline's query, the same for all sinks.
    """
    closing = result.stateful and output == "append"
    hashed = not (closing or result.has_ops or result.partial)
    if mode == "mirror":
        # If messages no longer contain a value of a row, its other values are compared.
        rows: Shaped = _Told(mirror_rows) if result.has_ops else mirror_rows
        return Way(True, rows, rows, closing, hashed)
    if not result.has_ops and (closing or not result.stateful):
        return Way(False, mirror_rows, mirror_rows, closing, hashed)
    made: Shaped = _Told(keyed_rows) if result.has_ops else keyed_rows
    return Way(True, made, changelog_rows, closing) if result.table.key else None


@dataclass(frozen=True)
class _Told:
    """Makes cells of rows, in which a value that messages omit equals every value."""

    shaped: Shaped

    def __call__(self, target: Target, batches: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
        for batch in batches:
            for rowset in self.shaped(target, [batch]):
                yield replace(rowset, make_cells=partial(_told_cells, target, batch))


def _told_cells(target: Target, batch: pa.RecordBatch) -> list[tuple[str | None, ...]]:
    (rowset,) = keyed_rows(target, [batch])
    texts = zip(*(batch.column(column.name).to_pylist() for column in target.table.columns), strict=True)
    return [
        tuple(UNKNOWN if text == UNSENT else cell for text, cell in zip(row, cells, strict=True))
        for row, cells in zip(texts, rowset.cells, strict=True)
    ]


def _sides(branch: Pipeline, replay: Replay, way: Way, target: Target) -> AbstractContextManager[Sides]:
    sink = sink_of(branch)
    if sink.missing([target]):
        raise UnknownTable(
            f"the target {target.schema}.{target.name} no longer exists",
            "Run `airflow-cdc drop`, then `airflow-cdc run`: it begins again at the first messages.",
        )
    compared = target if way.keyed else replace(target, table=replace(target.table, key=()))
    rows = replay.closed_rows if way.closing else replay.rows
    made = RowSide(compared, partial(rows, way.keyed), way.source)
    if way.hashed:
        made = _Hashed(compared, partial(rows, way.keyed), way.source, replay)
    found = RowSide(compared, sink.rows if way.keyed else _Remaining(sink.rows, replay.passed), way.target)
    if replay.late:
        found = replace(found, shaped=_Within(found.shaped, made))
    return nullcontext(Sides(compared.table, made, found, _BUCKETS))


@dataclass(frozen=True)
class _Hashed(RowSide):
    """Lets executors hash the rows of a scan, instead of fetching the rows."""

    replay: Replay

    def scan(self, buckets: int) -> Mapping[int, Sequence[Any]]:
        """Return sums of hashes by bucket, see :meth:`.Side.scan`."""
        return self.replay.sums(self.target, buckets)


@dataclass(frozen=True)
class _Remaining:
    """Ignores events of a changelog up to its last truncate, like the other side."""

    rows: Rows
    passed: Callable[[], RecordedTopics]

    def __call__(self, target: Target, keys: Sequence[RowKey] | None) -> Iterator[pa.RecordBatch]:
        if not self.passed().truncated:
            yield from self.rows(target, keys)
            return
        emptied = (batch.filter(pc.equal(batch.column("_op"), "t")) for batch in self.rows(target, keys))
        last = max((when for batch in emptied for when in _moments(batch)), default=(-1, 0))
        for batch in self.rows(target, keys):
            yield batch.filter(pa.array([when > last for when in _moments(batch)], pa.bool_()))


def _moments(events: pa.RecordBatch) -> list[tuple[int, int]]:
    return [event_sort_key(event) for event in events.select(["_commit_lsn", "_seq"]).to_pylist()]


@dataclass(frozen=True)
class _Within:
    """Ignores rows whose key is missing from the other side."""

    shaped: Shaped
    other: RowSide

    def __call__(self, target: Target, batches: Iterable[pa.RecordBatch]) -> Iterator[Rowset]:
        other = self.other
        there = {
            text for rowset in other.shaped(other.target, other.rows(other.target, None)) for text in rowset.key_texts
        }
        for rowset in self.shaped(target, batches):
            yield rowset.only([i for i, text in enumerate(rowset.key_texts) if text in there])


def _position(branch: Pipeline) -> RecordedTopics:
    return RecordedTopics.of(existing_record(branch))


def _read(branch: Pipeline) -> Offsets:
    return _position(branch).offsets


def _catch_up(branch: Pipeline, topics: Topics) -> None:
    """Wait until the sink has all messages that exist now."""
    ends = topics.ends()
    if not await_condition(lambda: reached(_read(branch), ends), PASS_TIMEOUT):
        raise not_reached(f"the ends of {topics.source.place}")
