"""Writes chunks and re-reads to Postgres: directly into the target table, whose definition changes in the same step."""

from __future__ import annotations

import json
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import ChunkRecord, Target
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import PostgresTableStatements
from airflow_cdc_provider.engine.sinks.postgres.table_changes import redefine
from airflow_cdc_provider.engine.sinks.postgres.target_tables import prepare_target
from airflow_cdc_provider.engine.sinks.postgres.units import PostgresUnits
from airflow_cdc_provider.engine.sinks.transactional.reads import Destination, PendingRead


@dataclass(frozen=True)
class PostgresReads(PostgresUnits):
    """The part of a Postgres sink that writes rows read from the source."""

    def _is_unfinished(self, tx: Connection, chunk: Chunk) -> bool:
        found = rows(
            tx,
            "SELECT snapshot FROM airflow_cdc.chunks"
            " WHERE pipeline = %s AND source_table = %s AND chunk = %s FOR UPDATE",
            [self.pipeline, chunk.table, chunk.index],
        )
        return bool(found) and found[0][0] is None

    def _finish_chunk(self, tx: Connection, epoch: int, read: ChunkRecord, target: Target) -> None:
        assert read.watermark is not None
        rows(
            tx,
            "UPDATE airflow_cdc.chunks SET snapshot = %s, high_lsn = %s, row_count = %s, epoch = %s,"
            " finished_at = clock_timestamp() WHERE pipeline = %s AND source_table = %s AND chunk = %s",
            [
                str(read.watermark.snapshot),
                format_lsn(read.watermark.high),
                read.rows,
                epoch,
                self.pipeline,
                read.chunk.table,
                read.chunk.index,
            ],
        )

    def _choose_destination(
        self, tx: Connection, epoch: int, read: PendingRead[Connection], applied: LogPosition
    ) -> Destination:
        """Choose the target itself, which is changed in the same transaction.

        A mirror's rows are removed before the change, so that none has to be converted, and none violates a new key.
        """
        if read.is_reread:
            before, target = read.before or read.target, read.target
            if read.keys is None:
                prepare_target(tx, self.pipeline, self.mode, before, self.convert, bool(self.views))
            if before.table.to_dict() != target.table.to_dict():
                if self.mode == "mirror":
                    PostgresTableStatements(tx, before, self.mode).delete(read.keys)
                redefine(tx, self.pipeline, self.mode, before, target, rows_stay=False, convert=self.convert)
        return Destination("", applied)

    def _forget_chunks(self, tx: Connection, label: str) -> None:
        rows(tx, "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s", [self.pipeline, label])

    def _free_index(self, tx: Connection, label: str) -> int:
        query = "SELECT coalesce(max(chunk), 0) + 1 FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s"
        return int(scalar(tx, query, [self.pipeline, label]))

    def _enter_reread(self, tx: Connection, epoch: int, read: ChunkRecord, target: Target) -> None:
        assert read.watermark is not None
        rows(
            tx,
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition, keys, snapshot, high_lsn,"
            " row_count, epoch, finished_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp())",
            [
                self.pipeline,
                read.chunk.table,
                read.chunk.index,
                json.dumps(read.chunk.to_dict()),
                None if read.keys is None else json.dumps(sorted(read.keys)),
                str(read.watermark.snapshot),
                format_lsn(read.watermark.high),
                read.rows,
                epoch,
            ],
        )

    def _redefine(self, epoch: int, before: Target, after: Target) -> None:
        with self._fenced(epoch, "alone") as (connection, applied):
            self._redefine_views(connection, applied, before, after)
            redefine(connection, self.pipeline, self.mode, before, after, rows_stay=True, convert=self.convert)

    def check_condition(self, target: Target, where: str) -> None:
        """Check a condition on a mirror's rows; in a changelog, only the source's keys are used."""
        if self.mode == "mirror":
            with connected(self.dsn) as connection:
                PostgresTableStatements(connection, target, self.mode).check_condition(where)

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of a mirror's rows that match a condition."""
        if self.mode == "changelog":
            return frozenset()
        with connected(self.dsn) as connection:
            return PostgresTableStatements(connection, target, self.mode).matching_keys(where)
