"""The commit records of a pipeline with several sinks, seen as one.

Each sink has a record of its own, and is filled as if it were alone; only the slot is shared. What the pipeline as a
whole has done is what all of them have: the lowest applied LSN, and the chunks that none of them lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record
from airflow_cdc_provider.engine.sinks.contract import CommitRecord

# Epochs are milliseconds: the clocks of all sinks agree on one that lies this far ahead of the fastest; further each
# time, until taking it in all of them is quicker.
_AHEAD = 1000


@dataclass(frozen=True)
class SeveralRecords:
    """See :class:`.CommitRecord`.

    :param sinks: at least one.
    """

    sinks: Sequence[CommitRecord]

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.CommitRecord.identity`."""
        return {"sinks": [sink.identity() for sink in self.sinks]}

    def record(self) -> Record | None:
        """The records as one; ``None`` as long as a sink has none."""
        records = [sink.record() for sink in self.sinks]
        found = [record for record in records if record is not None]
        return merged(found) if len(found) == len(records) else None

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.CommitRecord.take_epoch`: the same number in all of them."""
        ahead = _AHEAD
        while True:
            taken = [sink.take_epoch(owner, at_least) for sink in self.sinks]
            if len(set(taken)) == 1:
                return taken[0]
            at_least = max(taken) + ahead
            ahead *= 2

    @contextmanager
    def fenced(self, epoch: int) -> Iterator[None]:
        """See :meth:`.CommitRecord.fenced`."""
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.enter_context(sink.fenced(epoch))
            yield

    def end_sessions(self) -> None:
        """See :meth:`.CommitRecord.end_sessions`."""
        for sink in self.sinks:
            sink.end_sessions()

    def sweep(self, epoch: int) -> None:
        """See :meth:`.CommitRecord.sweep`."""
        for sink in self.sinks:
            sink.sweep(epoch)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.CommitRecord.discard`."""
        for sink in self.sinks:
            sink.discard(epoch, names)

    def drop(self) -> None:
        """See :meth:`.CommitRecord.drop`."""
        for sink in self.sinks:
            sink.drop()


def merged(records: Sequence[Record]) -> Record:
    """What all of some records say: a chunk is finished if it is in each of them that has it."""
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
        # If they differ, somebody is taking over.
        epoch=max(record.epoch for record in records),
        applied=slowest.applied,
        advanced=slowest.advanced,
        # Of chunks that were planned with other bounds for another sink, an unfinished one stands last.
        chunks=tuple(sorted(chunks.values(), key=lambda c: (c.chunk.table, c.chunk.index, c.watermark is None))),
    )


def _less_finished(one: ChunkRecord, other: ChunkRecord) -> ChunkRecord:
    if one.watermark is None or other.watermark is None:
        return one if one.watermark is None else other
    return one if one.watermark.high >= other.watermark.high else other
