"""Compacts files: rewrites the small files that units leave as few large ones.

Compaction can run at any time, concurrently with the pipeline's jobs, and needs no epoch. Files never change, so that
it reads them completely. One entry of the log replaces the old files with the new ones, if all of them are still named.
Meanwhile units only add other files. Readers of an older manifest can still use the old files for some time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.files.data_file import DataFile, files_of, known, partition, replaced
from airflow_cdc_provider.engine.sinks.files.row_format import writer
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

TARGET_BYTES = 128 << 20
"""Size of the written files in bytes."""

RETENTION_SECONDS = 86_400.0
"""Seconds for which replaced files stay, for readers that have begun with an older manifest."""

_BATCH_ROWS = 65_536
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction.

    :param files: number of replaced files.
    :param made: number of files written in their place.
    :param rows: number of rows in these.
    :param removed: number of deleted files: orphans, and files replaced earlier.
    """

    files: int = 0
    made: int = 0
    rows: int = 0
    removed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def compact(
    sink: FilesSink, target_bytes: int = TARGET_BYTES, retention: float = RETENTION_SECONDS, now: float | None = None
) -> Compacted:
    """Compact the files of all tables of a pipeline, and delete files that are no longer named.

    :param target_bytes: size of the written files; files of at least half this size stay as they are.
    :param retention: seconds for which replaced files stay. A unit must not take that long.
    :param now: seconds since 1970; by default the current time.
    :raises GateClosed: when the pipeline has not been provisioned.
    """
    head = sink.head()
    if head is None:
        raise GateClosed(f"the sink has no record of pipeline {sink.pipeline!r}", "Run `airflow-cdc provision` first.")
    return Compaction(sink, target_bytes, retention, time.time() if now is None else now).run(head)


@dataclass(frozen=True)
class Compaction:
    """A compaction of a pipeline's files; see :func:`compact`."""

    sink: FilesSink
    target_bytes: int
    retention: float
    now: float

    def run(self, head: Head) -> Compacted:
        """Compact the files that ``head`` names, one group after the other."""
        files, made, rows = 0, 0, 0
        for group in self._groups(head.contents):
            written = self._write(group)
            if self._commit(group, written):
                files, made, rows = files + len(group), made + 1, rows + written.rows
        removed = self._remove_old() + self._remove_orphans()
        self.sink.publish()
        return Compacted(files, made, rows, removed)

    def _groups(self, contents: Contents) -> Iterator[list[DataFile]]:
        """Yield groups of files of one table, version, date and format to merge, in the order of their rows."""
        small = [file for file in files_of(contents) if file.size < self.target_bytes / 2]
        small.sort(key=lambda file: (*_kind(file), file.first, file.last, file.path))
        for _, found in groupby(small, key=_kind):
            group: list[DataFile] = []
            for file in found:
                if group and sum(each.size for each in group) + file.size > self.target_bytes:
                    if len(group) > 1:
                        yield group
                    group = []
                group.append(file)
            if len(group) > 1:
                yield group

    def _write(self, group: Sequence[DataFile]) -> DataFile:
        """Write one file with the rows of all, batch by batch."""
        first = group[0]
        name = f"{partition(first.folder, first.version, first.date)}/{uuid.uuid4().hex}.{first.format}"
        root = self.sink.root
        with root.writing(name) as out:
            if first.format == "json":
                for file in group:
                    with root.reading(file.path) as lines:
                        while piece := lines.read(_COPIED_BYTES):
                            out.write(piece)
            else:
                schema = self._schema(group)
                made = writer("parquet", out, schema)
                for file in group:
                    with root.reading(file.path) as source:
                        for batch in pq.ParquetFile(source).iter_batches(_BATCH_ROWS):
                            made.write(_fitted(batch, schema))
                made.close()
            size = out.tell()
        failpoint("before-compaction")
        return DataFile(
            name,
            first.folder,
            first.version,
            first.date,
            sum(file.rows for file in group),
            size,
            min(file.first for file in group),
            max(file.last for file in group),
        )

    def _schema(self, group: Sequence[DataFile]) -> pa.Schema:
        """Return the columns of all files; within a version each column has one type."""
        schemas = []
        for file in group:
            with self.sink.root.reading(file.path) as source:
                schemas.append(pq.read_schema(source))
        return pa.unify_schemas(schemas)

    def _commit(self, group: Sequence[DataFile], written: DataFile) -> bool:
        """Name the new file in place of the old ones, unless another compaction has replaced one of them."""
        began = time.monotonic()

        def decide(contents: Contents) -> Commit | None:
            named = contents.get("files", {})
            # After a long pause, another compaction may already have removed the new file as an orphan.
            if any(file.path not in named for file in group) or time.monotonic() - began > self.retention / 2:
                return None
            return Commit(replaced(group, [written], self.now))

        done = self.sink.append_without_epoch(f"{len(group)} files of {written.folder} compacted", decide)
        failpoint("after-compaction")
        return done or self.sink.settled([written.path])

    def _remove_old(self) -> int:
        """Delete files that were replaced long ago, and remove them from the record."""
        head = self.sink.head()
        old = {} if head is None else head.contents.get("old", {})
        gone = [path for path, since in old.items() if self.now - since >= self.retention]
        for path in gone:
            self.sink.root.remove(path)
        if gone:
            forgotten = Commit(Change(removed={"old": gone}))
            self.sink.append_without_epoch(f"{len(gone)} files forgotten", lambda _: forgotten)
        return len(gone)

    def _remove_orphans(self) -> int:
        """Delete files that no entry names and that are too old to belong to a running unit."""
        head = self.sink.head()
        if head is None:
            return 0
        named, removed = known(head.contents), 0
        for folder in head.contents.get("shapes", {}):
            for path in self.sink.root.files(folder):
                if path not in named and self.now - (self.sink.root.modified(path) or self.now) >= self.retention:
                    self.sink.root.remove(path)
                    removed += 1
        return removed


def _kind(file: DataFile) -> tuple[str, int, str, str]:
    """Return the properties that files must share to be merged."""
    return file.folder, file.version, file.date, file.format


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """Return a batch with all columns of a schema; missing columns are null."""
    names = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
