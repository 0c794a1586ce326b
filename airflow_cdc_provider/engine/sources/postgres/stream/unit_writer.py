"""Units: how batches of the log become commits of the sink, with re-reads and changes of schema between them.

A batch ends at a commit, so a batch is a unit, except for a transaction larger than a
batch: its parts are staged batch by batch and committed with the last one. Where the log
describes a table anew, the batch is cut: what comes before is a unit of its own, then the
change is followed, or the table read again, and the rest is staged under the new definition.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.changes.redefinition import has_other_keys, has_silent_identity
from airflow_cdc_provider.engine.changes.schema_change import Adopt, Misfit, Refuse
from airflow_cdc_provider.engine.core.errors import CdcError, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_END, LOG_START, Lsn, format_lsn
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sinks.contract import Eager
from airflow_cdc_provider.engine.sinks.staged import MissingValues, StagedPiece
from airflow_cdc_provider.engine.sources.postgres.provision.gate import Passage, note_passage
from airflow_cdc_provider.engine.sources.postgres.reading.reread import adopt, read_keys_again
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import Handout
from airflow_cdc_provider.engine.sources.postgres.stream.pipelined_commit import Ahead
from airflow_cdc_provider.engine.sources.postgres.stream.schema_following import SchemaFollowing
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import Stage, Unplaced, open_filters
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position

# Each staging after a re-read can ask for other rows: those that moved from the ones that were read.
_STAGINGS = 5
# A change of schema is followed, and if the log then shows that there was more to it, the table is read again.
_MEETINGS = 3


class _RelationChanged(Exception):
    """A batch has changes in a format that is not the recorded one."""

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit.label)
        self.misfit = misfit


class Units(SchemaFollowing):
    """Brings batches into a sink, one after the other.

    :param handout: stages the batches.
    :ivar changes: row changes committed.
    :ivar tables: the same by table.
    """

    def __init__(self, run: Run, record: Record, handout: Handout) -> None:
        super().__init__(run, record)
        self.changes = 0
        self.tables: Counter[str] = Counter()
        self._handout = handout
        self._plain = True
        self._parts: list[StagedPiece] = []
        self._since = LOG_START
        handout.offers.append(self._next)

    def now(self) -> Lsn:
        """The applied LSN of the moment."""
        return self.applied

    @property
    def parted(self) -> bool:
        """Whether a transaction is staged of which parts are still to come."""
        return bool(self._parts)

    def done(self, target: Lsn | None) -> bool:
        """Whether everything up to ``target`` is durable, DDL included, or the stream cannot go on."""
        looked = bool(self._catalog) and self._drift is None
        reached = target is not None and self.applied >= target and looked
        return reached or self.refusal is not None

    def note(self, passage: Passage) -> None:
        """Keep in the record what was seen of the slot, see :func:`.note_passage`."""
        news = note_passage(self.run.sink, replace(self.record, epoch=self.run.epoch), passage)
        if news:
            self.record = replace(self.record, identity={**self.record.identity, **news})

    def bring(self, pieces: DataFrame, waiting: str | None) -> None:
        """Bring a batch into the sink: stage it, follow what it says of the schema, commit it if it ends a unit.

        :param pieces: rows of :class:`.spark_source.PostgresCdcSource`.
        :param waiting: what requests wait for.
        :raises CdcError: when it cannot be brought in; nothing beyond ``applied`` is in the sink then.
        """
        # What the stream sends again, because another sink lacks it, this one has.
        self._since, met = self.applied, Counter[tuple[str, int]]()
        while True:
            try:
                self._unit(pieces, None)
                break
            except _RelationChanged as e:
                met[e.misfit.label, e.misfit.commit_lsn] += 1
                if met[e.misfit.label, e.misfit.commit_lsn] > _MEETINGS:
                    raise StreamFailed(
                        f"{e.misfit.label} is described at {format_lsn(e.misfit.commit_lsn)} as it is not defined",
                        f"Run `airflow-cdc resnapshot --table '{e.misfit.label}'`.",
                    ) from e
                self._meet(e.misfit, pieces)
        if not self._parts:
            waiting = self._settle() or waiting
        self._wait_for(waiting)

    def _unit(self, pieces: DataFrame, before: Lsn | None) -> None:
        """Bring the batch into the sink, or those of its transactions whose commit record lies before an LSN.

        :raises _RelationChanged: when nothing was committed, as there are changes in another format.
        """
        with self._ahead(before) or nullcontext() as ahead:
            self._stage_and_commit(pieces, before, ahead)

    def _stage_and_commit(self, pieces: DataFrame, before: Lsn | None, ahead: Ahead | None) -> None:
        staged = self._stage(pieces, before, ahead)
        end = Position.from_json(json.loads(staged[0].end)) if before is None else Position(before)
        if end.block:
            self._parts += staged
            return
        if end.lsn <= self.applied:  # another sink lacks it, or Spark begins a query with a batch of nothing
            self._parts = []
            return
        unit = _numbered(self._parts + staged)
        # Of a batch that was cut, what comes before is committed.
        start = max(Position.from_json(json.loads(unit[0].start)).lsn, self.applied)
        for _ in range(_STAGINGS):
            if self._commit(start, end.lsn, unit, ahead):
                break
            if self._parts:
                raise _torn()
            self.run.sink.sweep(self.run.epoch)
            unit = _numbered(self._stage(pieces, before, ahead))
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

    def _next(self) -> Stage:
        """How the batch that comes next would be staged, if nothing is changed before."""
        return self._work(self.applied, LOG_END)

    def _work(self, since: Lsn, before: Lsn) -> Stage:
        filters = open_filters(self.record, self.applied)
        return Stage(
            self.run.sink,
            self.run.depot,
            self.run.epoch,
            self.record.targets,
            filters,
            self.record.high,
            postgres_settings(self.run.pipeline).dsn,
            self.run.pipeline.transform,
            since,
            before,
        )

    def _ahead(self, before: Lsn | None) -> Ahead | None:
        """What applies a unit while it is staged: that of a whole batch, if the sink can, and the one before let it."""
        run, sink, applied = self.run, self.run.sink, self.applied
        if before is not None or self._parts or not isinstance(sink, Eager):
            return None
        watched = {target.table.label for target in self._watched()}
        tried, self._plain = self._plain, True

        def plain(piece: StagedPiece) -> bool:
            end = Position.from_json(json.loads(piece.end))
            more = piece.split_truncates or not watched.isdisjoint(staged.label for staged in piece.tables)
            self._plain = self._plain and not more and not end.block
            return tried and self._plain and end.lsn > applied

        def commit(first: StagedPiece, unit: Iterator[StagedPiece]) -> None:
            start, end = (Position.from_json(json.loads(text)).lsn for text in (first.start, first.end))
            sink.commit_as_staged(run.epoch, max(start, applied), end, unit)

        return Ahead(plain, commit)

    def _watched(self) -> list[Target]:
        """The targets of whose source the catalog has to be asked before a unit is applied."""
        if self.run.pipeline.sink.mode == "changelog":
            return []
        return [target for target in self.record.targets if has_silent_identity(target.table)]

    def _stage(self, pieces: DataFrame, before: Lsn | None, ahead: Ahead | None) -> list[StagedPiece]:
        work = self._work(self._since, LOG_END if before is None else before)
        messages = self._handout.stage(pieces, work, ahead.hear if ahead is not None else None)
        if ahead is not None and not all(isinstance(message, StagedPiece) for message in messages):
            ahead.call_off()
        misfits = [message for message in messages if isinstance(message, Misfit)]
        if misfits:
            raise _RelationChanged(min(misfits, key=lambda misfit: misfit.commit_lsn))
        unplaced = {message.label: message for message in messages if isinstance(message, Unplaced)}
        if unplaced:
            self.run.sink.sweep(self.run.epoch)
            for table in unplaced.values():
                self._read_unplaced(table)
            return self._stage(pieces, before, ahead)
        for message in messages:
            if isinstance(message, CdcError):
                raise message
        staged = sorted(messages, key=lambda m: m.index)
        for piece in staged:
            self._truncates = {**self._truncates, **piece.truncates}
        return staged

    # -- changes of schema -------------------------------------------------------------------------

    def _read_unplaced(self, unplaced: Unplaced) -> None:
        """Read a table again whose chunks cannot be told apart any more: as a whole, it has no bounds.

        :raises CannotFollow: when more than a name has changed.
        """
        target = target_of(self.record, unplaced.label)
        verdict = self._decide(target, self._insist(partial(self._look_at, target)))
        if not isinstance(verdict, Refuse):
            verdict = Adopt(unplaced.why)
        self._insist(partial(self._change, target, verdict), unplaced.label)
        if self._parts:  # staged by the bounds of before
            raise _torn()

    def _meet(self, misfit: Misfit, pieces: DataFrame) -> None:
        """Commit what comes before the first changes in another format; then follow the change of schema.

        The unit ends at the commit record of their transaction: those before end there or earlier, and the server
        sends a transaction again whose commit record begins at or after the position that is asked for.
        """
        torn = bool(self._parts) and misfit.inside
        if not self._parts:
            self.run.sink.sweep(self.run.epoch)  # what the pieces without a misfit have staged
        if misfit.commit_lsn > self.applied and not torn:
            self._unit(pieces, misfit.commit_lsn)
            failpoint("unit-cut")
        self._since = misfit.commit_lsn
        target = target_of(self.record, misfit.label)
        after = self._insist(partial(self._look_at, target))
        verdict = self._decide(target, after, misfit.relation)
        if torn and not isinstance(verdict, Refuse):
            # The next try filters what the parts have been staged for in vain.
            self._insist(partial(self._adopt, misfit.label, "a transaction has changed it"), misfit.label)
            raise _torn()
        self._insist(partial(self._change, target, verdict), misfit.label)

    def _commit(self, start: Lsn, end: Lsn, unit: list[StagedPiece], ahead: Ahead | None) -> bool:
        """Commit a unit; false when rows had to be read again, so that it must be staged anew."""
        split = frozenset[str]().union(*(piece.split_truncates for piece in unit))
        try:
            if ahead is not None and ahead.commit(unit):
                return True
            if split:
                for label in sorted(split):
                    self._insist(partial(adopt, self.run, label, self.barriers), label)
            elif self._identities_hold(unit):
                self.run.sink.commit(self.run.epoch, start, end, unit)
                return True
        except MissingValues as e:
            changed = self._insist(partial(read_keys_again, self.run, self.record, e.keys, _xids(unit)))
            for label in changed:  # what has been read stays so, however long these have to wait
                self._insist(partial(self._adopt, label, "its definition has changed since"), label)
        self.record = existing_record(self.run.pipeline)
        return False

    def _identities_hold(self, unit: list[StagedPiece]) -> bool:
        """Whether rows that the unit takes for one are one; false when a table had to be read again for it.

        Whoever gives a table another key, or all of its rows other values, locks out everybody who writes to it. So
        what the catalog says after the unit's transactions, if it still is what was recorded, has held for all of them.

        :raises CannotFollow: when the key is made of other columns, or the table is gone.
        """
        touched = {staged.label for piece in unit for staged in piece.tables}
        watched = [target for target in self._watched() if target.table.label in touched]
        if not watched:
            return True
        found = self._insist(self._look_anew)
        held = True
        for target in watched:
            table, after = target.table, found.get(target.table.label)
            if after is None:
                continue
            verdict = self._decide(target, after)
            if isinstance(after, Table):
                # Without a key the whole row is what is looked for.
                other = has_other_keys(table, after) or (isinstance(verdict, Adopt) and not table.key)
            else:
                other = bool(table.key)  # nobody can tell by which one the rows of the unit are told apart
            if other:
                self._insist(partial(self._change, target, verdict), table.label)
                held = False
        return held


def _xids(unit: list[StagedPiece]) -> npt.NDArray[np.uint32]:
    """The transactions of a unit, distinct."""
    return np.unique(np.concatenate([np.frombuffer(piece.xids, "<u4") for piece in unit]))


def _torn() -> StreamFailed:
    return StreamFailed(
        "rows were read again in the middle of a large transaction; it has to be streamed again",
        "Start again: the stream goes on from the last commit.",
    )


def _numbered(pieces: list[StagedPiece]) -> list[StagedPiece]:
    """Pieces of several batches, numbered in the order in which they are applied."""
    return [replace(piece, index=i) for i, piece in enumerate(pieces)]
