"""Writes units of the stream to MySQL: executors stage them, and the driver applies them in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import Fenced
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.record import MysqlRecord
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import MysqlTableStatements
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable

_FRAGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class MysqlUnits(MysqlRecord):
    """The part of a MySQL sink that writes units, and keeps pieces that are too large for Spark."""

    def _write_deposit(self, tx: Session, name: str, data: bytes | bytearray) -> None:
        """Write a deposit in rows of a table, in fragments that fit into a packet."""
        view = memoryview(data)
        for number, at in enumerate(range(0, len(view), _FRAGMENT_BYTES)):
            tx.run(
                "INSERT INTO airflow_cdc.deposits (pipeline, name, number, fragment) VALUES (%s, %s, %s, %s)",
                [self.pipeline, name, number, bytes(view[at : at + _FRAGMENT_BYTES])],
            )

    def _read_deposit(self, tx: Session, name: str, size: int) -> bytearray:
        data = bytearray()
        query = "SELECT fragment FROM airflow_cdc.deposits WHERE pipeline = %s AND name = %s AND number = %s"
        number = 0
        while found := tx.rows(query, [self.pipeline, name, number]):
            data += found[0][0]
            number += 1
        return data

    def _drop_deposits(self, tx: Session, names: Collection[str] | None) -> None:
        delete = "DELETE FROM airflow_cdc.deposits WHERE pipeline = %s"
        if names is None:
            tx.run(delete, [self.pipeline])
        for name in names or ():
            tx.run(f"{delete} AND name = %s", [self.pipeline, name])

    def _stage(self, tx: Session, epoch: int, attempt: str, effects: Sequence[Effect]) -> Sequence[Staged]:
        """Stage effects, see :meth:`.TransactionalUnits._stage`.

        The tables are created before the transaction that fills them. If the run is overtaken in between, they stay
        empty and are removed later.
        """
        staged, filled = [], []
        targets = self._targets(tx)
        for number, effect in enumerate(effects):
            relation, rows = None, effect.rows
            if rows.num_rows:
                relation = f"{self._staging_prefix}{attempt}_{number}"
                statements = MysqlTableStatements(tx, targets[effect.label], self.mode)
                rows = statements.staged_rows(rows)
                with row_of(effect.label):
                    statements.create_staging(relation, rows.column_names)
                filled.append((statements, relation, rows))
            staged.append(Staged(effect.label, relation, rows.num_rows, effect.truncate, tuple(rows.column_names)))
        tx.rollback()
        self._begin(tx, epoch, "stage")
        for statements, relation, rows in filled:
            statements.fill_staging(relation, rows)
        return staged

    def _table(self, tx: Session, target: Target) -> TargetTable:
        return MysqlTableStatements(tx, target, self.mode)

    def _advance(self, tx: Session, end: LogPosition) -> None:
        tx.run(
            "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, updated_at = NOW(6) WHERE pipeline = %s",
            [end, self.pipeline],
        )
        tx.run(
            "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND keys_read IS NOT NULL AND high_lsn <= %s",
            [self.pipeline, end],
        )

    def _finish_unit(self, tx: Session, relations: Sequence[str]) -> None:
        """Commit, then drop the staging tables, because DROP TABLE commits. Tables left by a crash are
        removed later.
        """
        tx.commit()
        failpoint("before-staging-dropped")
        for relation in relations:
            tx.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', relation)}")

    def _read_beyond(self, tx: Session, high: LogPosition) -> str | None:
        query = "SELECT source_table FROM airflow_cdc.chunks WHERE pipeline = %s AND high_lsn > %s ORDER BY 1 LIMIT 1"
        for (label,) in tx.rows(query, [self.pipeline, high]):
            return str(label)
        return None

    def _staged_counts(self, tx: Session, relations: Sequence[str]) -> Mapping[str, int]:
        there = [relation for relation in relations if tx.exists("airflow_cdc", relation)]
        counts = (tx.one(f"SELECT COUNT(*) FROM {quoted('airflow_cdc', relation)}") for relation in there)
        return {relation: int(count) for relation, (count,) in zip(there, counts, strict=True)}

    def sweep(self, epoch: int) -> None:
        """Remove staging tables; the process that drops tables holds the exclusive lock."""
        with contextlib.suppress(Fenced), self._alone(epoch) as opened:
            self._sweep(opened)

    def _sweep(self, tx: Session) -> None:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
        for (name,) in tx.rows(query):
            if str(name).startswith((self._staging_prefix, self._aside_prefix)):
                tx.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', str(name))}")

    def drop(self) -> None:
        """Remove the commit record, everything staged and all deposits."""
        with self._alone() as opened:
            if not opened.exists("airflow_cdc", "pipelines"):
                return
            opened.begin()
            for table in ("chunks", "tables", "pending", "deposits", "pipelines"):
                opened.run(f"DELETE FROM airflow_cdc.{table} WHERE pipeline = %s", [self.pipeline])
            opened.commit()
            self._sweep(opened)

    @property
    def _staging_prefix(self) -> str:
        return f"stage_{self._mark}_"

    @property
    def _aside_prefix(self) -> str:
        return f"aside_{self._mark}_"
