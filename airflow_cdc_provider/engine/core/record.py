"""What a sink has durably: targets, chunks, and how far the log is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import LOG_START, LogPosition
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.table import Table


def behind(applied: LogPosition, advanced: float, end: LogPosition, now: float) -> tuple[int, float]:
    """Bytes from the applied LSN to the end of the source's log, and seconds since it last advanced while behind.

    :param applied: LSN durable in the sink.
    :param advanced: when the sink got there, in seconds since 1970.
    :param end: of the source's log.
    :param now: seconds since 1970.
    """
    size = max(end - applied, 0)
    return size, round(max(0.0, now - advanced), 3) if size else 0.0


CHANGELOG_NAMES = frozenset({"_op", "_commit_lsn", "_seq", "_xid", "_commit_ts", "_before", "_unchanged"})
"""The columns that a changelog has beside the source's."""


FIRST_READ = -1_000_000
"""``_seq`` of rows in a changelog that were read: far below changes, which count from 1, so that there is room for the
same rows read again at the same LSN."""


@dataclass(frozen=True)
class Target:
    """A source table and where its rows go."""

    table: Table
    schema: str
    name: str


@dataclass(frozen=True)
class Watermark:
    """What a read of the source stands for.

    :param snapshot: the MVCC snapshot it was read in.
    :param high: LSN of a marker committed after the read; every transaction that the snapshot sees committed below.
    """

    snapshot: Snapshot
    high: LogPosition


@dataclass(frozen=True)
class ChunkRecord:
    """A chunk in the commit record.

    :param watermark: ``None`` while the chunk has not been committed.
    :param rows: rows committed.
    :param keys: for a re-read, the keys that are its members (texts, one tuple a key); ``None`` for a range.
    """

    chunk: Chunk
    watermark: Watermark | None = None
    rows: int = 0
    keys: frozenset[tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Record:
    """The commit record of a pipeline.

    :param epoch: number of the run that may commit.
    :param applied: end LSN of the last transaction applied.
    :param advanced: when that was, in seconds since 1970 by the sink's clock.
    :param identity: the kind of ``source``, the ``mode``, and beside these what the source has noted, see
        :func:`noted_by`.
    :param chunks: finished and unfinished chunks and re-reads, by table and index.
    """

    epoch: int
    applied: LogPosition
    advanced: float
    identity: Mapping[str, Any]
    targets: tuple[Target, ...]
    chunks: tuple[ChunkRecord, ...]

    @cached_property
    def finished(self) -> Mapping[str, tuple[tuple[ChunkRecord, Watermark], ...]]:
        """Chunks and re-reads that have been committed, with what they stand for, by table."""
        found: dict[str, list[tuple[ChunkRecord, Watermark]]] = {}
        for each in self.chunks:
            if each.watermark is not None:
                found.setdefault(each.chunk.table, []).append((each, each.watermark))
        return {label: tuple(each) for label, each in found.items()}

    @cached_property
    def high(self) -> LogPosition:
        """The highest H of the snapshot; filtering and inconsistency end there."""
        return max((c.watermark.high for c in self.chunks if c.watermark), default=LOG_START)

    @property
    def unfinished(self) -> tuple[Chunk, ...]:
        """Chunks that have not been committed."""
        return tuple(c.chunk for c in self.chunks if c.watermark is None)

    @property
    def consistent(self) -> bool:
        """Whether the mirror is a state that the source once had."""
        return not self.unfinished and self.applied >= self.high

    def lag(self, end: LogPosition, now: float) -> tuple[int, float]:
        """How far it is behind the end of a log, see :func:`behind`."""
        return behind(self.applied, self.advanced, end, now)


Mode: TypeAlias = Literal["mirror", "changelog"]


def require_kind(source: str, identity: Mapping[str, Any]) -> None:
    """Refuse a record that another kind of source has filled: the file may not change it.

    :param source: the kind, by its name in ``source.type``.
    :param identity: of the record, or of its copy.
    :raises ConfigError: naming both.
    """
    recorded = identity.get("source")
    if recorded != source:
        raise ConfigError(
            f"source.type: {source!r}, but the pipeline of this name has been provisioned with {recorded!r}",
            "Put the source back, or use another pipeline name for the other source.",
        )


def noted_by(source: str, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a kind of source has noted in a record, for that kind alone to read; see :func:`require_kind`."""
    require_kind(source, identity)
    return identity


def target_of(record: Record, label: str) -> Target:
    """The target of a source table.

    :raises ConfigError: when the pipeline has no such table.
    """
    for target in record.targets:
        if target.table.label == label:
            return target
    known = ", ".join(target.table.label for target in record.targets)
    raise ConfigError(f"the pipeline has no table {label!r}", f"Name one of: {known}.")
