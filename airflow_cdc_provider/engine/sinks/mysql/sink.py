"""The MySQL sink: mirror and changelog tables, committed together with their record in one transaction.

The commit record and the staging tables are in the database ``airflow_cdc`` of the target server. Executors load the
effects of a piece into separate staging tables. The driver then applies all pieces of a unit, checks the epoch, and
records the unit, in one transaction. Chunks are committed by the task that read them: rows, watermark and epoch check
are one transaction too. DDL cannot be part of a transaction; see :mod:`.pending_ddl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import MysqlTableStatements
from airflow_cdc_provider.engine.sinks.mysql.view_commands import MysqlViewCommands


@dataclass(frozen=True)
class MysqlSink(MysqlViewCommands):
    """A pipeline's tables on a MySQL server; see :class:`.contract.Sink` and, for the fields, :class:`.MysqlFence`."""

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """Return both sides of a comparison."""
        if self.missing([target]):
            raise UnknownTable(
                f"the target table {target.schema}.{target.name} does not exist",
                f"Run `airflow-cdc resnapshot --table {target.table.label}` to create and fill it.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield a target's rows as Postgres texts, see :data:`.fetched_side.Rows`, from a consistent snapshot."""
        with self._session() as opened:
            opened.begin_snapshot()
            yield from MysqlTableStatements(opened, target, self.mode).rows(keys)
