"""The commit record: a sink's durable targets and chunks, and the position up to which it has applied the log."""

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
    """Return how far the applied LSN is behind the end of the source's log.

    :param applied: the LSN that is durable in the sink.
    :param advanced: time when the sink reached it, in seconds since 1970.
    :param end: the end of the source's log.
    :param now: seconds since 1970.
    :returns: bytes, and seconds since the applied LSN last advanced; 0 seconds if it is not behind.
    """
    size = max(end - applied, 0)
    return size, round(max(0.0, now - advanced), 3) if size else 0.0


CHANGELOG_NAMES = frozenset({"_op", "_commit_lsn", "_seq", "_xid", "_commit_ts", "_before", "_unchanged"})
"""The columns that a changelog has in addition to those of the source."""


FIRST_READ = -1_000_000
"""``_seq`` of rows in a changelog that were read by a snapshot.

It is far below that of changes, which count from 1, so that there is room for re-reads of the same rows at the same
LSN.
"""


@dataclass(frozen=True)
class Target:
    """A source table, and the schema and name of the table that its rows are written to."""

    table: Table
    schema: str
    name: str


@dataclass(frozen=True)
class Watermark:
    """The state of the source that a read has seen.

    :param snapshot: the MVCC snapshot of the read.
    :param high: the high watermark: LSN of a marker committed after the read. Every transaction that the snapshot sees
        committed below it.
    """

    snapshot: Snapshot
    high: LogPosition


@dataclass(frozen=True)
class ChunkRecord:
    """A chunk in the commit record.

    :param watermark: ``None`` until the chunk is committed.
    :param rows: number of rows committed.
    :param keys: for a re-read of keys, these keys (texts, one tuple for each key); ``None`` for a range.
    """

    chunk: Chunk
    watermark: Watermark | None = None
    rows: int = 0
    keys: frozenset[tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Record:
    """The commit record of a pipeline.

    :param epoch: number of the run that may commit.
    :param applied: end LSN of the last transaction that was applied.
    :param advanced: time of that, in seconds since 1970 by the sink's clock.
    :param identity: the kind of ``source``, the ``mode``, and further values that the source has recorded, see
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
        """Return the committed chunks and re-reads with their watermarks, by table."""
        found: dict[str, list[tuple[ChunkRecord, Watermark]]] = {}
        for each in self.chunks:
            if each.watermark is not None:
                found.setdefault(each.chunk.table, []).append((each, each.watermark))
        return {label: tuple(each) for label, each in found.items()}

    @cached_property
    def high(self) -> LogPosition:
        """Return the highest high watermark of the snapshot.

        At this position, the stream no longer needs a filter and the mirror becomes consistent.
        """
        return max((c.watermark.high for c in self.chunks if c.watermark), default=LOG_START)

    @property
    def unfinished(self) -> tuple[Chunk, ...]:
        """Return the chunks that have not been committed."""
        return tuple(c.chunk for c in self.chunks if c.watermark is None)

    @property
    def consistent(self) -> bool:
        """Return whether the mirror is in a state that the source once had."""
        return not self.unfinished and self.applied >= self.high

    def lag(self, end: LogPosition, now: float) -> tuple[int, float]:
        """Return how far the record is behind the end of a log, see :func:`behind`."""
        return behind(self.applied, self.advanced, end, now)


Mode: TypeAlias = Literal["mirror", "changelog"]


def require_kind(source: str, identity: Mapping[str, Any]) -> None:
    """Refuse a record that another kind of source has written, because the kind must not change.

    :param source: the kind, by its name in ``source.type``.
    :param identity: that of the record, or of its copy.
    :raises ConfigError: if the kinds differ; the error names both.
    """
    recorded = identity.get("source")
    if recorded != source:
        raise ConfigError(
            f"source.type is {source!r}, but the pipeline of this name has been provisioned with {recorded!r}",
            "Restore the former source in the file, or use another pipeline name for the new source.",
        )


def noted_by(source: str, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that a kind of source has recorded in a record, which only that kind reads.

    :raises ConfigError: as :func:`require_kind`.
    """
    require_kind(source, identity)
    return identity


def target_of(record: Record, label: str) -> Target:
    """Return the target of a source table.

    :raises ConfigError: if the pipeline has no such table.
    """
    for target in record.targets:
        if target.table.label == label:
            return target
    known = ", ".join(target.table.label for target in record.targets)
    raise ConfigError(f"the pipeline has no table {label!r}", f"Name one of: {known}.")
