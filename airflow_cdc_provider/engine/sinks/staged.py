"""Data that tasks and re-reads pass to a sink, and descriptions of staged data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table_operations import TableOperations
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity


@dataclass(frozen=True)
class Share:
    """The location of one table's changes in a relation shared with other tables.

    :param number: number of its row there.
    :param types: SQL types of the staged columns.
    """

    number: int
    types: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """The staged changes of one table in one piece, as needed by ``commit``.

    :param label: label of the source table.
    :param relation: name of the staged relation; ``None`` if there is only a truncate.
    :param rows: number of staged rows.
    :param truncate: the table is emptied before the rows are applied.
    :param columns: names of the staged columns, in order.
    :param share: the location within a relation that other tables share.
    """

    label: str
    relation: str | None
    rows: int
    truncate: bool
    columns: tuple[str, ...]
    share: Share | None = None


@dataclass(frozen=True)
class StagedPiece:
    """The message of a staging task to ``commit``.

    :param start: position after which the unit begins, as JSON.
    :param end: position at which the batch ends, as JSON.
    :param index: order of the piece in the batch.
    :param changes: number of row changes in the piece, before filter and collapse.
    :param xids: distinct transactions of the piece, as little-endian uint32.
    :param split_truncates: see :class:`.effects.PieceEffects`.
    :param high: the highest high watermark of all reads that served as filters.
    :param truncates: by oid of a leaf, the last transaction that truncated it.
    :param changes_by_table: as ``changes``, by label of the captured table.
    :param operations: by label, which of these are inserts, updates and deletes; empty if the source does not tell.
    """

    start: str
    end: str
    index: int
    changes: int
    xids: bytes
    tables: tuple[Staged, ...]
    split_truncates: frozenset[str]
    high: LogPosition
    truncates: Mapping[int, int] = field(default_factory=dict)
    changes_by_table: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[str, TableOperations] = field(default_factory=dict)


class MissingValues(Exception):
    """A unit needs values that neither the stream nor the sink has; ``keys`` names the rows to read again."""

    def __init__(self, keys: Mapping[str, frozenset[tuple[str, ...]]]) -> None:
        super().__init__("rows must be read again by key")
        self.keys = keys


class RowsNeeded(Exception):
    """A target cannot get a new definition without reading the rows of its table again."""


@dataclass(frozen=True)
class CopiedChunk:
    """A chunk that a task has read and written, for :meth:`Sink.commit_chunks`.

    :param origin: the server of its rows.
    :param written: result of :meth:`Sink.write_chunk`.
    """

    target: Target
    chunk: Chunk
    origin: ServerIdentity
    written: Any
