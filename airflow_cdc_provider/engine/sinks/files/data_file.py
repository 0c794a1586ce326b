"""Data files, and their sections in the log. Pure decisions.

A files sink adds these sections to the log, see :mod:`.record_contents`:

==========  ===========================================================================================
``files``   by path: a :class:`DataFile`, which belongs to the changelog from this entry on
``old``     by path: when a file was replaced by others with its rows; it is no longer named
``shapes``  by folder of a target: the current version, and the types of the columns of its files
``reads``   by folder of a target: LSN and ``_seq`` of the rows that were last read from the source
==========  ===========================================================================================

All files of a version can be read together: each column has one type in all files that have it. If a column of the
source changes its type, the whole table is read again, and a new version begins with its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.files.row_format import column_type
from airflow_cdc_provider.engine.sinks.files.settings import FileFormat
from airflow_cdc_provider.engine.sinks.lake.paths import folder
from airflow_cdc_provider.engine.sinks.record_log.read_position import ReadPosition, read_position
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents


@dataclass(frozen=True)
class DataFile:
    """A file of rows.

    :param path: path below the sink's path.
    :param folder: folder of its target, see :func:`folder_of`.
    :param version: version of the schema of the target's files.
    :param date: UTC date on which its rows were committed, or read.
    :param size: bytes.
    :param first: lowest LSN of its rows.
    :param last: highest LSN of its rows.
    """

    path: str
    folder: str
    version: int
    date: str
    rows: int
    size: int
    first: LogPosition
    last: LogPosition

    @property
    def format(self) -> FileFormat:
        """Return the format of the file, independent of the pipeline file's current format."""
        return "json" if self.path.endswith(".json") else "parquet"

    def to_dict(self) -> dict[str, Any]:
        """Return the file as JSON values; :meth:`from_dict` reads them back."""
        return {**asdict(self), "first": format_lsn(self.first), "last": format_lsn(self.last)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataFile:
        """Return the file from the values of :meth:`to_dict`."""
        return cls(**{**values, "first": parse_lsn(values["first"]), "last": parse_lsn(values["last"])})


@dataclass(frozen=True)
class FileSchema:
    """The common schema of a target's files.

    :param columns: types by name, of all columns that a file of the version has.
    """

    version: int = 1
    columns: Mapping[str, str] = field(default_factory=dict)

    def with_table(self, table: Table, format_: FileFormat) -> FileSchema | None:
        """Return the schema with the table's rows added; ``None`` if the type of a column differs from older files."""
        new = {column.name: str(column_type(column, format_)) for column in table.columns}
        if any(self.columns.get(name, kind) != kind for name, kind in new.items()):
            return None
        return FileSchema(self.version, {**self.columns, **new})

    def for_rewrite(self, table: Table, format_: FileFormat) -> FileSchema:
        """Return the schema when all rows of the table are rewritten; the version stays the same if possible."""
        return (
            self.with_table(table, format_) or FileSchema(self.version + 1).with_table(table, format_) or FileSchema()
        )


def folder_of(target: Target) -> str:
    """Return the folder of a target."""
    return folder(target.schema, target.name)


def partition(folder: str, version: int, date: str) -> str:
    """Return the folder of the files of a target and a date."""
    return f"{folder}/{f'v{version}/' if version > 1 else ''}_date={date}"


def files_of(contents: Contents) -> list[DataFile]:
    """Return all files of the changelogs, in the order of their rows."""
    found = map(DataFile.from_dict, contents.get("files", {}).values())
    return sorted(found, key=lambda file: (file.folder, file.version, file.first, file.last, file.path))


def known(contents: Contents) -> set[str]:
    """Return the paths of all files that are or were in the changelogs, and that readers may still use."""
    return {*contents.get("files", {}), *contents.get("old", {})}


def file_schema(contents: Contents, folder: str) -> FileSchema:
    """Return the schema of a target's files."""
    found = contents.get("shapes", {}).get(folder)
    return FileSchema() if found is None else FileSchema(**found)


def next_read_position(contents: Contents, folder: str, lsn: LogPosition, replacing: bool) -> ReadPosition:
    """Return the position in the changelog for rows that are read now.

    :param lsn: the applied LSN.
    :param replacing: the rows replace the current rows of the changelog.
    """
    read = contents.get("reads", {}).get(folder)
    last = int(read["seq"]) if read is not None and parse_lsn(read["lsn"]) == lsn else None
    has_rows = any(value["folder"] == folder for value in contents.get("files", {}).values())
    return read_position(lsn, last, replacing and has_rows)


def with_files(files: Iterable[DataFile]) -> Change:
    """Return the change that adds files to the changelogs."""
    return Change({"files": {file.path: file.to_dict() for file in files}})


def with_file_schema(folder: str, schema: FileSchema) -> Change:
    """Return the change that sets the schema of a target's files."""
    return Change({"shapes": {folder: asdict(schema)}})


def with_read(folder: str, position: ReadPosition) -> Change:
    """Return the change that records a read of a target's rows."""
    return Change({"reads": {folder: {"lsn": format_lsn(position.lsn), "seq": position.seq}}})


def replaced(before: Iterable[DataFile], after: Iterable[DataFile], now: float) -> Change:
    """Return the change that replaces files by others with the same rows."""
    gone = [file.path for file in before]
    return with_files(after) + Change({"old": dict.fromkeys(gone, now)}, {"files": gone})
