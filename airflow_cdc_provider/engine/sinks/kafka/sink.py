"""The Kafka sink: writes changes of tables as messages to topics; each unit is written to all topics or to none.

Tasks write encoded messages to the pipeline's staging topic. The driver copies them to their topics, and writes the
change of the record to its own topic, in one transaction. Consumers that read only committed messages see each change
once, and each unit in all topics or in none. They may not see it in all topics at the same moment, because brokers mark
the end of a transaction in one partition after the other. The brokers fence overtaken runs, see :mod:`.transactions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.errors import CannotFollow, ConfigError, UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.kafka.message_ranges import MessageRange
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.kafka.reads import KafkaReads
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded


@dataclass(frozen=True)
class KafkaSink(KafkaReads):
    """The topics of a pipeline in a cluster; see :class:`.contract.Sink`.

    :param part: the part of the run; parts write at the same time.
    """

    # -- targets ------------------------------------------------------------------------------------

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Record a changed table. Existing messages stay as they are; new messages have the new columns."""
        failpoint("before-redefinition")
        try:
            self.topics.format.require(after)
        except ConfigError as e:
            raise CannotFollow(e.message, e.solution) from e
        change = redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"earlier rows have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("existing messages keep the names of their columns")
        if change.retyped:
            raise RowsNeeded("existing messages keep the types of their columns")
        self._append(epoch, f"{after.table.label} redefined", lambda contents: Commit(record_contents.redefined(after)))
        failpoint("after-redefinition")

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """Return both sides of a comparison."""
        if self.missing([target]):
            raise UnknownTable(
                f"the topic {self.topics.name(target)} of the target {target.schema}.{target.name} no longer exists",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all committed events of the pipeline in a target's topic that still exist.

        :param keys: ignored; all events are returned.
        """
        return self.topics.events(self._current() or {}, target)

    def ranges(self, target: Target) -> Sequence[MessageRange]:
        """Return the ranges of messages in a target's topic."""
        return self.topics.ranges(self._current() or {}, target)
