"""The Kafka sink: changes of tables as messages of their topics, each unit in all of them or in none.

Tasks write messages, as they will be, into the pipeline's staging topic. The driver takes them from there and writes
them into their topics, and what follows for the record into its own, in one transaction: consumers that read what is
committed see each change once, and a unit in all topics or in none, if not at the same moment: the brokers mark the
end of a transaction in one partition after the other. Overtaken runs are fenced by the brokers, see
:mod:`.transactions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
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
    """A pipeline's topics in a cluster; see :class:`.contract.Sink`.

    :param part: of the run, which writes at the same time as others.
    """

    # -- targets ------------------------------------------------------------------------------------

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`. Messages stay as they are; those to come have the columns of then."""
        failpoint("before-redefinition")
        try:
            self.topics.format.require(after)
        except ConfigError as e:
            raise CannotFollow(e.message, e.solution) from e
        change = redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"rows of before have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("messages keep the names of the columns that they have")
        if change.retyped:
            raise RowsNeeded("messages keep the types of the columns that they have")
        self._append(epoch, f"{after.table.label} redefined", lambda contents: Commit(record_contents.redefined(after)))
        failpoint("after-redefinition")

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.contract.Sink.compared`."""
        if self.missing([target]):
            raise UnknownTable(
                f"the topic {self.topics.name(target)} of the target {target.schema}.{target.name} is gone",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """All events of a target's topic that are ours, committed, and still there.

        :param keys: all events come, whatever the keys.
        """
        return self.topics.events(self._current() or {}, target)

    def ranges(self, target: Target) -> Sequence[MessageRange]:
        """See :meth:`.Numbered.ranges`."""
        return self.topics.ranges(self._current() or {}, target)
