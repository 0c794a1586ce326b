"""Follows schema changes between two units: compares the catalog's definitions with the recorded ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from airflow_cdc_provider.engine.changes.schema_change import FollowChange, Refuse, Reread, Unchanged, Verdict, decide
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
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog_watch import (
    catalog_state,
    changed_definitions,
    read_definitions,
)
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import reread_as_defined, retry_while_blocked
from airflow_cdc_provider.engine.sources.postgres.reading.reread_requests import requested
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

T = TypeVar("T")
log = logging.getLogger(__name__)


class SchemaFollower:
    """Follows changes of captured tables in one sink.

    The catalog shows the latest definition. It is checked while batches are applied, and followed once everything from
    before the change has been applied. What a batch itself shows, by the format of its rows, is followed at once.

    :param run: the part of the run, or its branch, that has this sink alone.
    :ivar record: the sink's commit record, as last read.
    :ivar applied: LSN durable in the sink.
    :ivar refusal: why the stream cannot go on beyond what is applied, ``None`` while it can.
    :ivar waiting: what other transactions block: re-reads that the stream leaves for later, or the current unit.
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
        self._changed: Mapping[str, Table | CdcError] = {}
        self._pending: _CatalogChange | None = None
        self._truncates: dict[int, int] = {}
        self._checking = threading.Lock()  # the thread that watches the batches checks the catalog, too

    def check_catalog(self, source: Connection) -> Mapping[str, Table | CdcError]:
        """Check whether the catalog has changed; if so, keep its definitions until the log has been passed so far.

        :returns: the definitions, when they were last found changed, of the tables that are not defined as recorded.
        """
        with self._checking:
            state = catalog_state(source, postgres_settings(self.run.pipeline).publication, self.record.targets)
            state += f" {self._truncates}"  # truncates explain new filenodes
            if state != self._catalog:
                changed = changed_definitions(source, self.run.pipeline, self.record.targets, self._truncates)
                self._pending = _CatalogChange(changed, emit_marker(source, "definition")) if changed else None
                self._changed, self._catalog = changed, state
            return self._changed

    def _read_definition(self, target: Target) -> Table | CdcError:
        with connected(postgres_settings(self.run.pipeline).dsn) as source:
            return read_definitions(source, self.run.pipeline, [target])[target.table.label]

    def _check_catalog_now(self) -> Mapping[str, Table | CdcError]:
        with connected(postgres_settings(self.run.pipeline).dsn, settings={"synchronous_commit": "local"}) as source:
            return self.check_catalog(source)

    def _apply_catalog_changes(self) -> str | None:
        """Follow the changes that were found in the catalog, once everything from before has been applied.

        :returns: what has to be waited for first.
        """
        pending = self._pending
        if pending is None or self.applied < pending.marker:
            return None
        try:
            self._apply(pending)
        except Blocked as e:
            return e.message
        return None

    def _apply(self, pending: _CatalogChange) -> None:
        with connected(postgres_settings(self.run.pipeline).dsn, settings={"synchronous_commit": "local"}) as source:
            if self._refused(pending.tables) is None:
                for label in pending.tables:
                    self.barriers.check(source, label)  # before the expensive steps that lead there
            now = changed_definitions(source, self.run.pipeline, self.record.targets, self._truncates)
            if not all(pending.matches(label, after) for label, after in now.items()):
                self._pending = _CatalogChange(now, emit_marker(source, "definition"))
                return
        self.refusal = self._refused(now)  # even if the other tables have to wait
        for label, after in now.items():
            target = target_of(self.record, label)
            verdict = self._decide(target, after)
            if not isinstance(verdict, Refuse):
                self._carry_out(target, verdict)
        with self._checking:
            if self._pending is pending:
                self._pending = None

    def _refused(self, tables: Mapping[str, Table | CdcError]) -> CannotFollow | None:
        """Return why the stream cannot go on, given the catalog's definitions of some tables."""
        for label, after in tables.items():
            verdict = self._decide(target_of(self.record, label), after)
            if isinstance(verdict, Refuse):
                return CannotFollow(verdict.message, verdict.solution)
        return None

    def _decide(self, target: Target, after: Table | CdcError, relation: Relation | None = None) -> Verdict:
        """Decide as :func:`.decide`, but do not refuse a table that a request wants to have read as it is now.

        While such a request waits, the publication has already changed and the record has not.
        """
        verdict = decide(target.table, after, relation)
        if isinstance(verdict, Refuse) and requested(self.run, target.table.label):
            return Reread(verdict.message)
        return verdict

    def _carry_out(self, target: Target, verdict: Verdict) -> None:
        """Carry out a verdict between two units.

        :raises CannotFollow: when the stream has to stop.
        """
        if isinstance(verdict, Unchanged):
            return
        if isinstance(verdict, Refuse):
            raise CannotFollow(verdict.message, verdict.solution)
        try:
            if isinstance(verdict, FollowChange):
                changelog_names(self.run.pipeline, [verdict.table])
                self.run.sink.redefine(self.run.epoch, target, replace(target, table=verdict.table))
            else:
                self._reread_as_defined(target.table.label, verdict.why)
        except RowsNeeded as e:
            self._reread_as_defined(target.table.label, str(e))
        except ConfigError as e:  # of a table that existed when the stream began
            raise CannotFollow(e.message, e.solution) from e
        self.record = existing_record(self.run.pipeline)

    def _reread_as_defined(self, label: str, why: str) -> None:
        if not self.barriers.pending(label):
            log.warning("Reading %s again: %s", label, why)
        try:
            reread_as_defined(self.run, label, self.barriers)
        except ConfigError as e:  # of a table that existed when the stream began
            raise CannotFollow(e.message, e.solution) from e

    def _retry_while_blocked(self, read: Callable[[], T], *labels: str) -> T:
        """Do a read that the current unit cannot do without, see :func:`.retry_while_blocked`.

        :param labels: the tables that are read whole.
        """
        for label in labels:
            self.barriers.lift(label)  # one that is set may be older than the unit
        found = retry_while_blocked(self.run, read, self._report_blocked, lambda: self.halted)
        self.waiting = None
        return found

    def _report_blocked(self, what: str) -> None:
        self.waiting = what

    def _report_waiting(self, what: str | None) -> None:
        if what and not self.waiting:
            log.warning("%s", what)
        self.waiting = what


@dataclass(frozen=True)
class _CatalogChange:
    """Tables that were found to be defined otherwise than recorded.

    :param tables: by label the definition in the catalog, or why it cannot be followed.
    :param marker: LSN written afterwards; all that follows it in the log was changed under that definition.
    """

    tables: Mapping[str, Table | CdcError]
    marker: int

    def matches(self, label: str, after: Table | CdcError) -> bool:
        """Return whether a definition, or the reason why it cannot be followed, is the one that was found."""
        before = self.tables.get(label)
        if isinstance(before, Table) and isinstance(after, Table):
            return before.to_dict() == after.to_dict()
        return isinstance(before, CdcError) and isinstance(after, CdcError) and before.message == after.message
