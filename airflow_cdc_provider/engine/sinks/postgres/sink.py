"""The Postgres sink: mirror and changelog tables, committed together with their record in one transaction.

The commit record and the staging tables are in the schema ``airflow_cdc`` of the target database. Executors write the
effects of a piece with COPY into unlogged staging tables; large effects get separate tables. The driver checks the
epoch, applies all pieces of a unit while others are still being staged, and records the unit, in one transaction.
Chunks are committed by the task that read them: rows, watermark and epoch check are one transaction too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.postgres.compared import changelog_sides, mirror_sides, target_rows
from airflow_cdc_provider.engine.sinks.postgres.views import PostgresViews


@dataclass(frozen=True)
class PostgresSink(PostgresViews):
    """A pipeline's tables in a Postgres database; see :class:`.contract.Sink` and, for the fields,
    :class:`.PostgresRecord`.
    """

    @contextlib.contextmanager
    def compared(self, source: Connection, target: Target) -> Iterator[Sides]:
        """Yield both sides of a comparison."""
        # Readers of a target have to wait while the stream reads its table again.
        with self._asked({"lock_timeout": "0"}) as sink:
            sides = mirror_sides if self.mode == "mirror" else changelog_sides
            yield sides(source, sink, target)

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield a target's rows from a consistent snapshot."""
        with self._asked({"lock_timeout": "0"}) as sink:
            yield from target_rows(sink, target, self.mode, keys)
