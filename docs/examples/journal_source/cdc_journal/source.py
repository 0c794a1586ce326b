"""The source: the methods of the contract that ``ReadOnlySource`` does not implement.

The position is the number of the last row that a sink has. It is stored as the applied LSN of the commit record. A unit
``(start, end]`` is the rows with numbers in that interval, so nothing else has to be recorded.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.changes.row_transform import transformed_effect
from airflow_cdc_provider.engine.core.effect import ERASED, Effect
from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.lsn import LOG_END, LOG_START, LogPosition
from airflow_cdc_provider.engine.core.record import Record, Target, noted_by
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, identity_of, record_if_any, sink_of
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer, require_epoch, take_epoch
from airflow_cdc_provider.engine.runs.sink_checks import require_mode, targets_of
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.contract import (
    CheckedSource,
    Follow,
    Reached,
    ReadRecord,
    SourceStatus,
    TellTable,
    blocking_error,
)
from airflow_cdc_provider.engine.sources.read_only import ReadOnlySource
from airflow_cdc_provider.engine.state.files import State
from cdc_journal.journal import Journal
from cdc_journal.settings import JournalSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNIT_ROWS = 10_000
_LOOK_SECONDS = 1.0


class JournalSource(ReadOnlySource):
    """The source of one pipeline; implements ``Source``."""

    reads = "rows of a journal"

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._settings = cast(JournalSettings, pipeline.source)
        self._journal = Journal(self._settings)

    @property
    def _notes(self) -> dict[str, Any]:
        return {"journal": self._settings.path, "table": self._settings.table}

    # -- checks -------------------------------------------------------------------------------------

    @contextmanager
    def checking(self, checks: Checks) -> Iterator[CheckedSource]:
        """Check the table and the modes of the sinks, see ``Source.checking``."""
        table = checks.run("source", self._journal.table, lambda found: f"{found.name} can be read as a journal.")
        checks.run("mode", self._require_mirrors)
        identity = SourceIdentity(f"sqlite {self._settings.path}", lambda name: name == self._settings.table)
        yield CheckedSource(None if table is None else [table], identity, self.require_continuation)

    def _require_mirrors(self) -> str:
        for branch in self.pipeline.branches:
            if branch.sink.mode != "mirror":
                raise ConfigError(
                    f"sink.mode: a journal does not fill a {branch.sink.mode}",
                    "Use `mirror`: rows of a journal never change, so a changelog would have no further events.",
                )
        return "All sinks are mirrors."

    def _require_same(self, record: Record) -> None:
        """Refuse a record that was made for another table."""
        noted = noted_by("journal", record.identity)
        recorded = {name: noted[name] for name in self._notes}
        if recorded != self._notes:
            raise ConfigError(
                f"source: {self._notes}, but the pipeline of this name has been provisioned with {recorded}",
                "Restore the section `source`, or use another pipeline name.",
            )

    def require_continuation(self, readers: Sequence[ReadRecord]) -> str:
        """Check that the table is unchanged, and still has the last row that the sinks have."""
        table = self._journal.table()
        for read in readers:
            record = read()
            last = self._journal.last(table)  # after the record: a running stream applies what is appended meanwhile
            self._require_same(record)
            (target,) = record.targets
            if target.table != table:
                names = [", ".join(column.name for column in each.columns) for each in (table, target.table)]
                raise GateClosed(
                    f"the table {table.name} has the columns {names[0]}, but the target was made for {names[1]}",
                    "Restore the columns. If you cannot, run `airflow-cdc drop`, drop the target table, then `run`.",
                )
            if last < record.applied:
                raise GateClosed(
                    f"{self._settings.path} ends at row {last}, but the sink was filled from it up to {record.applied}",
                    "Restore the file. If you cannot: `airflow-cdc drop`, empty or drop the target table, then `run`.",
                )
        return "The journal has all rows that the sinks have, and can continue."

    # -- commands -----------------------------------------------------------------------------------

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """Create target tables and records that begin before the first row, and take the epoch."""
        pipeline, state = self.pipeline, State(self.pipeline.state)
        record = record_if_any(pipeline)
        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        for branch in pipeline.branches:
            own = sink_of(branch).record()
            if own is None:
                targets = targets_of(branch, [self._journal.table()])
                sink_of(branch).prepare(targets, [], identity_of(branch, self._notes), LOG_START)
            else:
                self._require_same(own)
                require_mode(branch, own.identity)
        epoch = take_epoch(pipeline, state, takeover)
        record = existing_record(pipeline)
        require_epoch(record, epoch)
        write_record_copy(pipeline, state, record)
        return record, {}

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """Return a function that follows the table, and one that returns whether the end is reached."""
        (target,) = record.targets
        goal = ending.lsn
        if ending.caught_up:
            goal = self._journal.last(target.table)

        def follow(
            spark: SparkSession | None, run: Run, record: Record, tell: Callable[[StreamProgress], None]
        ) -> StreamProgress:
            return self._follow(run, target, goal, tell)

        return follow, lambda done: goal is not None and done.applied >= goal

    def _follow(
        self, run: Run, target: Target, goal: LogPosition | None, tell: Callable[[StreamProgress], None]
    ) -> StreamProgress:
        """Write rows to all sinks, unit by unit, until the goal is reached or the run is asked to stop."""
        run.commit_record.sweep(run.epoch)
        records = {branch: existing_record(branch.pipeline) for branch in run.branches}
        self.require_continuation([partial(existing_record, branch.pipeline) for branch in run.branches])
        applied = {branch: record.applied for branch, record in records.items()}
        done = StreamProgress(min(applied.values()))
        tell(done)
        while not run.stopping and (goal is None or done.applied < goal):
            run.check()
            rows = self._journal.rows(target.table, done.applied, LOG_END if goal is None else goal, _UNIT_ROWS)
            if rows.num_rows:
                numbers = _numbers(rows, target)
                for branch in run.branches:
                    _bring(branch, target, rows, numbers, applied)
                told = StreamProgress(min(applied.values()), rows.num_rows, tables={target.table.label: rows.num_rows})
                done = done.plus(told)
                run.lag.advance(done.applied)
            elif goal is not None:
                break  # no row has this number yet
            else:
                with run.commit_record.fenced(run.epoch):
                    pass  # the epoch is still ours
                self.require_continuation([partial(existing_record, branch.pipeline) for branch in run.branches])
                run.wait(max(self.pipeline.stream.trigger, _LOOK_SECONDS))
            tell(done)
        return done

    def status(self, record: Record | None, readers: Sequence[ReadRecord], judge: bool) -> SourceStatus:
        """Return the number of the last row, and why the source cannot continue, if so."""
        facts: dict[str, Any] = {}

        def look() -> None:
            facts["last_row"] = self._journal.last(self._journal.table())

        trouble = blocking_error(look)
        if trouble is None and judge:
            trouble = blocking_error(lambda: self.require_continuation(readers))
        return SourceStatus(facts=facts, trouble=trouble)

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """Compare the texts of all rows up to the applied position; a stream may run meanwhile."""
        results = []
        for branch in self.pipeline.branches:
            record = existing_record(branch)
            (target,) = record.targets
            names = [column.name for column in target.table.columns]
            ours = _as_set(self._journal.rows(target.table, LOG_START, record.applied, LOG_END).rename_columns(names))
            number = names.index(target.table.key[0])
            found = [row for batch in sink_of(branch).rows(target) for row in _as_set(batch.select(names))]
            theirs = {row for row in found if int(str(row[number])) <= record.applied}
            results.append(
                {
                    "table": target.table.label,
                    "source_rows": len(ours),
                    "target_rows": len(theirs),
                    "equal": ours == theirs,
                    "differences": [],
                    "unsettled": 0,
                    "difference_count": len(ours ^ theirs),
                }
            )
        equal = all(result["equal"] for result in results)
        return {"equal": equal, "tables": results, "live": live, "lag_bytes": None, "not_compared": []}


def _bring(
    branch: Run,
    target: Target,
    rows: pa.Table,
    numbers: np.ndarray[Any, np.dtype[np.int64]],
    applied: dict[Run, LogPosition],
) -> None:
    """Stage and commit a unit in one sink from its own position: after a crash, sinks may differ in position."""
    start, end = applied[branch], LogPosition(int(numbers[-1]))
    if end <= start:
        return
    mine = rows.filter(pa.array(numbers > start))
    effect = Effect(target.table.label, False, mine.add_column(0, ERASED, pa.array(np.zeros(mine.num_rows, bool))))
    effect = transformed_effect(branch.pipeline.transform, target.table, effect)
    staged = branch.sink.stage(branch.epoch, f"{branch.epoch}_{uuid.uuid4().hex[:12]}", [effect])
    piece = StagedPiece(str(start), str(end), 0, mine.num_rows, b"", staged, frozenset(), LOG_START)
    branch.sink.commit(branch.epoch, start, end, [piece])
    applied[branch] = end


def _numbers(rows: pa.Table, target: Target) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the key of each row."""
    key = [column.name for column in target.table.columns].index(target.table.key[0])
    return np.array([int(text) for text in rows[f"c{key}"].to_pylist()], dtype=np.int64)


def _as_set(rows: pa.Table | pa.RecordBatch) -> set[tuple[str | None, ...]]:
    return set(zip(*(column.to_pylist() for column in rows.columns), strict=True))
