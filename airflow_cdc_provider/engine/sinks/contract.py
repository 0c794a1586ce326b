"""The two-phase protocol between the engine and a sink.

In the terms of Flink's ``TwoPhaseCommitSinkFunction``: executors *stage* the pieces of a unit (pre-commit). The driver
*commits* all of them in one atomic step that checks the epoch, applies the data and records the unit, or *aborts*. The
commit record is the ground truth of the pipeline: whatever a crash leaves behind, the record says what has been
applied.

A unit is a chunk of the snapshot, an interval ``(start, end]`` of whole source transactions, or a re-read. Chunks are
committed by the task that read them.

Delivery: a unit may be staged more than once, and committed again after a crash between the store's commit and Spark's.
A sink applies it once: a unit that is recorded as applied is refused or skipped, and leftovers of earlier attempts are
never applied.

Order: units of the stream are committed in the order of the log, each beginning where the one before ended. Within a
unit the effects of a table are applied in the order of the pieces. Chunks and re-reads are committed between them, in
any order; the stream knows from the watermarks in the record which of its changes they contain.

Concurrency: tasks stage and write chunks at the same time, on many hosts; one driver commits. Two drivers may be alive
at once, but only one has the epoch: every step that changes something checks the epoch in the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.comparison.view_result import ViewResult
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.piece_store import PieceStore
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, Staged, StagedPiece
from airflow_cdc_provider.engine.views.explanation import ViewExplanation
from airflow_cdc_provider.engine.views.recorded import RecordedViews
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion


@runtime_checkable
class Eager(Protocol):
    """A sink that can apply a unit while its last pieces are still being staged, see :mod:`.pipelined_commit`."""

    def commit_as_staged(self, epoch: int, start: LogPosition, end: LogPosition, pieces: Iterator[StagedPiece]) -> bool:
        """Commit a unit as :meth:`Sink.commit`, with pieces that come one by one in the order of their ``index``.

        Other pieces are staged meanwhile, so nothing may be locked that :meth:`Sink.stage` needs. If the iterator
        raises, nothing may be left applied. It raises when a piece does not come for five seconds, since another
        session's lock may block it until the transaction ends.
        """


@runtime_checkable
class Rehearsing(Protocol):
    """A sink that can check whether it would commit what has been staged."""

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """Apply pieces as :meth:`Sink.commit` would, and roll back; what was staged stays.

        :raises CdcError: as :meth:`Sink.commit`.
        """


class ViewKeeper(Protocol):
    """Builds and drains the views of a sink, step by step; see :class:`KeepsViews`."""

    def reconcile(self) -> None:
        """Record which views of the file are new, changed or removed; called before the first unit of a stream.

        :raises ConfigError: when a view of the file cannot be maintained.
        """

    def step(self, everything: bool = False) -> bool:
        """Do the next step, which takes about a second; return whether there was one.

        :param everything: drain all queues, also those of views that are refreshed only now and then.
        :raises Fenced: when another run has the epoch.
        :raises ConfigError: when a view of the pipeline file cannot be maintained.
        """

    def reached(self, target: LogPosition) -> bool:
        """Return whether all views are built and have all changes up to a position."""


@runtime_checkable
class KeepsViews(Protocol):
    """A sink that keeps tables equal to SELECTs over its mirror, see :mod:`.view_upkeep`.

    Units, re-reads and changes of definitions carry the views along in the same step. What takes longer is done by a
    keeper, between units, while the stream runs.
    """

    def keeps_views(self) -> bool:
        """Return whether the pipeline file has views, or the record has some of an earlier file."""

    def view_keeper(self, epoch: int) -> ViewKeeper:
        """Return the keeper of the sink's views."""

    def view_versions(self) -> Sequence[ViewVersion]:
        """Return the recorded versions of the views."""

    def recorded_views(self) -> RecordedViews | None:
        """Return the views in the commit record, from one snapshot; ``None`` if there are none."""

    def compare_views(self) -> Iterator[ViewResult]:
        """Compare the rows of each recorded view with its SELECT, both from one snapshot; a stream may run meanwhile.

        Anchors in the queue and those that are not built yet are left out and counted.

        :raises UnknownTable: when the table of a view does not exist.
        """

    def explain_view(self, settings: ViewSettings, targets: Sequence[Target]) -> ViewExplanation:
        """Explain the upkeep of a view; without the target tables only what its SELECT tells.

        :param targets: the targets that the view may read.
        :raises ConfigError: when the view cannot be maintained.
        """

    def drop_views(self) -> Sequence[str]:
        """Drop the tables and the records of views that the file no longer has, between units; return their labels."""


class CommitRecord(Protocol):
    """Keeps the commit record of a pipeline."""

    def identity(self) -> Mapping[str, Any]:
        """Return JSON values that identify this store, also against a later one at the same address."""

    def record(self) -> Record | None:
        """Return the commit record; ``None`` when there is none."""

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Make ``owner`` the only one that may commit; wait for commits in flight.

        :returns: the new epoch: the greatest of the next number, ``at_least``, and the milliseconds since 1970 by the
            store's clock. Because of the clock, no epoch is used twice when a record is restored or created again.
        :raises Blocked: when commits in flight do not end.
        """

    def fenced(self, epoch: int) -> AbstractContextManager[None]:
        """Keep other runs from taking the epoch during the block, which works on something else than the sink.

        The block does not use the sink; other threads and tasks may commit meanwhile, or wait.

        :raises Fenced: when the epoch is another's.
        """

    def end_sessions(self) -> None:
        """End open sessions, those of the part or all of the pipeline's, and wait until none can commit any more.

        Otherwise a lost host or a paused process would hold its locks for hours.

        :raises Blocked: when they do not end.
        """

    def sweep(self, epoch: int) -> None:
        """Remove everything staged, between units, but no deposits; do nothing if the epoch is another's by now."""

    def drop(self) -> None:
        """Remove the commit record, everything staged and all deposits; target tables stay."""


class Sink(CommitRecord, PieceStore, Protocol):
    """A store that applies units atomically. The object is small, immutable and picklable; it connects on demand.

    Methods are called on the driver, in any thread, unless their docstrings say otherwise. Several runs may call them
    at once, but only one has the epoch. Errors of the store's driver are raised as :class:`.errors.CdcError`, whose
    class says whether another attempt helps. ``docs/sinks/custom.md`` walks through a small sink.
    """

    @property
    def mode(self) -> Literal["mirror", "changelog"]:
        """Return ``mirror`` if tables are kept equal, ``changelog`` if changes are appended."""

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """Create commit record and target tables, or accept existing target tables that are ours; all or nothing.

        :param chunks: of the targets, unfinished.
        :param ours: labels of tables whose targets are known to be the pipeline's, although no record says so; their
            chunks have no bounds, and replace the existing rows.
        :param rehearsal: roll everything back, to find out only whether an error is raised.
        :raises ForeignTable: when a target table has rows that are not ours, or not our key or columns, or belongs to
            another pipeline.
        :raises GateClosed: when such a target is a changelog of a timeline that the source has abandoned.
        :raises SecondWriter: when there is a record by now.
        """

    def add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        """Add tables to the commit record, and create their target tables or accept empty ones; all or nothing.

        :param chunks: of the targets, unfinished.
        :raises ForeignTable: as :meth:`prepare`.
        :raises Fenced: when another run has taken over.
        """

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: LogPosition,
        rehearsal: bool = False,
    ) -> None:
        """Begin again from another start of the slot: every table is one unfinished chunk, whose rows replace it.

        :param rehearsal: as for :meth:`prepare`.
        :raises Fenced: when another run has taken over.
        :raises ForeignTable: as :meth:`prepare`.
        :raises CannotFollow: when a target table cannot be changed.
        :raises GateClosed: when a changelog has events beyond that point, of a timeline that the source has abandoned.
        """

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: ServerIdentity,
        rows: SourceRows,
    ) -> Any:
        """Write a chunk: its rows, then their watermark. Runs on an executor.

        A store with transactions commits the chunk in the same step; others write the rows where :meth:`commit_chunks`
        finds them. The rows of a chunk without bounds replace those in the table. No unit may be applied between the
        first row and the commit, since the rows are older than that unit.

        :param origin: the server that the rows come from, which must be the one in the record's ``identity``.
        :param rows: taken once and to the end, then finished, see :class:`.SourceRows`.
        :returns: a picklable object for :meth:`commit_chunks`; ``None`` when the chunk had been committed before.
        :raises Fenced: when the epoch is another's.
        :raises StreamFailed: when another part of the run has gone on to another server, and recorded that.
        """

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """Commit chunks that have been written, unless :meth:`write_chunk` did. Runs on the driver, in any thread.

        The call has all chunks that were written during the previous call, so a store with slow commits can commit them
        together.

        :returns: rows of each; ``None`` when it had been committed before.
        :raises CdcError: as :meth:`write_chunk`; some may have been committed.
        """

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        rows: SourceRows,
        before: Target | None,
    ) -> int:
        """Commit a re-read: the rows with ``keys`` (all rows when ``None``) become those that were read.

        A target table that is gone is created again when all rows are read. In the record, the read of a whole table
        replaces all its chunks, as chunk 0; the read of some ``keys`` is added under a free index. As for a chunk, no
        unit may be applied between the first row and the commit.

        :param rows: as for :meth:`write_chunk`. The sink leaves out rows whose key is not equal to one of ``keys`` by
            the target's rules: the source compares values, the target perhaps their texts.
        :param before: the target as it is recorded, which becomes ``target`` in the same step; ``None`` for a table
            that joins the pipeline.
        :returns: rows written.
        :raises Fenced: when the epoch is another's.
        :raises CannotFollow: when the target table cannot be changed.
        :raises ForeignTable: when the table joins, and its target table has rows that are not ours.
        """

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Change a target table as its source has been changed, between two units; rows stay.

        The changes are those of :func:`.redefinition.redefinition`; ``after`` is recorded in the same step.

        :raises RowsNeeded: when the table would then have values that are not the source's; nothing was changed.
        :raises CannotFollow: when the target table cannot be changed.
        :raises Fenced: when the epoch is another's.
        """

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """Remove tables from the commit record; target tables stay.

        :raises Fenced: when the epoch is another's.
        """

    def check_condition(self, target: Target, where: str) -> None:
        """Let the store check a user's condition on a target's rows, without evaluating it.

        :raises ConfigError: when it is not valid there; a :class:`psycopg2.Error` is turned into one.
        """

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of the target's rows that match an SQL condition; none in a changelog."""

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """Match keys against re-read keys (members), using the target's own notion of key equality.

        Runs on an executor.

        :param members: texts of the keys that were read again.
        :param keys: per key column the texts of the keys in question.
        :returns: pairs of the index of a key and that of an equal member.
        """

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Write the effects of a piece where ``commit`` can apply them. Runs on an executor.

        :param attempt: a name that no other attempt of any piece has, of letters, digits and ``_``.
        :param effects: in the order in which they are applied; a table may have several.
        :returns: one for each effect, in order.
        :raises Fenced: when the epoch is another's.
        """

    def commit(
        self,
        epoch: int,
        start: LogPosition,
        end: LogPosition,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """Apply the unit ``(start, end]`` atomically, its pieces in the order of their ``index``.

        For each effect, in this order: the table is emptied if ``truncate`` is set; values that are ``missing`` are
        taken from the target's rows under the keys ``o0``, …; all its keys are deleted; the rows that are not
        ``erased`` are inserted. So a row may take the key that another row leaves. In the record ``applied`` becomes
        ``end``. Re-reads of keys are removed from it if ``end`` has reached their high watermark; chunks stay. What was
        staged is removed, too.

        :param noted: values of the record's ``identity``, changed in the same step.
        :returns: false when the unit is recorded as applied before.
        :raises MissingValues: when rows must be read again first; nothing was applied.
        :raises Fenced: when the epoch is another's.
        :raises GateClosed: when the unit does not begin where the record ends.
        :raises StagingLost: when staged rows are gone, or the record has a chunk or re-read with a higher high
            watermark than a piece's ``high``, since its rows were read after the piece was staged.
        """

    def record_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity`` that describe how the source has moved on.

        :raises Fenced: when the epoch is another's.
        """

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """Give a table and its target as a comparison reads them; most sinks use :func:`.fetched_side.row_sides`.

        :param source: autocommitting, to the primary.
        :raises UnknownTable: when the target or one of its columns does not exist.
        """

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a target, see :data:`.fetched_side.Rows`.

        :raises UnknownTable: when the target or one of its columns does not exist.
        """

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose table no longer exists."""
