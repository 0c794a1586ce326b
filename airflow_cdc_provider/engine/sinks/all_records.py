"""Merges the commit records of a pipeline with several sinks into one.

Each sink has its own record, and is filled as if it were alone; only the slot is shared. The merged record contains
what all sinks have: the lowest applied LSN, and the chunks that none of them lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record
from airflow_cdc_provider.engine.sinks.contract import CommitRecord

# Epochs are milliseconds. The next attempt asks for an epoch this far ahead of the fastest clock, and twice as far each
# time, until all sinks can take the same one.
_AHEAD = 1000


@dataclass(frozen=True)
class SeveralRecords:
    """The commit records of several sinks as one :class:`.CommitRecord`.

    :param sinks: at least one.
    """

    sinks: Sequence[CommitRecord]

    def identity(self) -> Mapping[str, Any]:
        """Return the identities of all sinks."""
        return {"sinks": [sink.identity() for sink in self.sinks]}

    def record(self) -> Record | None:
        """Return the merged record; ``None`` while a sink has none."""
        records = [sink.record() for sink in self.sinks]
        found = [record for record in records if record is not None]
        return merged(found) if len(found) == len(records) else None

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Take the same epoch in all sinks, and return it."""
        ahead = _AHEAD
        while True:
            taken = [sink.take_epoch(owner, at_least) for sink in self.sinks]
            if len(set(taken)) == 1:
                return taken[0]
            at_least = max(taken) + ahead
            ahead *= 2

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """Keep others from taking the epoch in any sink within the block."""
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.enter_context(sink.fenced(epoch))
            yield

    def end_sessions(self) -> None:
        """End open sessions in all sinks."""
        for sink in self.sinks:
            sink.end_sessions()

    def sweep(self, epoch: int) -> None:
        """Remove everything staged in all sinks."""
        for sink in self.sinks:
            sink.sweep(epoch)

    def drop(self) -> None:
        """Remove the commit records, everything staged and all deposits."""
        for sink in self.sinks:
            sink.drop()


def merged(records: Sequence[Record]) -> Record:
    """Return what all records have in common; a chunk is finished if it is finished in each record that has it."""
    if len(records) == 1:
        return records[0]
    slowest = min(records, key=lambda record: record.applied)
    chunks: dict[tuple[Chunk, frozenset[tuple[str, ...]] | None], ChunkRecord] = {}
    for record in records:
        for chunk in record.chunks:
            same = chunk.chunk, chunk.keys
            chunks[same] = _less_finished(chunks.get(same, chunk), chunk)
    return replace(
        records[0],
        # If they differ, another run is taking over.
        epoch=max(record.epoch for record in records),
        applied=slowest.applied,
        advanced=slowest.advanced,
        # If sinks have planned a table with different chunks, unfinished chunks come last.
        chunks=tuple(sorted(chunks.values(), key=lambda c: (c.chunk.table, c.chunk.index, c.watermark is None))),
    )


def _less_finished(one: ChunkRecord, other: ChunkRecord) -> ChunkRecord:
    if one.watermark is None or other.watermark is None:
        return one if one.watermark is None else other
    return one if one.watermark.high >= other.watermark.high else other
