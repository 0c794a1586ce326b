"""The two-phase protocol between the engine and a sink.

In the terms of Flink's ``TwoPhaseCommitSinkFunction``: executors *stage* the pieces
of a unit (pre-commit), the driver *commits* all of them in one atomic step that
checks the epoch, applies the data and records the unit, or *aborts*. The commit
record is the ground truth of the pipeline: whatever a crash leaves behind, the
record says what has been applied.

A unit is a chunk of the snapshot, an interval ``(start, end]`` of whole source
transactions, or a re-read. Chunks are committed by the task that read them.

Delivery: a unit may be staged more than once, and committed again after a crash
between the store's commit and Spark's. A sink applies it once: what the record
says to be applied is refused or skipped, and leftovers of earlier attempts are
never applied.

Order: units of the stream are committed in the order of the log, each beginning
where the one before ended. Within a unit the effects of a table are applied in
the order of the pieces. Chunks and re-reads are committed beside them, in any
order; the record's watermarks tell the stream which of its changes they have.

Concurrency: tasks stage and write chunks at the same time, on many hosts; one
driver commits. Two drivers may be alive at once, of which one alone has the
epoch: every step that changes something checks it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Record, Target, Watermark
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, Staged, StagedPiece


@runtime_checkable
class Copyable(Protocol):
    """Batches of the source's rows that can also be had as Postgres itself would copy them, for the sink to choose."""

    def copied(self, constants: Sequence[tuple[str, str]] = (), binary: bool = False) -> Iterator[bytes]:
        """The rows as COPY writes them, some bytes at a time, instead of the batches, with columns beside.

        They are read at the source when they are asked for.

        :param constants: text and SQL type of each further column.
        :param binary: in COPY's binary format, not as text.
        """


@runtime_checkable
class Eager(Protocol):
    """A sink that can apply a unit while its last pieces are still being staged, see :mod:`.pipelined_commit`."""

    def commit_as_staged(self, epoch: int, start: LogPosition, end: LogPosition, pieces: Iterator[StagedPiece]) -> bool:
        """As :meth:`Sink.commit`, but of pieces that come one by one in the order of their ``index``.

        Others are staged meanwhile, so nothing may be locked that :meth:`Sink.stage` needs. What the iterator raises
        leaves nothing applied; it raises when a piece does not come for five seconds, as somebody else's lock may keep
        it until the transaction ends.
        """


@runtime_checkable
class Rehearsing(Protocol):
    """A sink that can tell whether it would commit what has been staged."""

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """Apply pieces as :meth:`Sink.commit` would, and take it back; what was staged stays.

        :raises CdcError: as :meth:`Sink.commit`.
        """


class CommitRecord(Protocol):
    """Who keeps the commit record of a pipeline."""

    def identity(self) -> Mapping[str, Any]:
        """What tells this store from every other, also from one that has its address later; JSON values."""

    def record(self) -> Record | None:
        """The commit record; ``None`` when there is none."""

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Make ``owner`` the only one who may commit; waits for commits in flight.

        :returns: the new epoch: the greatest of the next number, the milliseconds since 1970 by the store's clock, so
            that no epoch comes twice when a record is restored or made anew, and ``at_least``.
        :raises Blocked: when they do not end.
        """

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """Remove deposits, all when ``None``; nothing when the epoch is another's by now."""

    def fenced(self, epoch: int) -> AbstractContextManager[None]:
        """Keep others from taking the epoch while something is done beside the sink.

        Nothing is asked of the sink within; other threads and tasks may commit meanwhile, or wait.

        :raises Fenced: when the epoch is another's.
        """

    def end_sessions(self) -> None:
        """End open sessions, and wait until none can commit any more: those of the part, or all of the pipeline's.

        A lost host or a paused process would hold its locks for hours.

        :raises Blocked: when they do not end.
        """

    def sweep(self, epoch: int) -> None:
        """Remove everything staged, but no deposits, between units; nothing when the epoch is another's by now."""

    def drop(self) -> None:
        """Remove the commit record, everything staged and all deposits; target tables stay."""


class Sink(CommitRecord, Protocol):
    """A store that takes units atomically. Small, immutable and picklable: it connects when it has to.

    Methods are called on the driver, in any thread, unless they say otherwise; by several runs at once, of which one
    alone has the epoch. Whatever the store's driver raises leaves as a :class:`.errors.CdcError`, whose class says
    whether trying again helps. ``docs/sinks/custom.md`` walks through a small one.
    """

    @property
    def mode(self) -> Literal["mirror", "changelog"]:
        """Whether tables are kept equal or changes appended."""

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str] = (),
        rehearsal: bool = False,
    ) -> None:
        """Create commit record and target tables, or accept target tables that are there and ours; all or nothing.

        :param chunks: of the targets, unfinished.
        :param ours: labels of tables whose targets are known to be the pipeline's, although no record says so; their
            chunks have no bounds, and replace what is there.
        :param rehearsal: take everything back, so that nothing remains but what is raised.
        :raises ForeignTable: when a target table has rows that are not ours, or not our key or columns, or is another
            pipeline's.
        :raises GateClosed: when such a target is a changelog of a history that the source has left.
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
        :raises CannotFollow: when a target table does not let it be changed.
        :raises GateClosed: when a changelog has events beyond that point, of a history that the source has left.
        """

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Any:
        """Write a chunk: rows, then the watermark that ``finish`` returns. Runs on an executor.

        A store with transactions commits it in the same step, others write the rows where :meth:`commit_chunks` finds
        them. The rows of a chunk without bounds replace what the table holds. No unit may be applied between the
        first batch and the commit: the rows are of before it.

        :param origin: the server that the rows come from, which must be the one in the record's ``identity``.
        :param batches: the captured columns as text, in the order of ``target.table.columns``; names mean nothing.
            They are read at the source when they are asked for. Of the project's own snapshots they are
            :class:`Copyable`.
        :param finish: to be called once, after the last batch and before the commit.
        :returns: what :meth:`commit_chunks` needs, picklable; ``None`` when the chunk had been committed before.
        :raises Fenced: when the epoch is another's.
        :raises StreamFailed: when another part of the run has gone on to another server, and noted it in the record.
        """

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """Commit chunks that have been written, if that was not done in one step. Runs on the driver, in any thread.

        They are all that were written while those before were committed: a store whose commits take long commits them
        together.

        :returns: rows of each; ``None`` when it had been committed before.
        :raises CdcError: as :meth:`write_chunk`; some may have been committed.
        """

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """Commit a re-read: the rows with ``keys`` (all rows when ``None``) become those of ``batches``.

        A target table that is gone is created again when all rows are read. In the record, the rows of a whole table
        take the place of all its chunks, as chunk 0; those with ``keys`` come beside them under an index that is free.
        As for a chunk, no unit may be applied between the first batch and the commit.

        :param batches: as for :meth:`write_chunk`. Rows under keys that are not members in the target's eyes are left
            out: the source finds by values, the target perhaps by their texts.
        :param before: the target as it is recorded, which becomes ``target`` in the same step; ``None`` for a table
            that joins the pipeline.
        :returns: rows written.
        :raises Fenced: when the epoch is another's.
        :raises CannotFollow: when the target table does not let it be changed.
        :raises ForeignTable: when the table joins, and its target table has rows that are not ours.
        """

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Change a target table as its source has been changed, between two units; rows stay.

        What has changed is told by :func:`.schema_change.redefinition`; ``after`` is recorded in the same step.

        :raises RowsNeeded: when that would leave values in it that are not the source's; nothing was changed.
        :raises CannotFollow: when the target table does not let it be changed.
        :raises Fenced: when the epoch is another's.
        """

    def forget(self, epoch: int, labels: Sequence[str]) -> None:
        """Remove tables from the commit record; target tables stay.

        :raises Fenced: when the epoch is another's.
        """

    def check_condition(self, target: Target, where: str) -> None:
        """Let the server judge a user's condition on a target's rows, without evaluating it for any.

        :raises ConfigError: when it is none there; a :class:`psycopg2.Error` is made one.
        """

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """The keys of the target's rows that match an SQL condition; none in a changelog."""

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """Tell which keys are which members of re-reads, in the eyes of the target: it says which of its keys are one.

        Runs on an executor.

        :param members: texts of keys.
        :param keys: per key column the texts of the keys in question.
        :returns: pairs of the place of a key and that of a member.
        """

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Keep a piece of the log that is too large to pass through Spark. Runs beside the driver.

        :param name: one that no other deposit has.
        :raises Fenced: when the epoch is another's.
        """

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """What has been deposited. Runs on an executor, and again if its task is tried again.

        :param size: bytes that it must have.
        :raises Fenced: when the epoch is another's.
        :raises StagingLost: when it is gone.
        """

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Write the effects of a piece where ``commit`` can apply them. Runs on an executor.

        :param attempt: a name that no other attempt of any piece has, of letters, digits and ``_``.
        :param effects: in the order in which they are applied; of one table there may be several.
        :returns: one for each, in order.
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

        For each effect, in this order: the table is emptied if it says ``truncate``; values that are ``missing`` are
        taken from the target's rows under the keys ``o0``, …; then all its keys are deleted, and the rows that are not
        ``erased`` inserted: a row may take the key that another one leaves. In the record ``applied`` becomes ``end``;
        re-reads of keys whose H it has reached are removed, chunks stay. What was staged is removed too.

        :param noted: values of the record's ``identity``, changed in the same step.
        :returns: false when the record says that it had been applied before.
        :raises MissingValues: when rows must be read again first; nothing was applied.
        :raises Fenced: when the epoch is another's.
        :raises GateClosed: when the unit does not begin where the record ends.
        :raises StagingLost: when staged rows are gone, or the record has a chunk or re-read with a higher H than a
            piece's ``high``: its rows were read since.
        """

    def note_source(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Change values of the record's ``identity``, which tell how the source has moved on.

        :raises Fenced: when the epoch is another's.
        """

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """A table and its target, as a comparison reads them; see :func:`.fetched_side.row_sides` for what makes them.

        :param source: autocommitting, to the primary.
        :raises UnknownTable: when the target or one of its columns does not exist.
        """

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """What a target holds, see :data:`.fetched_side.Rows`.

        :raises UnknownTable: when the target or one of its columns does not exist.
        """

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """The targets whose table no longer exists."""
