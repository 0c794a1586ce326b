"""Compaction: the small files that units leave are written anew as few large ones.

It may run at any time, beside the pipeline's jobs, and needs no epoch. What it has read it has read whole, since files
never change; one entry of the log puts the new files in the places of the old ones, if these are still named. Units go
on meanwhile: their files are none of those. Whoever reads an older manifest finds the old files for a while yet.
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
"""Size of the files that are made."""

RETENTION_SECONDS = 86_400.0
"""How long files that are no longer named stay, for readers that have begun with an older manifest."""

_BATCH_ROWS = 65_536
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class Compacted:
    """What a compaction has done.

    :param files: that were replaced.
    :param made: by how many.
    :param rows: that these hold.
    :param removed: files of earlier compactions, and orphans, that were deleted.
    """

    files: int = 0
    made: int = 0
    rows: int = 0
    removed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def compact(
    sink: FilesSink, target_bytes: int = TARGET_BYTES, retention: float = RETENTION_SECONDS, now: float | None = None
) -> Compacted:
    """Compact the files of all tables of a pipeline, and delete what is no longer named.

    :param target_bytes: size of the files that are made; those that have half of it stay as they are.
    :param retention: seconds that files stay after they were replaced. A unit must not take that long.
    :param now: seconds since 1970, by default by the clock.
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
        """Compact what ``head`` names, group after group."""
        files, made, rows = 0, 0, 0
        for group in self._groups(head.contents):
            written = self._write(group)
            if self._commit(group, written):
                files, made, rows = files + len(group), made + 1, rows + written.rows
        removed = self._remove_old() + self._remove_orphans()
        self.sink.publish()
        return Compacted(files, made, rows, removed)

    def _groups(self, contents: Contents) -> Iterator[list[DataFile]]:
        """Files of one table, version, date and format that together make one, in the order of their rows."""
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
        """One file with the rows of all, a batch at a time."""
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
        """The columns of all files: in a version each has one type."""
        schemas = []
        for file in group:
            with self.sink.root.reading(file.path) as source:
                schemas.append(pq.read_schema(source))
        return pa.unify_schemas(schemas)

    def _commit(self, group: Sequence[DataFile], written: DataFile) -> bool:
        """Name the new file in place of the old ones, unless another has replaced one of them."""
        began = time.monotonic()

        def decide(contents: Contents) -> Commit | None:
            named = contents.get("files", {})
            # One that has slept may find its file taken for an orphan by another.
            if any(file.path not in named for file in group) or time.monotonic() - began > self.retention / 2:
                return None
            return Commit(replaced(group, [written], self.now))

        done = self.sink.append_beside(f"{len(group)} files of {written.folder} compacted", decide)
        failpoint("after-compaction")
        return done or self.sink.settled([written.path])

    def _remove_old(self) -> int:
        """Delete files that were replaced long ago; then forget them."""
        head = self.sink.head()
        old = {} if head is None else head.contents.get("old", {})
        gone = [path for path, since in old.items() if self.now - since >= self.retention]
        for path in gone:
            self.sink.root.remove(path)
        if gone:
            self.sink.append_beside(f"{len(gone)} files forgotten", lambda _: Commit(Change(removed={"old": gone})))
        return len(gone)

    def _remove_orphans(self) -> int:
        """Delete files that no entry names and that are too old to be of a unit under way."""
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
    """What files have in common that can become one."""
    return file.folder, file.version, file.date, file.format


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """A batch with all columns of a schema, null where it has none."""
    names = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
