"""Writes batches of the log to one sink as units, with re-reads and schema changes between them.

A batch ends at a commit, so a batch is a unit. The exception is a transaction larger than a batch: its parts are staged
batch by batch and committed with the last one. If the log describes a table in a new format, the batch is cut there.
The changes before are a separate unit. Then the schema change is followed, or the table is read again, and the rest is
staged under the new definition.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from airflow_cdc_provider.engine.changes.redefinition import has_other_keys, has_unlogged_identity_changes
from airflow_cdc_provider.engine.changes.schema_change import FormatChange, Refuse, Reread
from airflow_cdc_provider.engine.core.errors import CdcError, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_END, LOG_START, Lsn, format_lsn
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.table_operations import TableOperations
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sinks.staged import MissingValues, StagedPiece
from airflow_cdc_provider.engine.sources.postgres.provision.gate import Passage, record_passage
from airflow_cdc_provider.engine.sources.postgres.reading.reread import read_keys_again, reread_as_defined
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.sources.postgres.stream.pipelined_commit import PipelinedCommit, PipelinedCommits
from airflow_cdc_provider.engine.sources.postgres.stream.schema_following import SchemaFollower
from airflow_cdc_provider.engine.sources.postgres.stream.staging import Staging
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask, Unplaced, open_filters
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position

# After a re-read, staging may ask for other rows: those that have moved away from the ones that were read.
_MAX_STAGINGS = 5
# A schema change is followed. If the log then shows that there was more to it, the table is read again.
_MAX_FOLLOWED = 3


class _RelationChanged(Exception):
    """A batch has changes in a format that is not the recorded one."""

    def __init__(self, change: FormatChange) -> None:
        super().__init__(change.label)
        self.change = change


class UnitWriter(SchemaFollower):
    """Writes batches to one sink, one after the other.

    :param staging: stages the batches.
    :ivar changes: row changes committed.
    :ivar tables: the same by table.
    :ivar operations: those of the last batch, by table.
    """

    def __init__(self, run: Run, record: Record, staging: Staging) -> None:
        super().__init__(run, record)
        self.changes = 0
        self.tables: Counter[str] = Counter()
        self.operations: dict[str, TableOperations] = {}
        self._staging = staging
        self._pipelined_commits = PipelinedCommits(run.sink, run.epoch)
        self._parts: list[StagedPiece] = []
        self._since = LOG_START
        staging.offers.append(self._next_task)

    def current_record(self) -> Record:
        """Return the commit record with what has been applied by now."""
        return replace(self.record, applied=self.applied)

    @property
    def parted(self) -> bool:
        """Return whether a transaction is staged of which some parts are still to come."""
        return bool(self._parts)

    def done(self, target: Lsn | None) -> bool:
        """Return whether everything up to ``target`` is durable, DDL included, or the stream cannot go on."""
        followed = bool(self._catalog) and self._pending is None
        reached = target is not None and self.applied >= target and followed
        return reached or self.refusal is not None

    def record_source(self, passage: Passage) -> None:
        """Record what was seen of the slot, see :func:`.record_passage`."""
        news = record_passage(self.run.sink, replace(self.record, epoch=self.run.epoch), passage)
        if news:
            self.record = replace(self.record, identity={**self.record.identity, **news})

    def write_batch(self, pieces: Any, waiting: str | None) -> None:
        """Write a batch to the sink: stage it, follow the schema changes in it, and commit it if it ends a unit.

        :param pieces: the batch as the query hands it over, see :class:`.Staging`.
        :param waiting: what requests wait for.
        :raises CdcError: when it cannot be written; nothing beyond ``applied`` is in the sink then.
        """
        # The stream may send again what only another sink lacks; this sink leaves it out.
        self._since, followed = self.applied, Counter[tuple[str, int]]()
        self.operations = {}
        while True:
            try:
                self._write_unit(pieces, None)
                break
            except _RelationChanged as e:
                followed[e.change.label, e.change.commit_lsn] += 1
                if followed[e.change.label, e.change.commit_lsn] > _MAX_FOLLOWED:
                    raise StreamFailed(
                        f"the log describes {e.change.label} at {format_lsn(e.change.commit_lsn)} in a format that"
                        " does not match its definition",
                        f"Run `airflow-cdc resnapshot --table '{e.change.label}'`.",
                    ) from e
                self._follow_change(e.change, pieces)
        if not self._parts:
            waiting = self._apply_catalog_changes() or waiting
        self._report_waiting(waiting)

    def _write_unit(self, pieces: Any, before: Lsn | None) -> None:
        """Write the batch, or those of its transactions whose commit record lies before an LSN.

        :raises _RelationChanged: when nothing was committed, as there are changes in another format.
        """
        whole = before is None and not self._parts
        watched = {target.table.label for target in self._watched()}
        with self._pipelined_commits.begin(self.applied, watched) if whole else nullcontext() as pipelined:
            self._stage_and_commit(pieces, before, pipelined)

    def _stage_and_commit(self, pieces: Any, before: Lsn | None, pipelined: PipelinedCommit | None) -> None:
        staged = self._stage(pieces, before, pipelined)
        end = Position.from_json(json.loads(staged[0].end)) if before is None else Position(before)
        if end.block:
            self._parts += staged
            return
        if end.lsn <= self.applied:  # only another sink lacks it, or Spark begins a query with an empty batch
            self._parts = []
            return
        unit = _numbered(self._parts + staged)
        # If the batch was cut, what comes before the cut is committed.
        start = max(Position.from_json(json.loads(unit[0].start)).lsn, self.applied)
        for _ in range(_MAX_STAGINGS):
            if self._commit(start, end.lsn, unit, pipelined):
                break
            if self._parts:
                raise _torn()
            self.run.sink.sweep(self.run.epoch)
            unit = _numbered(self._stage(pieces, before, pipelined))
        else:
            raise StreamFailed(
                f"the unit ending at {format_lsn(end.lsn)} still lacks values after its rows were read again",
                "Run `airflow-cdc resnapshot` for the tables concerned.",
            )
        failpoint("before-spark-commit")
        self._parts = []
        self.barriers.passed(_xids(unit))
        self.applied = max(self.applied, end.lsn)
        for piece in unit:
            self.changes += piece.changes
            self.tables.update(piece.changes_by_table)
            for label, more in piece.operations.items():
                self.operations[label] = self.operations.get(label, TableOperations()) + more

    def _next_task(self) -> StagingTask:
        """Return how the next batch would be staged, if nothing changes before."""
        return self._task(self.applied, LOG_END)

    def _task(self, since: Lsn, before: Lsn) -> StagingTask:
        filters = open_filters(self.record, self.applied)
        return StagingTask(
            self.run.sink,
            self.run.piece_store,
            self.run.epoch,
            self.record.targets,
            filters,
            self.record.high,
            postgres_settings(self.run.pipeline).dsn,
            self.run.pipeline.transform,
            since,
            before,
        )

    def _watched(self) -> list[Target]:
        """Return the targets whose definition has to be looked up in the source before a unit is applied."""
        if self.run.pipeline.sink.mode == "changelog":
            return []
        return [target for target in self.record.targets if has_unlogged_identity_changes(target.table)]

    def _stage(self, pieces: Any, before: Lsn | None, pipelined: PipelinedCommit | None) -> list[StagedPiece]:
        task = self._task(self._since, LOG_END if before is None else before)
        messages = self._staging.stage(pieces, task, pipelined.on_staged if pipelined is not None else None)
        if pipelined is not None and not all(isinstance(message, StagedPiece) for message in messages):
            pipelined.cancel()
        format_changes = [message for message in messages if isinstance(message, FormatChange)]
        if format_changes:
            raise _RelationChanged(min(format_changes, key=lambda change: change.commit_lsn))
        unplaced = {message.label: message for message in messages if isinstance(message, Unplaced)}
        if unplaced:
            self.run.sink.sweep(self.run.epoch)
            for table in unplaced.values():
                self._reread_unplaced(table)
            return self._stage(pieces, before, pipelined)
        for message in messages:
            if isinstance(message, CdcError):
                raise message
        staged = sorted(messages, key=lambda m: m.index)
        for piece in staged:
            self._truncates = {**self._truncates, **piece.truncates}
        return staged

    # -- schema changes ----------------------------------------------------------------------------

    def _reread_unplaced(self, unplaced: Unplaced) -> None:
        """Read a table again whose chunks can no longer be told apart: read as a whole, it has no bounds.

        :raises CannotFollow: when more than a name has changed.
        """
        target = target_of(self.record, unplaced.label)
        verdict = self._decide(target, self._retry_while_blocked(partial(self._read_definition, target)))
        if not isinstance(verdict, Refuse):
            verdict = Reread(unplaced.why)
        self._retry_while_blocked(partial(self._carry_out, target, verdict), unplaced.label)
        if self._parts:  # they were staged with the old bounds
            raise _torn()

    def _follow_change(self, change: FormatChange, pieces: Any) -> None:
        """Commit what comes before the first changes in another format, then follow the schema change.

        The unit ends at the commit record of their transaction: those before end there or earlier, and the server
        sends a transaction again whose commit record begins at or after the position that is asked for.
        """
        torn = bool(self._parts) and change.inside
        if not self._parts:
            self.run.sink.sweep(self.run.epoch)  # what was staged for pieces without a format change
        if change.commit_lsn > self.applied and not torn:
            self._write_unit(pieces, change.commit_lsn)
            failpoint("unit-cut")
        self._since = change.commit_lsn
        target = target_of(self.record, change.label)
        after = self._retry_while_blocked(partial(self._read_definition, target))
        verdict = self._decide(target, after, change.relation)
        if torn and not isinstance(verdict, Refuse):
            # The next attempt filters out what the parts were staged for.
            why = "a transaction has changed it"
            self._retry_while_blocked(partial(self._reread_as_defined, change.label, why), change.label)
            raise _torn()
        self._retry_while_blocked(partial(self._carry_out, target, verdict), change.label)

    def _commit(self, start: Lsn, end: Lsn, unit: list[StagedPiece], pipelined: PipelinedCommit | None) -> bool:
        """Commit a unit; return false when rows had to be read again, so that it must be staged again."""
        split = frozenset[str]().union(*(piece.split_truncates for piece in unit))
        try:
            if pipelined is not None and pipelined.finish(unit):
                return True
            if split:
                for label in sorted(split):
                    self._retry_while_blocked(partial(reread_as_defined, self.run, label, self.barriers), label)
            elif self._identities_hold(unit):
                self.run.sink.commit(self.run.epoch, start, end, unit)
                return True
        except MissingValues as e:
            changed = self._retry_while_blocked(partial(read_keys_again, self.run, self.record, e.keys, _xids(unit)))
            for label in changed:  # rows that were read stay so, however long these tables have to wait
                why = "its definition has changed since"
                self._retry_while_blocked(partial(self._reread_as_defined, label, why), label)
        self.record = existing_record(self.run.pipeline)
        return False

    def _identities_hold(self, unit: list[StagedPiece]) -> bool:
        """Return whether the recorded keys identified all rows of the unit; false when a table had to be read again.

        A statement that gives a table another key, or all of its rows other values, locks out every writer. So if the
        catalog, read after the unit's transactions, still has the recorded definition, it has held for all of them.

        :raises CannotFollow: when the key is made of other columns, or the table is gone.
        """
        touched = {staged.label for piece in unit for staged in piece.tables}
        watched = [target for target in self._watched() if target.table.label in touched]
        if not watched:
            return True
        found = self._retry_while_blocked(self._check_catalog_now)
        held = True
        for target in watched:
            table, after = target.table, found.get(target.table.label)
            if after is None:
                continue
            verdict = self._decide(target, after)
            if isinstance(after, Table):
                # Without a key, rows are looked up by all of their values.
                other = has_other_keys(table, after) or (isinstance(verdict, Reread) and not table.key)
            else:
                other = bool(table.key)  # it is unknown which key identifies the unit's rows
            if other:
                self._retry_while_blocked(partial(self._carry_out, target, verdict), table.label)
                held = False
        return held


def _xids(unit: list[StagedPiece]) -> npt.NDArray[np.uint32]:
    """Return the transactions of a unit, distinct."""
    return np.unique(np.concatenate([np.frombuffer(piece.xids, "<u4") for piece in unit]))


def _torn() -> StreamFailed:
    return StreamFailed(
        "rows were read again in the middle of a large transaction; it has to be streamed again",
        "Start again: the stream goes on from the last commit.",
    )


def _numbered(pieces: list[StagedPiece]) -> list[StagedPiece]:
    """Return the pieces of several batches, numbered in the order in which they are applied."""
    return [replace(piece, index=i) for i, piece in enumerate(pieces)]
