"""The files sink: changelogs as data files; a unit appears in all tables at once.

Staging tasks write data files under their final names. One entry of the log, which names the files, commits a unit, a
chunk or a re-read. Files that no entry names belong to no changelog, and are removed later. Manifests for readers are
written from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.files import row_format as rows_
from airflow_cdc_provider.engine.sinks.files.data_file import (
    file_schema,
    files_of,
    folder_of,
    with_file_schema,
)
from airflow_cdc_provider.engine.sinks.files.reads import FilesReads
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents
from airflow_cdc_provider.engine.sinks.staged import RowsNeeded


@dataclass(frozen=True)
class FilesSink(FilesReads):
    """A pipeline's changelogs below a path; see :class:`.contract.Sink` and, for the fields, :class:`.LakeRecord`."""

    # -- the record ---------------------------------------------------------------------------------

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Record a changed table. Existing files stay as they are; new files have the new columns."""
        failpoint("before-redefinition")
        folder, change = folder_of(after), redefinition(before.table, after.table)
        for column in change.added:
            if column.missing is not None:
                raise RowsNeeded(f"earlier rows have {column.missing!r} in the added column {column.name}")
        if change.renamed or change.replaced:
            raise RowsNeeded("existing files keep the names of their columns")

        def decide(contents: Contents) -> Commit:
            schema = file_schema(contents, folder).with_table(after.table, self.format)
            if schema is None:
                raise RowsNeeded("existing files keep the types of their columns")
            return Commit(record_contents.redefined(after) + with_file_schema(folder, schema))

        self._append(epoch, f"{after.table.label} redefined", decide)
        failpoint("after-redefinition")

    # -- comparing ---------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """Return both sides of a comparison."""
        if self.missing([target]):
            raise UnknownTable(
                f"the files of the target {target.schema}.{target.name} no longer exist",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`.",
            )
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all events of a target since its current version began, from the files that one entry of the log names.

        :param keys: ignored; all events are returned.
        """
        head = self._log.head()
        folder = folder_of(target)
        contents: Contents = {} if head is None else head.contents
        version = file_schema(contents, folder).version
        for each in files_of(contents):
            if (each.folder, each.version) == (folder, version):
                with self.root.reading(each.path) as file:
                    for batch in rows_.batches(each.format, file):
                        yield rows_.texts(target, batch)
