"""Changes the definition of target tables in MySQL: alters them, or fills a separate table and exchanges it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import CannotFollow, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ, Target
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import alter, announce, finish_announced
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import MysqlTableStatements
from airflow_cdc_provider.engine.sinks.mysql.table_definition import create_table
from airflow_cdc_provider.engine.sinks.mysql.units import MysqlUnits
from airflow_cdc_provider.engine.sinks.transactional.reads import Destination, PendingRead


@dataclass(frozen=True)
class MysqlRedefinition(MysqlUnits):
    """The part of a MySQL sink that changes definitions of tables."""

    def _redefine(self, epoch: int, before: Target, after: Target) -> None:
        with self._alone(epoch) as opened:
            clauses = self._alteration(opened, self._shape(opened, before), after, rows_stay=True)
            applied = self._begin(opened, epoch, "alone")
            token = self._token() if clauses else ""
            if self.views:
                self._view_store(opened, applied, token).follow(before.table, after.table)
            if clauses:
                announce(opened, self.pipeline, after, "alteration", token)
                opened.commit()
                alter(opened, self.pipeline, self.mode, after, clauses, token)
            else:
                self._record_shape(opened, after)
                opened.commit()

    def _record_shape(self, opened: Session, target: Target) -> None:
        definition = json.dumps(target.table.to_dict())
        opened.run(
            "UPDATE airflow_cdc.tables SET definition = %s, shape = %s WHERE pipeline = %s AND source_table = %s",
            [definition, definition, self.pipeline, target.table.label],
        )

    def _choose_destination(
        self, tx: Session, epoch: int, read: PendingRead[Session], applied: LogPosition
    ) -> Destination | None:
        """Choose where rows go, see :meth:`.TransactionalSink._choose_destination`.

        A changelog is altered immediately, and keeps its events; if the rows do not follow, they still have to be read.
        For a mirror, an empty separate table is created and filled.
        """
        if read.is_reread and read.before is None:
            self._lacks(tx, read.target)  # refuses tables that are not the pipeline's
        if not read.whole:
            return Destination("", applied)
        aside = self._make_table(tx, epoch, read.target, read.is_reread)
        tx.rollback()  # the table may have been created in separate transactions
        applied = self._begin(tx, epoch, "share" if aside else read.lock)
        return Destination(aside, applied) if read.is_wanted(tx) else None

    def _make_table(self, opened: Session, epoch: int, target: Target, reread: bool) -> str:
        """Make sure that a table with the new definition exists before a whole table is read.

        :returns: the name of a table that will replace the target; empty if the target table has the right definition.
        """
        aside = f"{self._aside_prefix}{self._token()}"
        place = quoted("airflow_cdc", aside)
        if not opened.exists(target.schema, target.name):
            opened.rollback()
            opened.require_database(target.schema)
            with row_of(target.table.label):
                opened.run(create_table(target, self.mode, opened.collation, self.pipeline, place))
            return aside
        clauses = self._alteration(opened, self._shape(opened, target), target, rows_stay=False)
        if not clauses:
            return ""
        opened.rollback()
        if self.mode == "changelog":
            with self._naming_lock(opened):
                self._begin(opened, epoch, "alone")
                token = self._token()
                announce(opened, self.pipeline, target, "alteration", token, reread)
                opened.commit()
                alter(opened, self.pipeline, self.mode, target, clauses, token)
            return ""
        self._refuse_exchange(opened, target)
        opened.run(f"CREATE TABLE {place} LIKE {quoted(target.schema, target.name)}")
        with row_of(target.table.label):
            opened.run(f"ALTER TABLE {place} {', '.join(clauses)}")
        return aside

    def _refuse_exchange(self, opened: Session, target: Target) -> None:
        """Refuse to replace a table whose triggers or foreign keys would be lost."""
        where = [target.schema, target.name]
        triggers = opened.rows(
            "SELECT trigger_name FROM information_schema.triggers"
            " WHERE event_object_schema = %s AND event_object_table = %s",
            where,
        )
        foreign = opened.rows(
            "SELECT constraint_name FROM information_schema.key_column_usage WHERE referenced_table_name IS NOT NULL"
            " AND (table_schema = %s AND table_name = %s"
            " OR referenced_table_schema = %s AND referenced_table_name = %s)",
            where * 2,
        )
        names = ", ".join(sorted({str(name) for (name,) in (*triggers, *foreign)}))
        if names:
            raise CannotFollow(
                f"the target table {target.schema}.{target.name} must be recreated because the definition of"
                f" {target.table.label} has changed, but its triggers or foreign keys would be lost: {names}",
                "Nothing from this change on has been applied. Drop them, start again, and recreate them afterwards.",
            )

    def _fill_aside(self, tx: Session, read: PendingRead[Session], destination: Destination, rows: SourceRows) -> int:
        failpoint("before-chunk-staged")
        statements = MysqlTableStatements(tx, read.target, self.mode)
        return statements.copy_to(quoted("airflow_cdc", destination.aside), rows, destination.applied, FIRST_READ)

    @contextmanager
    def _take_place(
        self, tx: Session, epoch: int, read: PendingRead[Session], destination: Destination
    ) -> Iterator[bool]:
        """Exchange the tables, see :meth:`.TransactionalSink._take_place`; the record is the point of no return."""
        tx.commit()
        failpoint("after-aside")
        with self._naming_lock(tx):
            self._require_still(destination.applied, self._begin(tx, epoch, "alone"), read.target)
            if not read.is_wanted(tx):
                yield False
                return
            self._require_aside(tx, read.target, destination.aside)
            announce(tx, self.pipeline, read.target, "exchange", destination.aside)
            yield True
            tx.commit()
            finish_announced(tx, self.pipeline, self.mode)

    def _require_aside(self, opened: Session, target: Target, aside: str) -> None:
        """Refuse an exchange that would fail; called under the named lock, so that the result stays valid."""
        if not opened.exists("airflow_cdc", aside):
            raise StagingLost(
                f"the table airflow_cdc.{aside}, into which {target.table.label} was read, no longer exists",
                "Start again: the table is read again.",
            )
        self._refuse_exchange(opened, target)

    @staticmethod
    def _token() -> str:
        return uuid.uuid4().hex[:16]
