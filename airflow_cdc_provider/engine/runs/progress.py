"""How far a stream or a snapshot is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.chunk_ranges import Place, ranges
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn


@dataclass(frozen=True)
class StreamProgress:
    """How far the stream is.

    :param applied: LSN durable in the sink.
    :param changes: row changes committed by this job.
    :param seconds: time spent in batches that held changes.
    :param tables: the changes by table, of the tables that are captured.
    :param batch_seconds: time spent in the last batch that held changes, ``None`` before there was one.
    :param waiting: what other transactions hold up: see :attr:`.Units.waiting`, or the look at the catalog.
    :param counts: what else has been counted, by name.
    :param lag_messages: how many messages of topics have not been read; ``None`` where there are no topics.
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
        """The progress after a further attempt, which begins where this one ended."""
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
        """The progress as JSON values."""
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
    """How far a snapshot is.

    :param chunks: how many the job has to copy.
    :param finished: those that are copied, by table and index.
    :param rows: rows written.
    :param seconds: since the job began.
    :param running: the chunks that are being read, as many as ``snapshot.parallelism`` at most, and those that wait
        for their commit.
    """

    chunks: int
    finished: frozenset[Place] = frozenset()
    rows: int = 0
    seconds: float = 0.0
    running: frozenset[Place] = frozenset()

    def plus(self, further: SnapshotProgress) -> SnapshotProgress:
        """The progress after a further attempt at what this one has left unfinished."""
        return SnapshotProgress(
            self.chunks,
            self.finished | further.finished,
            self.rows + further.rows,
            self.seconds + further.seconds,
            further.running,
        )

    def as_dict(self) -> dict[str, Any]:
        """The progress as JSON values; ``eta_seconds`` is ``None`` before a chunk is finished."""
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
