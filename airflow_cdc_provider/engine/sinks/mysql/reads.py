"""Writes chunks and re-reads to MySQL."""

from __future__ import annotations

import json
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.record import ChunkRecord, Target
from airflow_cdc_provider.engine.postgres.sql_condition import find_syntax_problem
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.redefinition import MysqlRedefinition
from airflow_cdc_provider.engine.sinks.mysql.session import Session
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import MysqlTableStatements


@dataclass(frozen=True)
class MysqlReads(MysqlRedefinition):
    """The part of a MySQL sink that writes rows read from the source."""

    def _is_unfinished(self, tx: Session, chunk: Chunk) -> bool:
        found = tx.rows(
            "SELECT snapshot FROM airflow_cdc.chunks"
            " WHERE pipeline = %s AND source_table = %s AND chunk = %s FOR UPDATE",
            [self.pipeline, chunk.table, chunk.index],
        )
        return bool(found) and found[0][0] is None

    def _finish_chunk(self, tx: Session, epoch: int, read: ChunkRecord, target: Target) -> None:
        assert read.watermark is not None
        if read.chunk.whole:
            self._record_shape(tx, target)
        tx.run(
            "UPDATE airflow_cdc.chunks SET snapshot = %s, high_lsn = %s, row_count = %s, epoch = %s,"
            " finished_at = NOW(6) WHERE pipeline = %s AND source_table = %s AND chunk = %s",
            [
                str(read.watermark.snapshot),
                read.watermark.high,
                read.rows,
                epoch,
                self.pipeline,
                read.chunk.table,
                read.chunk.index,
            ],
        )

    def _forget_chunks(self, tx: Session, label: str) -> None:
        tx.run("DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s", [self.pipeline, label])

    def _free_index(self, tx: Session, label: str) -> int:
        query = "SELECT COALESCE(MAX(chunk), 0) + 1 FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s"
        return int(tx.one(query, [self.pipeline, label])[0])

    def _enter_reread(self, tx: Session, epoch: int, read: ChunkRecord, target: Target) -> None:
        assert read.watermark is not None
        if read.keys is None:
            self._rebuild_views(tx, target)
            self._enter(tx, target)
            self._record_shape(tx, target)
        tx.run(
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition, keys_read, snapshot, high_lsn,"
            " row_count, epoch, finished_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, NOW(6))",
            [
                self.pipeline,
                read.chunk.table,
                read.chunk.index,
                json.dumps(read.chunk.to_dict()),
                None if read.keys is None else json.dumps(sorted(read.keys)),
                str(read.watermark.snapshot),
                read.watermark.high,
                read.rows,
                epoch,
            ],
        )

    def _rebuild_views(self, tx: Session, target: Target) -> None:
        """Let the views over a table that was read as a whole be built again, under its current definition."""
        if self.views:
            _, applied = self._lock_epoch(tx, None) or (0, LOG_START)
            store = self._view_store(tx, applied)
            before = self._targets(tx, [target.table.label]).get(target.table.label, target)
            store.follow(before.table, target.table)
            store.rebuild([target.table.label])

    def check_condition(self, target: Target, where: str) -> None:
        """Check a condition on a mirror's rows; in a changelog, only the source's keys are used.

        The condition is interpreted as SQL of the target, with Postgres's syntax of names and strings.
        """
        if self.mode == "mirror":
            self._require_condition(where)
            pymysql = driver()
            with self._session() as opened:
                opened.use_postgres_syntax()
                try:
                    MysqlTableStatements(opened, target, self.mode).check_condition(where)
                except (pymysql.err.ProgrammingError, pymysql.err.OperationalError, pymysql.err.NotSupportedError) as e:
                    raise ConfigError(
                        f"{where!r} is not a condition on {target.schema}.{target.name}: {e.args[-1]}",
                        "Write a condition that both Postgres and MySQL understand.",
                    ) from e

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of a mirror's rows that match a condition."""
        if self.mode == "changelog":
            return frozenset()
        self._require_condition(where)
        with self._session() as opened:
            opened.use_postgres_syntax()
            return MysqlTableStatements(opened, target, self.mode).matching_keys(where)

    @staticmethod
    def _require_condition(where: str) -> None:
        trouble = find_syntax_problem(where)
        if trouble is not None:
            raise ConfigError(
                f"{where!r} is not a single SQL condition: {trouble}",
                "Write a single condition on the table's columns.",
            )
