"""Chunks and re-reads in MySQL."""

from __future__ import annotations

import json
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import ChunkRecord, Target
from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.redefinition import MysqlRedefinition
from airflow_cdc_provider.engine.sinks.mysql.session import Session
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import TableStatements


@dataclass(frozen=True)
class MysqlReads(MysqlRedefinition):
    """See :class:`.contract.Sink`: chunks and re-reads."""

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

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.contract.Sink.check_condition`; in a changelog rows are found by the source's keys alone.

        The condition is read as SQL of the target, with the names and strings of Postgres.
        """
        if self.mode == "mirror":
            self._require_condition(where)
            pymysql = driver()
            with self._session() as opened:
                opened.speak_postgres()
                try:
                    TableStatements(opened, target, self.mode).check_condition(where)
                except (pymysql.err.ProgrammingError, pymysql.err.OperationalError, pymysql.err.NotSupportedError) as e:
                    raise ConfigError(
                        f"{where!r} is no condition on {target.schema}.{target.name}: {e.args[-1]}",
                        "Write a condition that both Postgres and MySQL understand.",
                    ) from e

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.contract.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        self._require_condition(where)
        with self._session() as opened:
            opened.speak_postgres()
            return TableStatements(opened, target, self.mode).matching_keys(where)

    @staticmethod
    def _require_condition(where: str) -> None:
        trouble = find_trouble(where)
        if trouble is not None:
            raise ConfigError(
                f"{where!r} is not one SQL condition: {trouble}", "Write one condition on the table's columns."
            )
