"""Postgres as the source of a pipeline: implements the source contract with the modules of this folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from psycopg2.errors import LockNotAvailable

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    Fenced,
    SlotBudgetExceeded,
    SparkUnusable,
)
from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres import slots
from airflow_cdc_provider.engine.postgres.connection import Connection, connect, connected, describe, row
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.commit_records import existing_record, require_targets, sink_of
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress, StreamProgress
from airflow_cdc_provider.engine.runs.run import Run, budget_of
from airflow_cdc_provider.engine.runs.source import Fence
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink
from airflow_cdc_provider.engine.sources.contract import (
    CheckedSource,
    Follow,
    Reached,
    ReadRecord,
    SourceStatus,
    TellTable,
    blocking_error,
)
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.table_sizes import size_of_chunks, size_of_tables
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning, removal, slot
from airflow_cdc_provider.engine.sources.postgres.provision.gate import gate, record_passage, require_primary
from airflow_cdc_provider.engine.sources.postgres.provision.preflight import check_tables
from airflow_cdc_provider.engine.sources.postgres.provision.readiness import check_settings
from airflow_cdc_provider.engine.sources.postgres.provision.slot_session import reader_of, slot_session
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import RESNAPSHOT, STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_cdc_provider.engine.sources.postgres.reading.rereads import PostgresRereads

_RELEASE_SECONDS = 5.0
_SIZE_LOCK_TIMEOUT = "1s"
_ANY: tuple[type[Exception], ...] = (CdcError, *DRIVER_ERRORS)
_SYSTEM = "SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system())::text, pg_catalog.current_database()"


class PostgresSource:
    """See :class:`.sources.contract.Source`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.settings = postgres_settings(pipeline)

    # -- runs ---------------------------------------------------------------------------------------

    @property
    def slot(self) -> str:
        """See :attr:`.AttachedSource.slot`."""
        return self.settings.slot

    @property
    def without_record(self) -> str:
        """See :attr:`.AttachedSource.without_record`."""
        return (
            "Run `airflow-cdc provision` (or `run`) first. If the record has been lost, run"
            " `airflow-cdc resnapshot --all`, in Airflow the Dag cdc_resnapshot with Everything: it recreates the"
            " record, with publication and slot, and reads all tables again."
        )

    def without_targets(self, gone: Sequence[Target], record: Record) -> str:
        """See :meth:`.AttachedSource.without_targets`."""
        tables = "--all" if record.unfinished else " ".join(f"--table {target.table.label}" for target in gone)
        return f"Run `airflow-cdc resnapshot {tables}`: it creates and fills them."

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """See :meth:`.AttachedSource.take_epoch`."""
        # The slot of the record, not of the file: a slot that the file names by mistake belongs to something else.
        name = RecordedSlot.of(record.identity).slot_identity.slot
        # The session is opened first: a run whose role may not replicate must not end one whose role may.
        with connected(self.settings.dsn) as source, slot_session(self.settings, source) as session:
            require_primary(source)
            epoch = records.take_epoch(owner)
            slot.end_walsender(session, name, reader_of(self.settings, name), partial(records.fenced, epoch))
        return epoch

    def enter(self, part: str) -> None:
        """See :meth:`.AttachedSource.enter`."""
        with connected(self.settings.dsn) as source:
            branches = self.pipeline.branches
            passages = [gate(source, self.settings, partial(existing_record, branch)) for branch in branches]
        for branch, passage in zip(branches, passages, strict=True):
            sink, record = sink_of(branch, part), passage.record
            if part != RESNAPSHOT:
                require_targets(branch, sink, record)
            # Parts of a run share the record's row with chunks in flight, so they write only what is necessary. A part
            # that has nothing to read does not write: a stream may be at work, on the timeline that is recorded.
            reads = part == RESNAPSHOT or bool(record.unfinished)
            if part == STREAM or (reads and passage.has_moved):
                record_passage(sink, record, passage)

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """Record the slot's position, once its reader is gone and the server has saved it."""
        with connected(self.settings.dsn) as source:

            def free() -> bool:
                state = slots.read_slot(source, self.settings.slot)
                return state is None or not state.active

            if existing_record(self.pipeline).epoch == epoch and await_condition(free, _RELEASE_SECONDS):
                for branch, sink in zip(self.pipeline.branches, sinks, strict=True):
                    passage = gate(source, self.settings, partial(existing_record, branch))
                    record_passage(sink, replace(passage.record, epoch=epoch), passage)

    def end_readers(self, fence: Fence) -> None:
        """See :meth:`.AttachedSource.end_readers`."""
        with connected(self.settings.log_dsn) as source:
            slot.end_walsender(source, self.settings.slot, reader_of(self.settings), fence)

    def look_at_slot(self) -> slots.SlotState | None:
        """See :meth:`.AttachedSource.look_at_slot`."""
        with contextlib.suppress(ConnectionFailed, *DRIVER_ERRORS), connected(self.settings.dsn) as connection:
            return slots.read_slot(connection, self.settings.slot)
        return None

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """See :meth:`.AttachedSource.give_up_slot`."""
        name = self.settings.slot
        try:
            with connected(self.settings.log_dsn) as source:
                slot.end_walsender(source, name, reader_of(self.settings), fence)
                with fence():
                    slot.drop_free_slot(source, name)
        except Fenced:
            raise
        except _ANY as e:
            raise SlotBudgetExceeded(
                f"{exceeded.message}; it could not be dropped: {str(e).strip()}",
                f"Drop it on the source, SELECT pg_drop_replication_slot('{name}'), or make room there. If it is"
                " dropped, the repair is `airflow-cdc resnapshot --all`, then stream.",
            ) from e

    # -- before anything is touched -----------------------------------------------------------------

    @contextmanager
    def checking(self, checks: Checks) -> Iterator[CheckedSource]:
        """See :meth:`.Source.checking`."""
        dsn = self.settings.dsn

        def opened() -> Connection:
            return connect(dsn, "airflow-cdc preflight")

        source = checks.run("source", opened, lambda _: f"source {describe(dsn)} is reachable.")
        if source is None:
            yield CheckedSource()
            return
        with closing(source):
            tables = identity = None
            if check_settings(checks, source, self.settings):
                tables = check_tables(checks, source, self.pipeline)
            if checks.passed("functions"):  # they are needed to read the identity of the server
                try:
                    identity = _identity(source)
                except DRIVER_ERRORS as e:
                    checks.run("identity", partial(_fail, e))
            yield CheckedSource(tables, identity, partial(self._continues, source))

    @property
    def checks_with_spark(self) -> bool:
        """See :attr:`.Source.checks_with_spark`."""
        return False

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """Return no findings, since tables are read without the JVM."""
        return []

    def require_spark(self, spark: SparkSession) -> None:
        """Check that Spark can reach the state location, where its checkpoint is to be."""
        context, state = spark.sparkContext, self.pipeline.state
        jvm, configuration = context._jvm, context._jsc.hadoopConfiguration()
        try:
            path = jvm.org.apache.hadoop.fs.Path(state)  # type: ignore[union-attr]
            path.getFileSystem(configuration).exists(path)
        except Exception as e:
            cause = str(getattr(e, "java_exception", e)).splitlines()[0]
            raise SparkUnusable(
                f"Spark cannot reach the state {state}, where its checkpoint is to be: {cause}",
                "Give `state` a URL that Spark knows as well, and what it needs for it in spark.conf, such as the"
                " package of an object store by spark.jars.packages.",
            ) from e

    def require_continuation(self, readers: Sequence[ReadRecord]) -> str:
        """See :meth:`.Source.require_continuation`."""
        with connected(self.settings.dsn) as source:
            require_primary(source)
            return self._continues(source, readers)

    def _continues(self, source: Connection, readers: Sequence[ReadRecord]) -> str:
        for read in readers:
            if not self._complete(source, read()):
                gate(source, self.settings, read)
        return "The source can continue what the sinks have." if readers else "Nothing has been provisioned yet."

    def _complete(self, source: Connection, record: Record) -> bool:
        """Return whether the pipeline was to copy only, and has done so and removed its slot."""
        copied = self.pipeline.snapshot.mode == "only" and record.consistent
        return copied and slots.read_slot(source, RecordedSlot.of(record.identity).slot_identity.slot) is None

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """See :meth:`.Source.joining`."""
        records = [sink_of(branch).record() for branch in self.pipeline.branches]
        recorded = [{target.table.label for target in record.targets} for record in records if record is not None]
        if len(recorded) < len(records):
            return []  # a sink joins, and a live stream cannot provision it
        with connected(self.settings.dsn) as source:
            tables = resolve(source, self.settings.tables)
        return [table.label for table in tables if not all(table.label in labels for labels in recorded)]

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """Provision publication, slot, and the plan of the chunks."""
        record, found = provisioning.provision(self.pipeline, takeover)
        return record, found.as_dict()

    def facts(self) -> Mapping[str, Any]:
        """Return the state of the slot."""
        with connected(self.settings.dsn) as source:
            return gate(source, self.settings, partial(existing_record, self.pipeline)).slot.as_dict()

    def workload(
        self, record: Record | None, chunks: Sequence[Chunk] = (), ending: Ending | None = None
    ) -> Workload | None:
        """See :meth:`.Source.workload`; a table that is locked has no known size."""
        with connected(self.settings.dsn, settings={"lock_timeout": _SIZE_LOCK_TIMEOUT}) as source:
            try:
                if record is None:
                    return size_of_tables(source, resolve(source, self.settings.tables))
                copied = size_of_chunks(source, record, chunks)
            except LockNotAvailable:
                return None
            if ending is None:
                return copied
            flushed = slots.flushed(source)
            ends = ending.caught_up or (ending.lsn is not None and ending.lsn <= flushed)
            # The server also sends the earlier changes of transactions that are committed later.
            found = slots.read_slot(source, self.settings.slot)
            begin = record.applied if found is None else min(record.applied, found.restart_lsn)
            return copied + Workload(0, max(flushed - begin, 0)) if ends else None

    def copy_chunks(
        self,
        spark: SparkSession | None,
        run: Run,
        record: Record,
        chunks: Sequence[Chunk],
        tell: Callable[[SnapshotProgress], None],
    ) -> None:
        """See :meth:`.Source.copy_chunks`."""
        from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import copy_chunks

        copy_chunks(spark, run, record, chunks, tell)

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """See :meth:`.Source.follower`."""
        from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob

        target = ending.lsn
        if ending.caught_up:
            with connected(self.settings.dsn, settings={"synchronous_commit": "local"}) as source:
                target = max(slots.emit_marker(source, "caught-up"), record.high)

        def follow(
            spark: SparkSession | None, run: Run, record: Record, tell: Callable[[StreamProgress], None]
        ) -> StreamProgress:
            return StreamJob(spark, run, record, tell).follow(target)

        return follow, lambda done: target is not None and done.applied >= target

    def is_finished(self, record: Record) -> bool:
        """Return whether the copy is consistent and its slot is removed."""
        if not record.consistent:
            return False
        with connected(self.settings.dsn) as source:
            return slots.read_slot(source, RecordedSlot.of(record.identity).slot_identity.slot) is None

    def release(self, record: Record) -> None:
        """See :meth:`.Source.release`."""
        with connected(self.settings.dsn, writes=True) as source:
            removal.remove_slot(source, self.pipeline, record, State(self.pipeline.state))

    def status(self, record: Record | None, readers: Sequence[ReadRecord], judge: bool) -> SourceStatus:
        """See :meth:`.Source.status`."""
        with connected(self.settings.dsn) as source:
            found = slots.read_slot(source, self.settings.slot)
            lag_bytes, lag_seconds = (None, None) if record is None else record.lag(slots.flushed(source), time.time())
            trouble = blocking_error(lambda: self._continues(source, readers)) if judge else None
        shown = None if found is None else {**found.as_dict(), "budget": self._budget(found)}
        return SourceStatus(lag_bytes, lag_seconds, shown, trouble=trouble)

    def _budget(self, found: slots.SlotState) -> dict[str, Any]:
        """Return what the slot may keep of the log, and how near it is to that."""
        budget = budget_of(self.pipeline)
        level = budget.level(found.retained)
        return {"max_retained_bytes": budget.limit, "action": budget.action, "level": level}

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """See :meth:`.Source.verify`."""
        from airflow_cdc_provider.engine.sources.postgres.verify import verify

        return verify(self.pipeline, live, tell)

    def rereads(self, command: str) -> PostgresRereads:
        """See :meth:`.Source.rereads`."""
        from airflow_cdc_provider.engine.sources.postgres.reading.rereads import PostgresRereads

        return PostgresRereads(self.pipeline)

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> NoReturn:
        """Refuse to skip messages, which only topics have.

        :raises ConfigError: always.
        """
        raise ConfigError(
            f"skip passes over messages of topics, and pipeline {self.pipeline.name!r} reads tables",
            "To go on without a change of the log, run `airflow-cdc resnapshot --all`.",
        )

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """Remove the slot, and the publication if the pipeline has made it."""
        return removal.remove(self.pipeline, takeover, source_gone)


def _fail(error: Exception) -> NoReturn:
    raise error


def _identity(source: Connection) -> SourceIdentity:
    system, database = row(source, _SYSTEM)
    return SourceIdentity(f"postgres {system}", lambda name: name == database)
