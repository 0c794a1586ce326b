"""The stream job: the log in units of whole transactions, staged by executors, committed by the driver.

Spark cuts the stream into batches and remembers how far it is; the sink's commit
record decides. A batch ends at a commit, so a batch is a unit, except for a
transaction larger than a batch: its parts are staged batch by batch and committed
with the last one. Spark's checkpoint is a cursor; one that is ahead of the record
is discarded and the stream begins again where the record says.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_cdc_provider.engine import errors
from airflow_cdc_provider.engine.buffer import Position
from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.chunks import chunk_of
from airflow_cdc_provider.engine.connection import Connection, connect, connected, describe
from airflow_cdc_provider.engine.drift import catalog_state, drifted, look
from airflow_cdc_provider.engine.effects import TableFilter, between, effects
from airflow_cdc_provider.engine.errors import Blocked, CannotFollow, CdcError, StreamFailed
from airflow_cdc_provider.engine.evolution import (
    Follow,
    Misfit,
    Refuse,
    Unchanged,
    Verdict,
    decide,
    first_misfit,
)
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.gate import Passage, gate
from airflow_cdc_provider.engine.lsn import format_lsn
from airflow_cdc_provider.engine.pgoutput import Piece, decode
from airflow_cdc_provider.engine.reading import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.reread import adopt, read_again, read_keys_again, take_requests, target_of
from airflow_cdc_provider.engine.run import Run, existing_record, note_passage
from airflow_cdc_provider.engine.sinks.base import MissingValues, Record, RowsNeeded, Sink, StagedPiece, Target
from airflow_cdc_provider.engine.slot import SlotState, emit_marker, read_slot, wait_until
from airflow_cdc_provider.engine.source import SourceOptions, postgres_cdc

_END = (1 << 63) - 1  # beyond every LSN
_POLL_SECONDS = 0.25
_ACKNOWLEDGE_SECONDS = 30.0
# Each staging after a re-read can ask for other rows: those that moved from the ones that were read.
_STAGINGS = 5
# A change of schema is followed, and if the log then shows that there was more to it, the table is read again.
_MEETINGS = 3


@dataclass(frozen=True)
class StreamProgress:
    """How far the stream is.

    :param applied: LSN durable in the sink.
    :param changes: row changes committed by this job.
    :param seconds: time spent in batches that held changes.
    """

    applied: int
    changes: int
    seconds: float

    def plus(self, further: StreamProgress) -> StreamProgress:
        """The progress after a further attempt, which begins where this one ended."""
        return StreamProgress(further.applied, self.changes + further.changes, self.seconds + further.seconds)


@dataclass(frozen=True)
class Stage:
    """The work of a staging task, as a function that Spark ships: raw pieces in, pickled messages out.

    :param since, before: bounds of the commit records of the transactions that are staged.
    """

    sink: Sink
    epoch: int
    batch: str
    targets: dict[int, Target]
    filters: dict[str, TableFilter]
    source_dsn: str = field(repr=False)
    since: int = 0
    before: int = _END

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                message: StagedPiece | Misfit | CdcError
                try:
                    message = self._stage(row["start"], row["end"], row["index"], row["piece"])
                except CdcError as e:  # returned, not raised: Spark would wrap it in text and try again
                    message = e
                except DRIVER_ERRORS as e:
                    message = driver_failure(e, "staging")
                yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(message)]})

    def _stage(self, start: str, end: str, index: int, data: bytes) -> StagedPiece | Misfit:
        piece = Piece.from_bytes(data) if data else None
        decoded = [between(changes, self.since, self.before) for changes in (decode(piece) if piece else [])]
        tables = {oid: target.table for oid, target in self.targets.items()}
        snapshots = {label: filter_.snapshots for label, filter_ in self.filters.items()}
        opened = piece.transaction.commit_lsn if piece and piece.transaction else 0
        misfit = first_misfit(decoded, tables, snapshots, opened)
        if misfit is not None:
            return misfit
        source: Connection | None = None

        def ask(table: Table, bounds: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
            nonlocal source
            source = source or connect(self.source_dsn)
            return chunk_of(source, table, bounds, keys)

        labelled = {target.table.label: target for target in self.targets.values()}

        def ask_members(
            table: Table, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
        ) -> Sequence[tuple[int, int]]:
            return self.sink.members(labelled[table.label], members, keys)

        try:
            net = effects(decoded, tables, self.filters, self.sink.mode, ask, ask_members)
        finally:
            if source is not None:
                source.close()
        staged = self.sink.stage(self.epoch, f"{self.batch}_{index}_{uuid.uuid4().hex[:8]}", net.effects)
        xids = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(c.xid for c in decoded)]))
        return StagedPiece(
            start,
            end,
            index,
            sum(len(c.op) for c in decoded),
            xids.astype("<u4").tobytes(),
            staged,
            net.split_truncates,
        )


class _RelationChanged(Exception):
    """A batch has changes in a format that is not the recorded one."""

    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit.label)
        self.misfit = misfit


@dataclass(frozen=True)
class _Drift:
    """Tables that were found to be defined otherwise than recorded.

    :param tables: by label what the catalog said, or why it cannot be followed.
    :param marker: LSN written afterwards; what comes after it in the log was changed under that definition.
    """

    tables: Mapping[str, Table | CdcError]
    marker: int

    def told(self, label: str, after: Table | CdcError) -> bool:
        """Whether this is what the catalog said."""
        before = self.tables.get(label)
        if isinstance(before, Table) and isinstance(after, Table):
            return before.to_dict() == after.to_dict()
        return isinstance(before, CdcError) and isinstance(after, CdcError) and before.message == after.message


class StreamJob:
    """Follows the log until told otherwise.

    :param report: called after every batch and about once a second.
    """

    def __init__(self, spark: SparkSession, run: Run, record: Record, report: Callable[[StreamProgress], None]) -> None:
        self._spark = spark
        self._run = run
        self._pipeline = run.pipeline
        self._sink = run.sink
        self._report = report
        self._record = record
        self._began = self._applied = record.applied
        self._changes = 0
        self._seconds = 0.0
        self._parts: list[StagedPiece] = []
        self._unit = threading.Lock()
        self._stopped = False
        self._failure: CdcError | None = None
        self._passage: Passage | None = None
        self._seen: Passage | None = None
        self._since = 0
        self._catalog = ""
        self._drift: _Drift | None = None
        self._refusal: CannotFollow | None = None

    def follow(self, target: int | None) -> StreamProgress:
        """Apply the log until everything up to ``target`` is durable, or for ever when ``None``.

        :returns: what was done. Ends early when the run is asked to stop.
        :raises CdcError: when the stream cannot go on.
        """
        return self._follow(self._start(), target)

    def _follow(self, query: StreamingQuery, target: int | None) -> StreamProgress:
        beat = time.monotonic()
        try:
            with connected(self._pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
                self.look(source)
                while not self._run.stopping and not self.done(target):
                    if self._terminated(query):
                        break
                    self._run.check()
                    if time.monotonic() - beat >= self._pipeline.stream.heartbeat:
                        beat = time.monotonic()
                        self._run.budget.look(self._gate(source))
                        self.look(source)
                        emit_marker(source, "heartbeat")
                    self._report(self._progress())
                self._await_acknowledgement(source, query)
        except DRIVER_ERRORS as e:
            raise driver_failure(e, describe(self._pipeline.source.dsn)) from e
        finally:
            self._stop(query)
        self._report(self._progress())
        if self._refusal is not None:
            raise self._refusal
        return self._progress()

    def done(self, target: int | None) -> bool:
        """Whether everything up to ``target`` is durable, DDL included, or the stream cannot go on."""
        reached = target is not None and self._applied >= target and self._drift is None
        return reached or self._refusal is not None

    def look(self, source: Connection) -> None:
        """Look whether the catalog has changed, and keep what it says until the log has been passed so far."""
        state = catalog_state(source, self._pipeline.source.publication, self._record.targets)
        if state == self._catalog:
            return
        found = drifted(source, self._run.pipeline, self._record.targets)
        if found:
            self._drift = _Drift(found, emit_marker(source, "definition"))
        self._catalog = state

    def _progress(self) -> StreamProgress:
        return StreamProgress(self._applied, self._changes, self._seconds)

    def _source_options(self) -> SourceOptions:
        pipeline = self._pipeline
        return SourceOptions(
            pipeline.source.dsn,
            pipeline.source.slot,
            pipeline.source.publication,
            self._applied,
            pipeline.stream.max_batch_bytes,
            pipeline.stream.heartbeat,
        )

    def _start(self) -> StreamingQuery:
        self._sink.sweep(self._run.epoch)
        self._discard_foreign_checkpoint()
        self._spark.dataSource.register(postgres_cdc(self._source_options()))
        pieces = self._spark.readStream.format("postgres_cdc").load()
        return (
            pieces.writeStream.queryName(f"airflow-cdc {self._pipeline.name}")
            .foreachBatch(self._batch)
            .option("checkpointLocation", self._run.state.checkpoint_url)
            .trigger(processingTime=f"{int(self._pipeline.stream.trigger * 1000)} milliseconds")
            .start()
        )

    def _discard_foreign_checkpoint(self) -> None:
        """Discard a checkpoint that the sink's record does not bear out: it is a cursor, and loses nothing."""
        try:
            latest = self._run.state.latest_offset()
        except ValueError:
            self._run.state.remove("checkpoint")
            return
        if latest is None:
            return
        position, committed = Position.from_json(latest[0]), latest[1]
        borne_out = position.lsn <= self._applied if committed else position.lsn == self._applied
        if position.block or not borne_out:
            self._run.state.remove("checkpoint")

    def _gate(self, source: Connection) -> SlotState:
        """Look whether the source can still continue; what was seen the time before, it has saved by now."""
        passage = gate(source, self._pipeline.source, self._record, lambda: self._applied)
        self._seen, self._passage = self._passage, passage
        return passage.slot

    def _terminated(self, query: StreamingQuery) -> bool:
        """Wait a little; raise what ended the query, if something did."""
        self._run.wait(_POLL_SECONDS)
        if query.isActive:
            return False
        failure = query.exception()
        if failure is not None:
            raise self._failure or _query_failure(str(failure)) from failure
        return True

    def _await_acknowledgement(self, source: Connection, query: StreamingQuery) -> None:
        """Leave the slot at what is applied: Spark tells the source so when it next asks for an offset."""
        applied, slot = self._applied, self._pipeline.source.slot
        if applied == self._began:
            return

        def acknowledged() -> bool:
            state = read_slot(source, slot)
            return state is None or state.confirmed_flush_lsn >= applied or self._terminated(query)

        wait_until(acknowledged, _ACKNOWLEDGE_SECONDS)

    def _stop(self, query: StreamingQuery) -> None:
        """Stop between two units: a batch that has begun ends, one that begins now is turned away."""
        with self._unit:
            self._stopped = True
        query.stop()
        # What stays if the sink is out of reach is swept at the next start; the error at hand says more.
        with contextlib.suppress(CdcError, *DRIVER_ERRORS):
            self._sink.sweep(self._run.epoch)

    # -- one batch ---------------------------------------------------------------------------------

    def _batch(self, pieces: DataFrame, batch: int) -> None:
        """Bring a batch into the sink. Whatever goes wrong must be raised, or Spark would commit the batch."""
        with self._unit:
            if self._stopped:
                raise StreamFailed("the stream has been stopped", "Start again: it goes on from the last commit.")
            try:
                if self._seen is not None and note_passage(self._sink, self._record, self._seen):
                    self._record = existing_record(self._pipeline)
                self._apply(pieces, batch)
            except CdcError as e:
                self._failure = e
                raise
            except DRIVER_ERRORS as e:
                self._failure = driver_failure(e, f"committing batch {batch}")
                raise
            except PySparkException as e:
                if not self._run.stopping:
                    self._failure = StreamFailed(
                        f"a Spark task of batch {batch} failed: {str(e).splitlines()[0]}",
                        "Start again: the stream goes on from the last commit. The task's error is in Spark's log.",
                    )
                raise

    def _apply(self, pieces: DataFrame, batch: int) -> None:
        if not self._parts:
            self._reread_on_request()
        self._since, met = 0, Counter[tuple[str, int]]()
        while True:
            try:
                self._bring(pieces, batch, None)
                break
            except _RelationChanged as e:
                met[e.misfit.label, e.misfit.commit_lsn] += 1
                if met[e.misfit.label, e.misfit.commit_lsn] > _MEETINGS:
                    raise StreamFailed(
                        f"{e.misfit.label} is described at {format_lsn(e.misfit.commit_lsn)} as it is not defined",
                        f"Run `airflow-cdc resnapshot --table '{e.misfit.label}'`.",
                    ) from e
                self._meet(e.misfit, pieces, batch)
        if not self._parts:
            self._settle()
        self._report(self._progress())

    def _bring(self, pieces: DataFrame, batch: int, before: int | None) -> None:
        """Bring the batch into the sink, or those of its transactions whose commit record lies before an LSN.

        :raises _RelationChanged: when nothing was committed, as there are changes in another format.
        """
        started = time.monotonic()
        staged = self._stage(pieces, batch, before)
        if not staged:
            return  # the sink has it already
        end = Position.from_json(json.loads(staged[0].end)) if before is None else Position(before)
        if end.block:
            self._parts += staged
            return
        unit = _numbered(self._parts + staged)
        # A checkpoint may be behind the record; what it would repeat, the source has not been asked for.
        start = max(Position.from_json(json.loads(unit[0].start)).lsn, self._applied)
        for _ in range(_STAGINGS):
            if self._commit(start, end.lsn, unit):
                break
            if self._parts:
                raise _torn()
            self._sink.sweep(self._run.epoch)
            unit = _numbered(self._stage(pieces, batch, before))
        else:
            raise StreamFailed(
                f"the unit ending at {format_lsn(end.lsn)} still lacks values after its rows were read again",
                "Run `airflow-cdc resnapshot` for the tables concerned.",
            )
        failpoint("before-spark-commit")
        self._parts = []
        self._applied = max(self._applied, end.lsn)
        changes = sum(piece.changes for piece in unit)
        if changes:
            self._changes += changes
            self._seconds += time.monotonic() - started

    def _stage(self, pieces: DataFrame, batch: int, before: int | None) -> list[StagedPiece]:
        filters = _open_filters(self._record, self._applied)
        stage = Stage(
            self._sink,
            self._run.epoch,
            f"{self._run.epoch}_{batch}",
            {leaf.oid: target for target in self._record.targets for leaf in target.table.leaves},
            filters,
            self._pipeline.source.dsn,
            self._since,
            _END if before is None else before,
        )
        found = pieces.mapInArrow(stage, "message binary").collect()
        messages = [pickle.loads(row.message) for row in found]
        misfits = [message for message in messages if isinstance(message, Misfit)]
        if misfits:
            raise _RelationChanged(min(misfits, key=lambda misfit: misfit.commit_lsn))
        for message in messages:
            if isinstance(message, CdcError):
                raise message
        return sorted(messages, key=lambda m: m.index)

    # -- changes of schema -------------------------------------------------------------------------

    def _meet(self, misfit: Misfit, pieces: DataFrame, batch: int) -> None:
        """Commit what comes before the first changes in another format; then follow the change of schema.

        The unit ends at the commit record of their transaction: those before end there or earlier, and the server
        sends a transaction again whose commit record begins at or after the position that is asked for.
        """
        torn = bool(self._parts) and misfit.inside
        if misfit.commit_lsn > self._applied and not torn:
            self._bring(pieces, batch, misfit.commit_lsn)
            failpoint("unit-cut")
        self._since = misfit.commit_lsn
        target = target_of(self._record, misfit.label)
        with connected(self._pipeline.source.dsn) as source:
            after = look(source, self._run.pipeline, [target])[misfit.label]
        verdict = decide(target.table, after, misfit.relation)
        if torn and not isinstance(verdict, Refuse):
            adopt(self._run, misfit.label)  # the next try filters what the parts have been staged for in vain
            raise _torn()
        self._change(target, verdict)

    def _settle(self) -> None:
        """Follow what the catalog was found to say, once everything from before has been applied."""
        drift = self._drift
        if drift is None or self._applied < drift.marker:
            return
        with connected(self._pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
            now = drifted(source, self._run.pipeline, self._record.targets)
            if not all(drift.told(label, after) for label, after in now.items()):
                self._drift = _Drift(now, emit_marker(source, "definition"))
                return
        refused = None
        for label, after in now.items():
            target = target_of(self._record, label)
            verdict = decide(target.table, after)
            if isinstance(verdict, Refuse):
                refused = CannotFollow(verdict.message, verdict.solution)
                continue
            try:
                self._change(target, verdict)
            except Blocked:
                return  # by a transaction that has not ended: later
        self._refusal = refused
        if self._drift is drift:
            self._drift = None

    def _change(self, target: Target, verdict: Verdict) -> None:
        """Carry out a verdict between two units."""
        if isinstance(verdict, Unchanged):
            return
        if isinstance(verdict, Refuse):
            raise CannotFollow(verdict.message, verdict.solution)
        try:
            if isinstance(verdict, Follow):
                self._sink.redefine(self._run.epoch, target, replace(target, table=verdict.table))
            else:
                adopt(self._run, target.table.label)
        except RowsNeeded:
            adopt(self._run, target.table.label)
        self._record = existing_record(self._pipeline)

    def _commit(self, start: int, end: int, unit: list[StagedPiece]) -> bool:
        """Commit a unit; false when rows had to be read again, so that it must be staged anew."""
        split = frozenset[str]().union(*(piece.split_truncates for piece in unit))
        if split:
            for label in sorted(split):
                read_again(self._run, self._record, label)
        else:
            try:
                self._sink.commit(self._run.epoch, start, end, unit)
                return True
            except MissingValues as e:
                xids = np.unique(np.concatenate([np.frombuffer(piece.xids, "<u4") for piece in unit]))
                read_keys_again(self._run, self._record, e.keys, xids)
        self._record = existing_record(self._pipeline)
        return False

    def _reread_on_request(self) -> None:
        if take_requests(self._run, self._record):
            self._record = existing_record(self._pipeline)


def _torn() -> StreamFailed:
    return StreamFailed(
        "rows were read again in the middle of a large transaction; it has to be streamed again",
        "Start again: the stream goes on from the last commit.",
    )


def _numbered(pieces: list[StagedPiece]) -> list[StagedPiece]:
    """Pieces of several batches, numbered in the order in which they are applied."""
    return [replace(piece, index=i) for i, piece in enumerate(pieces)]


def _open_filters(record: Record, applied: int) -> dict[str, TableFilter]:
    """The filters that still matter: a read sees nothing that committed after its H.

    Those that do not must be left out, since transaction ids can be compared only within 2^31 of each other.
    """
    filters = {}
    for target in record.targets:
        read = [
            (c, c.watermark) for c in record.chunks if c.chunk.table == target.table.label and c.watermark is not None
        ]
        ranges = [(c.chunk, watermark) for c, watermark in read if c.keys is None]
        if not any(watermark.high > applied for _, watermark in ranges):
            ranges = []
        reread = {key: watermark.snapshot for c, watermark in read if watermark.high > applied for key in c.keys or ()}
        if ranges or reread:
            filters[target.table.label] = TableFilter(
                bounds=tuple(chunk.lower for chunk, _ in ranges if chunk.lower is not None),
                snapshots=tuple(watermark.snapshot for _, watermark in ranges),
                reread=reread,
            )
    return filters


def _query_failure(text: str) -> CdcError:
    """What the source's process raised, told by its text: it is another process, which only Spark talks to."""
    lines = [line.strip() for line in text.splitlines() if "airflow_cdc_provider.engine.errors." in line]
    if lines:
        _, _, tail = lines[-1].partition("airflow_cdc_provider.engine.errors.")
        name, _, message = tail.partition(": ")
        kind = getattr(errors, name, StreamFailed)  # by which is decided whether to begin again
        return cast(CdcError, kind(message, "Start again: the stream goes on from the last commit."))
    return StreamFailed(
        f"the streaming query ended: {text.splitlines()[0] if text else 'without a message'}",
        "Start again: the stream goes on from the last commit. Spark's log has the whole error.",
    )
