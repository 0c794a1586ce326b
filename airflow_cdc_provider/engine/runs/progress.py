"""The progress of a stream or a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk_ranges import ChunkIndex, ranges
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn


@dataclass(frozen=True)
class StreamProgress:
    """The progress of a stream.

    :param applied: LSN that is durable in the sink.
    :param changes: number of row changes committed by this job.
    :param seconds: seconds spent in batches that had changes.
    :param tables: the number of changes by captured table.
    :param batch_seconds: seconds spent in the last batch that had changes; ``None`` before the first one.
    :param waiting: description of the work that other transactions block, see :attr:`.UnitWriter.waiting`; or of the
        catalog query that they block.
    :param counts: further counts by name.
    :param lag_messages: number of messages of topics that have not been read; ``None`` if there are no topics.
    """

    applied: LogPosition
    changes: int = 0
    seconds: float = 0.0
    tables: Mapping[str, int] = field(default_factory=dict)
    batch_seconds: float | None = None
    waiting: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    lag_messages: int | None = None

    def plus(self, further: StreamProgress) -> StreamProgress:
        """Return the progress including a further attempt, which begins where this one ended."""
        return StreamProgress(
            further.applied,
            self.changes + further.changes,
            self.seconds + further.seconds,
            Counter(self.tables) + Counter(further.tables),
            self.batch_seconds if further.batch_seconds is None else further.batch_seconds,
            further.waiting,
            {name: self.counts.get(name, 0) + count for name, count in further.counts.items()},
            further.lag_messages,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        values = {
            "applied_lsn": format_lsn(self.applied),
            "changes": self.changes,
            "seconds": self.seconds,
            "rows_per_second": round(self.changes / self.seconds) if self.seconds else 0,
            "tables": dict(self.tables),
            "batch_seconds": self.batch_seconds,
            **self.counts,
        }
        values |= {} if self.lag_messages is None else {"lag_messages": self.lag_messages}
        return values | ({"waiting": self.waiting} if self.waiting else {})


@dataclass(frozen=True)
class SnapshotProgress:
    """The progress of a snapshot.

    :param chunks: number of chunks that the job has to copy.
    :param finished: the chunks that are copied, by table and index.
    :param rows: number of rows written.
    :param seconds: seconds since the job began.
    :param running: the chunks that are being read, at most ``snapshot.parallelism``, and those that wait for their
        commit.
    """

    chunks: int
    finished: frozenset[ChunkIndex] = frozenset()
    rows: int = 0
    seconds: float = 0.0
    running: frozenset[ChunkIndex] = frozenset()

    def plus(self, further: SnapshotProgress) -> SnapshotProgress:
        """Return the progress including a further attempt at the chunks that this one has not finished."""
        return SnapshotProgress(
            self.chunks,
            self.finished | further.finished,
            self.rows + further.rows,
            self.seconds + further.seconds,
            further.running,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as JSON values; ``eta_seconds`` is ``None`` until a chunk is finished."""
        finished = len(self.finished)
        return {
            "chunks": self.chunks,
            "finished": finished,
            "rows": self.rows,
            "seconds": self.seconds,
            "rows_per_second": round(self.rows / self.seconds) if self.seconds else 0,
            "eta_seconds": round(self.seconds / finished * (self.chunks - finished)) if finished else None,
            "finished_chunks": ranges(self.finished),
            "running_chunks": ranges(self.running),
        }
