"""Writes data files: one for each date of the rows, split when they become large.

A file has its final name from the beginning, because object stores cannot rename. It belongs to a changelog only once
an entry of the log names it. A note is written before each file, so that files that are never named can be removed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.lsn import LOG_END, LOG_START, LogPosition
from airflow_cdc_provider.engine.sinks.files.data_file import DataFile, partition
from airflow_cdc_provider.engine.sinks.files.row_format import FileWriter, writer
from airflow_cdc_provider.engine.sinks.files.settings import FileFormat
from airflow_cdc_provider.engine.sinks.lake.storage import Storage

LARGEST = 256 << 20
"""Bytes at which a file ends and the next one begins."""

_DAY = 86_400_000_000  # microseconds


@dataclass
class _Open:
    """A file that is being written."""

    name: str
    date: str
    file: IO[bytes]
    writer: FileWriter
    closing: ExitStack
    rows: int = 0
    first: LogPosition = LOG_END
    last: LogPosition = LOG_START


@dataclass
class DataWriter:
    """Writes rows of one target below a path.

    :param notes: directory of the notes, under the names of the files.
    :param folder: folder of the target.
    :param version: version of its schema. :ivar files: complete files.
    """

    root: Storage
    notes: Storage
    folder: str
    version: int
    format: FileFormat
    files: list[DataFile] = field(default_factory=list)
    _open: dict[str, _Open] = field(default_factory=dict)

    def write(self, rows: pa.Table) -> None:
        """Write each row into the file of the UTC date of its commit; rows without a commit time count as today's."""
        for date, chosen in _by_date(rows):
            found = self._open.get(date) or self._begin(date, rows.schema)
            found.writer.write(chosen)
            bounds = pc.min_max(chosen.column("_commit_lsn")).as_py()
            found.first, found.last = min(found.first, bounds["min"]), max(found.last, bounds["max"])
            found.rows += chosen.num_rows
            if found.file.tell() >= LARGEST:
                self._finish(date)

    def close(self) -> list[DataFile]:
        """Complete all files, so that they are durable."""
        for date in list(self._open):
            self._finish(date)
        return self.files

    def abort(self) -> None:
        """Remove all files."""
        for found in self._open.values():
            with suppress(Exception):
                found.writer.close()
            with suppress(Aborted):
                found.closing.__exit__(Aborted, Aborted(), None)
        for name in [*(file.path for file in self.files), *(found.name for found in self._open.values())]:
            self.root.remove(name)
            self.notes.remove(note_of(name))

    def _begin(self, date: str, schema: pa.Schema) -> _Open:
        name = f"{partition(self.folder, self.version, date)}/{uuid.uuid4().hex}.{self.format}"
        self.notes.replace(note_of(name), name.encode())
        closing = ExitStack()
        file = closing.enter_context(self.root.writing(name))
        found = self._open[date] = _Open(name, date, file, writer(self.format, file, schema), closing)
        return found

    def _finish(self, date: str) -> None:
        found = self._open[date]
        found.writer.close()
        size = found.file.tell()
        found.closing.close()
        del self._open[date]
        self.files.append(
            DataFile(found.name, self.folder, self.version, date, found.rows, size, found.first, found.last)
        )


class Aborted(Exception):
    """Raised into open files that are to be discarded."""


@contextmanager
def writing(root: Storage, notes: Storage, folder: str, version: int, format_: FileFormat) -> Iterator[DataWriter]:
    """Yield a writer whose files are removed if the block fails."""
    made = DataWriter(root, notes, folder, version, format_)
    try:
        yield made
    except BaseException:
        made.abort()
        raise


def note_of(name: str) -> str:
    """Return the name of a data file's note."""
    return name.rpartition("/")[2]


def _by_date(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    now = int(time.time() * 1_000_000)
    days = pc.fill_null(rows.column("_commit_ts").cast(pa.int64()), now).to_numpy() // _DAY
    found = np.unique(days)
    for day in found:
        date = datetime.fromtimestamp(int(day) * 86_400, UTC).date().isoformat()
        yield date, rows if found.size == 1 else rows.filter(pa.array(days == day))
