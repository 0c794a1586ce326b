"""Data files, and what the log says of them. Pure decisions.

The log has three sections of its own for a files sink, see :mod:`.record_contents`:

==========  ===========================================================================================
``files``   by path: a :class:`DataFile`, which is in the changelog from the entry on that names it
``old``     by path: when a file was replaced by others that hold its rows, and is no longer named
``shapes``  by folder of a target: the version at hand, and the types of the columns of its files
``reads``   by folder of a target: LSN and ``_seq`` of the rows that were last read from the source
==========  ===========================================================================================

All files of a version can be read together: a column has one type in all that have it. Where a column of the source
gets another type, the table is read again whole, and a new version begins with its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.files.row_format import column_type
from airflow_cdc_provider.engine.sinks.files.settings import Format
from airflow_cdc_provider.engine.sinks.lake.paths import folder
from airflow_cdc_provider.engine.sinks.record_log.read_position import Room, room_at
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents


@dataclass(frozen=True)
class DataFile:
    """A file of rows.

    :param path: below the sink's path.
    :param folder: of its target, see :func:`folder_of`.
    :param version: of the target's shape.
    :param date: UTC date of its rows' commits, or of their read.
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
    def format(self) -> Format:
        """What it is written in, whatever the pipeline file says by now."""
        return "json" if self.path.endswith(".json") else "parquet"

    def to_dict(self) -> dict[str, Any]:
        """The file as JSON values; :meth:`from_dict` reads them back."""
        return {**asdict(self), "first": format_lsn(self.first), "last": format_lsn(self.last)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataFile:
        """Read what :meth:`to_dict` wrote."""
        return cls(**{**values, "first": parse_lsn(values["first"]), "last": parse_lsn(values["last"])})


@dataclass(frozen=True)
class Shape:
    """What the files of a target have in common.

    :param columns: types by name, of all columns that a file of the version has.
    """

    version: int = 1
    columns: Mapping[str, str] = field(default_factory=dict)

    def with_table(self, table: Table, format_: Format) -> Shape | None:
        """The shape when the table's rows come as well; ``None`` when a column has another type in files before."""
        new = {column.name: str(column_type(column, format_)) for column in table.columns}
        if any(self.columns.get(name, kind) != kind for name, kind in new.items()):
            return None
        return Shape(self.version, {**self.columns, **new})

    def anew(self, table: Table, format_: Format) -> Shape:
        """The shape when all rows of the table are written again: the same version, if that is possible."""
        return self.with_table(table, format_) or Shape(self.version + 1).with_table(table, format_) or Shape()


def folder_of(target: Target) -> str:
    """The folder of a target."""
    return folder(target.schema, target.name)


def partition(folder: str, version: int, date: str) -> str:
    """The folder of the files of a target and a date."""
    return f"{folder}/{f'v{version}/' if version > 1 else ''}_date={date}"


def files_of(contents: Contents) -> list[DataFile]:
    """All files of the changelogs, in the order of their rows."""
    found = map(DataFile.from_dict, contents.get("files", {}).values())
    return sorted(found, key=lambda file: (file.folder, file.version, file.first, file.last, file.path))


def known(contents: Contents) -> set[str]:
    """The paths of all files that are, or have been, in the changelogs, and that readers may be at."""
    return {*contents.get("files", {}), *contents.get("old", {})}


def shape_of(contents: Contents, folder: str) -> Shape:
    """The shape of a target's files."""
    found = contents.get("shapes", {}).get(folder)
    return Shape() if found is None else Shape(**found)


def room_of(contents: Contents, folder: str, lsn: LogPosition, replacing: bool) -> Room:
    """Where rows that are read now stand.

    :param lsn: the applied LSN.
    :param replacing: they replace what the changelog amounts to.
    """
    read = contents.get("reads", {}).get(folder)
    last = int(read["seq"]) if read is not None and parse_lsn(read["lsn"]) == lsn else None
    has_rows = any(value["folder"] == folder for value in contents.get("files", {}).values())
    return room_at(lsn, last, replacing and has_rows)


def with_files(files: Iterable[DataFile]) -> Change:
    """Files are in the changelogs."""
    return Change({"files": {file.path: file.to_dict() for file in files}})


def with_shape(folder: str, shape: Shape) -> Change:
    """A target has a shape."""
    return Change({"shapes": {folder: asdict(shape)}})


def with_read(folder: str, room: Room) -> Change:
    """Rows of a target have been read."""
    return Change({"reads": {folder: {"lsn": format_lsn(room.lsn), "seq": room.seq}}})


def replaced(before: Iterable[DataFile], after: Iterable[DataFile], now: float) -> Change:
    """Files hold the rows of others."""
    gone = [file.path for file in before]
    return with_files(after) + Change({"old": dict.fromkeys(gone, now)}, {"files": gone})
