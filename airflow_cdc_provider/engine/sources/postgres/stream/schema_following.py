"""Changes of schema are followed between two units: what the catalog says is held against the record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from airflow_cdc_provider.engine.changes.schema_change import Adopt, Follow, Refuse, Unchanged, Verdict, decide
from airflow_cdc_provider.engine.core.errors import Blocked, CannotFollow, CdcError, ConfigError
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.core.row_changes import Relation
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.sink_checks import changelog_names
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog_watch import catalog_state, drifted, look
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.requested_reads import requested
from airflow_cdc_provider.engine.sources.postgres.reading.reread import adopt, insist
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

T = TypeVar("T")
log = logging.getLogger(__name__)


class SchemaFollowing:
    """Follows changes of captured tables in one sink.

    What the catalog says is what came last: it is looked at beside the batches, and followed once everything from
    before has been applied. What a batch itself shows, in the format of its rows, is followed at once.

    :param run: the part, or the branch of it, that has this sink alone.
    :ivar record: the sink's commit record, as last read.
    :ivar applied: LSN durable in the sink.
    :ivar refusal: why the stream cannot go on beyond what is applied, ``None`` while it can.
    :ivar waiting: what other transactions hold up: re-reads that the stream leaves for later, or the unit at hand.
    :ivar halted: set from outside to end a wait.
    """

    def __init__(self, run: Run, record: Record) -> None:
        self.run = run
        self.record = record
        self.applied = record.applied
        self.refusal: CannotFollow | None = None
        self.waiting: str | None = None
        self.halted = False
        self.barriers = Barriers()
        self._catalog = ""
        self._found: Mapping[str, Table | CdcError] = {}
        self._drift: _Drift | None = None
        self._truncates: dict[int, int] = {}
        self._looking = threading.Lock()  # also beside the batches, by the thread that watches them

    def look(self, source: Connection) -> Mapping[str, Table | CdcError]:
        """Look whether the catalog has changed, and keep what it says until the log has been passed so far.

        :returns: what it said when it was last found changed, of the tables that were not defined as recorded.
        """
        with self._looking:
            state = catalog_state(source, postgres_settings(self.run.pipeline).publication, self.record.targets)
            state += f" {self._truncates}"  # what they explain
            if state != self._catalog:
                self._found = drifted(source, self.run.pipeline, self.record.targets, self._truncates)
                self._drift = _Drift(self._found, emit_marker(source, "definition")) if self._found else None
                self._catalog = state
            return self._found

    def _look_at(self, target: Target) -> Table | CdcError:
        with connected(postgres_settings(self.run.pipeline).dsn) as source:
            return look(source, self.run.pipeline, [target])[target.table.label]

    def _look_anew(self) -> Mapping[str, Table | CdcError]:
        with connected(postgres_settings(self.run.pipeline).dsn, settings={"synchronous_commit": "local"}) as source:
            return self.look(source)

    def _settle(self) -> str | None:
        """Follow what the catalog was found to say, once everything from before has been applied.

        :returns: what has to be waited for first.
        """
        drift = self._drift
        if drift is None or self.applied < drift.marker:
            return None
        try:
            self._settle_now(drift)
        except Blocked as e:
            return e.message
        return None

    def _settle_now(self, drift: _Drift) -> None:
        with connected(postgres_settings(self.run.pipeline).dsn, settings={"synchronous_commit": "local"}) as source:
            if self._refused(drift.tables) is None:
                for label in drift.tables:
                    self.barriers.look(source, label)  # before all that it would cost to get there
            now = drifted(source, self.run.pipeline, self.record.targets, self._truncates)
            if not all(drift.told(label, after) for label, after in now.items()):
                self._drift = _Drift(now, emit_marker(source, "definition"))
                return
        self.refusal = self._refused(now)  # whatever the others have to wait for
        for label, after in now.items():
            target = target_of(self.record, label)
            verdict = self._decide(target, after)
            if not isinstance(verdict, Refuse):
                self._change(target, verdict)
        with self._looking:
            if self._drift is drift:
                self._drift = None

    def _refused(self, tables: Mapping[str, Table | CdcError]) -> CannotFollow | None:
        """Why the stream cannot go on, given what the catalog says of some tables."""
        for label, after in tables.items():
            verdict = self._decide(target_of(self.record, label), after)
            if isinstance(verdict, Refuse):
                return CannotFollow(verdict.message, verdict.solution)
        return None

    def _decide(self, target: Target, after: Table | CdcError, relation: Relation | None = None) -> Verdict:
        """As :func:`.decide`; what would be refused is done where a request wants the table as it is now.

        While such a request waits, the publication says already what the record does not.
        """
        verdict = decide(target.table, after, relation)
        if isinstance(verdict, Refuse) and requested(self.run, target.table.label):
            return Adopt(verdict.message)
        return verdict

    def _change(self, target: Target, verdict: Verdict) -> None:
        """Carry out a verdict between two units."""
        if isinstance(verdict, Unchanged):
            return
        if isinstance(verdict, Refuse):
            raise CannotFollow(verdict.message, verdict.solution)
        try:
            if isinstance(verdict, Follow):
                changelog_names(self.run.pipeline, [verdict.table])
                self.run.sink.redefine(self.run.epoch, target, replace(target, table=verdict.table))
            else:
                self._adopt(target.table.label, verdict.why)
        except RowsNeeded as e:
            self._adopt(target.table.label, str(e))
        except ConfigError as e:  # of a table that was there when the stream began
            raise CannotFollow(e.message, e.solution) from e
        self.record = existing_record(self.run.pipeline)

    def _adopt(self, label: str, why: str) -> None:
        if not self.barriers.pending(label):
            log.warning("Reading %s again: %s", label, why)
        try:
            adopt(self.run, label, self.barriers)
        except ConfigError as e:  # of a table that was there when the stream began
            raise CannotFollow(e.message, e.solution) from e

    def _insist(self, read: Callable[[], T], *labels: str) -> T:
        """Look at, or read again, what the unit at hand cannot do without, see :func:`.insist`.

        :param labels: the tables that are read whole.
        """
        for label in labels:
            self.barriers.lift(label)  # one that is up may be older than the unit
        found = insist(self.run, read, self._stand_still, lambda: self.halted)
        self.waiting = None
        return found

    def _stand_still(self, what: str) -> None:
        self.waiting = what

    def _wait_for(self, what: str | None) -> None:
        if what and not self.waiting:
            log.warning("%s", what)
        self.waiting = what


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
