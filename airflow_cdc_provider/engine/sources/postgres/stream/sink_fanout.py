"""One stream, several sinks: each batch of the log is brought into one after the other.

Each sink goes by its own commit record, so one that was behind when the stream began takes all that the others have
had before, and these leave it out. The stream is acknowledged up to the slowest. A sink that fails ends the batch for
all: the log is kept until it is back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.provision.gate import Passage, gate
from airflow_cdc_provider.engine.sources.postgres.reading.requested_reads import take_requests
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import Handout
from airflow_cdc_provider.engine.sources.postgres.stream.unit_writer import Units


class Fanout:
    """The units of all sinks of a run.

    :param record: the commit record, of all sinks as one.
    :param handout: stages the batches.
    :ivar changes: row changes committed; of a batch, those in the sink that lacked most.
    :ivar tables: the same by table.
    :ivar seconds: time spent in batches that held changes.
    :ivar batch_seconds: the last of them.
    """

    def __init__(self, run: Run, record: Record, handout: Handout) -> None:
        self.changes = 0
        self.tables: Counter[str] = Counter()
        self.seconds = 0.0
        self.batch_seconds: float | None = None
        self._run = run
        self._units = tuple(
            Units(branch, record if branch is run else existing_record(branch.pipeline), handout)
            for branch in run.branches
        )
        run.lag.advance(self.applied)

    @property
    def applied(self) -> Lsn:
        """LSN durable in all sinks."""
        return min(units.applied for units in self._units)

    @property
    def refusal(self) -> CannotFollow | None:
        """Why the stream cannot go on beyond what is applied, ``None`` while it can."""
        return next((units.refusal for units in self._units if units.refusal is not None), None)

    @property
    def waiting(self) -> str | None:
        """What other transactions hold up: re-reads that the stream leaves for later, or the unit at hand."""
        return next((units.waiting for units in self._units if units.waiting), None)

    def done(self, target: Lsn | None) -> bool:
        """Whether everything up to ``target`` is durable, DDL included, or the stream cannot go on."""
        return self.refusal is not None or all(units.done(target) for units in self._units)

    def look(self, source: Connection) -> None:
        """Look whether the catalog has changed, see :meth:`.Units.look`."""
        for units in self._units:
            units.look(source)

    def gate(self, source: Connection) -> Passage:
        """Look whether the source can continue what each sink has, see :func:`.gate.gate`."""
        passages = [
            gate(source, postgres_settings(self._run.pipeline), units.record, units.now) for units in self._units
        ]
        return passages[0]

    def note(self, passage: Passage) -> None:
        """Keep in the records what was seen of the slot, see :meth:`.Units.note`."""
        for units in self._units:
            units.note(passage)

    def halt(self) -> None:
        """End whatever waits."""
        for units in self._units:
            units.halted = True

    def bring(self, pieces: DataFrame) -> None:
        """Bring a batch into all sinks, after the requests that have been left, see :meth:`.Units.bring`.

        :raises CdcError: when it cannot be brought into one; the others may have it then.
        """
        started = time.monotonic()
        before = [(units.changes, units.tables.copy()) for units in self._units]
        waiting = self.waiting if self._units[0].parted else self._take_requests()
        for units in self._units:
            with self._naming(units.run):
                units.bring(pieces, waiting)
        gained, tables = max(
            (
                (units.changes - had, units.tables - by_table)
                for units, (had, by_table) in zip(self._units, before, strict=True)
            ),
            key=lambda gain: gain[0],
        )
        if gained:
            self.changes += gained
            self.tables += tables
            self.batch_seconds = time.monotonic() - started
            self.seconds += self.batch_seconds
            self._run.history.batch(gained, self.batch_seconds, self.applied)
        self._run.lag.advance(self.applied)

    @contextmanager
    def _naming(self, branch: Run) -> Iterator[None]:
        """Say of which sink an error tells, where there are others."""
        if branch is self._run:
            yield
            return
        place = f"filling sink {branch.pipeline.sink.place}"
        try:
            yield
        except CdcError as e:
            e.tell_place(place)
            raise
        except DRIVER_ERRORS as e:
            raise driver_failure(e, place) from e

    def _take_requests(self) -> str | None:
        """Take the requests; what they wait for, if they do."""
        with ExitStack() as graces:
            for units in self._units:
                graces.enter_context(units.barriers.one_grace())
            done, waiting = take_requests(self._run, [(units.run, units.barriers) for units in self._units])
        if done:
            for units in self._units:
                units.record = existing_record(units.run.pipeline)
        return waiting
