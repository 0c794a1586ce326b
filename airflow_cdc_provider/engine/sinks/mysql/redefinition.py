"""Target tables in MySQL take another definition: altered, or filled aside and exchanged."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import CannotFollow, StagingLost, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import alter, announce
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import FIRST_READ, TableStatements
from airflow_cdc_provider.engine.sinks.mysql.table_definition import create_table
from airflow_cdc_provider.engine.sinks.mysql.units import MysqlUnits


@dataclass(frozen=True)
class MysqlRedefinition(MysqlUnits):
    """See :class:`.contract.Sink`: other definitions."""

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`."""
        failpoint("before-redefinition")
        with self._alone(epoch) as opened:
            clauses = self._alteration(opened, self._shape(opened, before), after, rows_stay=True)
            self._begin(opened, epoch, "update")
            if clauses:
                token = self._token()
                announce(opened, self.pipeline, after, "alteration", token)
                opened.commit()
                alter(opened, self.pipeline, self.mode, after, clauses, token)
            else:
                self._record_shape(opened, after)
                opened.commit()
        failpoint("after-redefinition")

    def _record_shape(self, opened: Session, target: Target) -> None:
        definition = json.dumps(target.table.to_dict())
        opened.run(
            "UPDATE airflow_cdc.tables SET definition = %s, shape = %s WHERE pipeline = %s AND source_table = %s",
            [definition, definition, self.pipeline, target.table.label],
        )

    def _make_room(self, opened: Session, epoch: int, target: Target, reread: bool) -> str:
        """Before a table is read as a whole: see to it that there is one of its definition for the rows to go to.

        A changelog is altered at once, and keeps its events; if the rows do not follow, they are still to be read. Of a
        mirror a table without rows is made, to be filled aside.

        :returns: the name of the latter; empty when the target table is as it has to be.
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
                self._begin(opened, epoch, "update")
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
        """Refuse to put another table in the place of one that has what would be lost with it."""
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
                f"the target table {target.schema}.{target.name} has to be made anew, as {target.table.label} is"
                f" defined otherwise now, but has triggers or foreign keys, which would be lost: {names}",
                "Nothing from this change on has been applied. Drop them, then start again, and make them anew"
                " afterwards.",
            )

    def _fill_aside(
        self,
        opened: Session,
        epoch: int,
        target: Target,
        aside: str,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> tuple[int, Watermark, int]:
        """Copy rows into a table that nobody reads yet, and commit them.

        :returns: their number, what they stand for, and the applied LSN until then.
        """
        applied = self._begin(opened, epoch, "share")
        statements = TableStatements(opened, target, self.mode)
        count = statements.copy(quoted("airflow_cdc", aside), batches, applied, FIRST_READ)
        failpoint("after-chunk-staged")
        watermark = finish()
        opened.commit()
        failpoint("after-aside")
        return count, watermark, applied

    def _require_still(self, before: int, applied: int, target: Target) -> None:
        """Refuse rows that have been read before a unit that was committed since: its changes would be lost with the
        table that they have been applied to."""
        if applied != before:
            raise StreamFailed(
                f"a unit was applied while {target.table.label} was made anew aside,"
                f" from {format_lsn(before)} to {format_lsn(applied)}",
                "Start again: the table is read once more.",
            )

    def _require_aside(self, opened: Session, target: Target, aside: str) -> None:
        """Refuse to announce an exchange that would not come about; under the lock by name, so that it stays so."""
        if not opened.exists("airflow_cdc", aside):
            raise StagingLost(
                f"the table airflow_cdc.{aside}, into which {target.table.label} was read, is gone",
                "Start again: the table is read once more.",
            )
        self._refuse_exchange(opened, target)

    @staticmethod
    def _token() -> str:
        return uuid.uuid4().hex[:16]
