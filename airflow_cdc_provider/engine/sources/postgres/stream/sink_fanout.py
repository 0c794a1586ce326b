"""Writes one stream to several sinks: each batch of the log is written to one after the other.

Each sink has its own commit record. If one was behind when the stream began, it takes all that the others already have,
and these leave it out. The slot is acknowledged up to the slowest sink. If a sink fails, the batch ends for all: the
log is kept until the sink is back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.provision.gate import Passage, gate
from airflow_cdc_provider.engine.sources.postgres.reading.reread_requests import take_requests
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.sources.postgres.stream.staging import Staging
from airflow_cdc_provider.engine.sources.postgres.stream.unit_writer import UnitWriter


class SinkFanout:
    """The writers of all sinks of a run.

    :param record: the commit record, of all sinks as one.
    :param staging: stages the batches.
    :ivar changes: row changes committed; of each batch, those in the sink that lacked most.
    :ivar tables: the same by table.
    :ivar seconds: time spent in batches that held changes.
    :ivar batch_seconds: the last of them.
    """

    def __init__(self, run: Run, record: Record, staging: Staging) -> None:
        self.changes = 0
        self.tables: Counter[str] = Counter()
        self.seconds = 0.0
        self.batch_seconds: float | None = None
        self._run = run
        self._writers = tuple(
            UnitWriter(branch, record if branch is run else existing_record(branch.pipeline), staging)
            for branch in run.branches
        )
        run.lag.advance(self.applied)

    @property
    def applied(self) -> Lsn:
        """Return the LSN that is durable in all sinks."""
        return min(writer.applied for writer in self._writers)

    @property
    def refusal(self) -> CannotFollow | None:
        """Return why the stream cannot go on beyond what is applied, ``None`` while it can."""
        return next((writer.refusal for writer in self._writers if writer.refusal is not None), None)

    @property
    def waiting(self) -> str | None:
        """Return what other transactions block: re-reads that the stream leaves for later, or the current unit."""
        return next((writer.waiting for writer in self._writers if writer.waiting), None)

    def done(self, target: Lsn | None) -> bool:
        """Return whether everything up to ``target`` is durable, DDL included, or the stream cannot go on."""
        return self.refusal is not None or all(writer.done(target) for writer in self._writers)

    def check_catalog(self, source: Connection) -> None:
        """Check whether the catalog has changed, see :meth:`.SchemaFollower.check_catalog`."""
        for writer in self._writers:
            writer.check_catalog(source)

    def gate(self, source: Connection) -> Passage:
        """Check that the source can continue what each sink has, see :func:`.gate.gate`."""
        settings = postgres_settings(self._run.pipeline)
        passages = [gate(source, settings, writer.current_record) for writer in self._writers]
        return passages[0]

    def record_source(self, passage: Passage) -> None:
        """Record in all sinks what was seen of the slot, see :meth:`.UnitWriter.record_source`."""
        for writer in self._writers:
            writer.record_source(passage)

    def halt(self) -> None:
        """End all waits."""
        for writer in self._writers:
            writer.halted = True

    def write_batch(self, pieces: Any) -> None:
        """Carry out pending requests, then write a batch to all sinks, see :meth:`.UnitWriter.write_batch`.

        :raises CdcError: when it cannot be written to one of them; the others may have it then.
        """
        started = time.monotonic()
        before = [(writer.changes, writer.tables.copy()) for writer in self._writers]
        waiting = self.waiting if self._writers[0].parted else self._take_requests()
        for writer in self._writers:
            with self._naming_sink(writer.run):
                writer.write_batch(pieces, waiting)
        gained, tables, operations = max(
            (
                (writer.changes - had, writer.tables - by_table, writer.operations)
                for writer, (had, by_table) in zip(self._writers, before, strict=True)
            ),
            key=lambda gain: gain[0],
        )
        if gained:
            self.changes += gained
            self.tables += tables
            self._run.activity.add(operations)
            self.batch_seconds = time.monotonic() - started
            self.seconds += self.batch_seconds
            self._run.history.batch(gained, self.batch_seconds, self.applied)
        self._run.lag.advance(self.applied)

    @contextmanager
    def _naming_sink(self, branch: Run) -> Iterator[None]:
        """Name the sink in an error, if there are several sinks."""
        if branch is self._run:
            yield
            return
        place = f"filling sink {branch.pipeline.sink.place}"
        try:
            yield
        except CdcError as e:
            e.prefix_message(place)
            raise
        except DRIVER_ERRORS as e:
            raise driver_failure(e, place) from e

    def _take_requests(self) -> str | None:
        """Carry out the requests; return what they wait for, if they do."""
        with ExitStack() as graces:
            for writer in self._writers:
                graces.enter_context(writer.barriers.one_grace())
            done, waiting = take_requests(self._run, [(writer.run, writer.barriers) for writer in self._writers])
        if done:
            for writer in self._writers:
                writer.record = existing_record(writer.run.pipeline)
        return waiting
