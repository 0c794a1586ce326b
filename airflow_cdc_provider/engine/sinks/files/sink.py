"""The files sink: change logs as data files, each unit in all tables at once.

Staging tasks write data files under their final names. A unit, a chunk or a re-read is committed by one entry of the
log, which names them; what no entry names is in no changelog, and is swept. Manifests are made of the log for readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    files_of,
    folder_of,
    shape_of,
    with_shape,
)
from airflow_cdc_provider.engine.sinks.files.reads import FilesReads
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded


@dataclass(frozen=True)
class FilesSink(FilesReads):
    """A pipeline's change logs below a path; see :class:`.contract.Sink` and, for its fields, the record."""

    # -- the record ---------------------------------------------------------------------------------

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.contract.Sink.redefine`. Files stay as they are; those to come have the columns of then."""
        failpoint("before-redefinition")
        folder, change = folder_of(after), redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"rows of before have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("files keep the names of the columns that they have")

        def decide(contents: Contents) -> Commit:
            shape = shape_of(contents, folder).with_table(after.table, self.format)
            if shape is None:
                raise RowsNeeded("files keep the types of the columns that they have")
            return Commit(record_contents.redefined(after) + with_shape(folder, shape))

        self._append(epoch, f"{after.table.label} redefined", decide)
        failpoint("after-redefinition")

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.contract.Sink.compared`."""
        if self.missing([target]):
            raise UnknownTable(
                f"the files of the target {target.schema}.{target.name} are gone",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """All events of a target since it was last begun anew: the files that one entry of the log names.

        :param keys: all events come, whatever the keys.
        """
        head = self._log.head()
        folder = folder_of(target)
        contents: Contents = {} if head is None else head.contents
        version = shape_of(contents, folder).version
        for each in files_of(contents):
            if (each.folder, each.version) == (folder, version):
                with self.root.reading(each.path) as file:
                    for batch in rows_.batches(each.format, file):
                        yield rows_.texts(target, batch)
