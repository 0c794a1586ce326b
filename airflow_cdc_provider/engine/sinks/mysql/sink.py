"""The MySQL sink: mirror and changelog tables, committed with their record in one transaction.

The commit record and the staging tables stand in the database ``airflow_cdc`` of the target server. Executors load the
effects of a piece into staging tables of their own; the driver then applies all pieces of a unit, checks the epoch, and
records the unit, in one transaction. Chunks are committed by the task that read them: rows, watermark and epoch check
are one transaction too. Where a table has to be changed by DDL, which no transaction holds, :mod:`.pending_ddl` says
how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.mysql.reads import MysqlReads
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import TableStatements


@dataclass(frozen=True)
class MysqlSink(MysqlReads):
    """A pipeline's place on a MySQL server; see :class:`.contract.Sink` and, for its fields, the record."""

    # -- questions ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.contract.Sink.compared`."""
        if self.missing([target]):
            raise UnknownTable(
                f"the target table {target.schema}.{target.name} does not exist",
                f"Run `airflow-cdc resnapshot --table {target.table.label}`: it creates and fills it.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """A target's rows as Postgres's texts, see :data:`.fetched_side.Rows`; all of one moment."""
        with self._session() as opened:
            opened.begin_snapshot()
            yield from TableStatements(opened, target, self.mode).rows(keys)
