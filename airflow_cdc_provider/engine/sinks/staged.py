"""What tasks and re-reads hand to a sink, and what it tells of what is staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.server_identity import Origin


@dataclass(frozen=True)
class Share:
    """Where the changes of one table stand in what the changes of several share.

    :param number: of its row there.
    :param types: of the staged columns, as SQL.
    """

    number: int
    types: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """The changes of one table in one piece, as staged: what ``commit`` needs to know of them.

    :param label: the source table.
    :param relation: name of what was staged, or ``None`` when nothing but a truncate was left.
    :param rows: rows staged.
    :param truncate: the table is emptied before the rows are applied.
    :param columns: names of the staged columns, in order.
    :param share: of it where others have been staged in the same relation.
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
    :param changes: row changes that the piece held, before filter and collapse.
    :param xids: the piece's transactions, distinct, as little-endian uint32.
    :param split_truncates: see :class:`.effects.PieceEffects`.
    :param high: the highest H of all reads that were filtered by.
    :param truncates: by oid of a leaf, the last transaction that truncated it.
    :param changes_by_table: as ``changes``, by label, of the tables that are captured.
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


class MissingValues(Exception):
    """A unit needs values that neither the stream nor the sink has; ``keys`` says which rows to read again."""

    def __init__(self, keys: Mapping[str, frozenset[tuple[str, ...]]]) -> None:
        super().__init__("rows must be read again by key")
        self.keys = keys


class RowsNeeded(Exception):
    """A target cannot be given a new definition alone: the rows of its table have to be read again, too."""


@dataclass(frozen=True)
class CopiedChunk:
    """A chunk that a task has read and written, for :meth:`Sink.commit_chunks`.

    :param origin: the server that its rows come from.
    :param written: what :meth:`Sink.write_chunk` returned.
    """

    target: Target
    chunk: Chunk
    origin: Origin
    written: Any
