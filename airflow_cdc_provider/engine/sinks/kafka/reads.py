"""Chunks and re-reads in Kafka: staged by tasks, and committed by one transaction."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.kafka import events, truncate_events
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import CHUNKS, Blob
from airflow_cdc_provider.engine.sinks.kafka.target_topics import id_told, last_told, telling
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch
from airflow_cdc_provider.engine.sinks.kafka.units import KafkaUnits
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import only
from airflow_cdc_provider.engine.sinks.record_log.read_position import Room, room_at
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk


@dataclass(frozen=True)
class KafkaReads(KafkaUnits):
    """See :class:`.contract.Sink`: chunks and re-reads."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written | None:
        """See :meth:`.contract.Sink.write_chunk`."""
        contents = self._contents(epoch)
        if not self._is_open(contents, chunk, origin):
            return None
        failpoint("before-chunk-staged")
        found = self._stage_rows(epoch, contents, target, None if chunk.whole else (), batches, finish)
        failpoint("after-chunk-staged")
        return found

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """See :meth:`.contract.Sink.commit_chunks`; all in one transaction."""
        chosen: list[CopiedChunk] = []

        def decide(contents: Contents) -> Commit | None:
            chosen.clear()
            change = Change()
            for each in copied:
                if self._is_open(contents, each.chunk, each.origin) and each.chunk not in [c.chunk for c in chosen]:
                    self._require_room(contents, each.target, each.written)
                    found: Written = each.written
                    change += record_contents.chunk_committed(each.chunk, found.watermark, found.rows, epoch)
                    change += self._read_change(contents, each.target, found)
                    chosen.append(each)
            return Commit(change) if chosen else None

        def data() -> Iterator[Batch]:
            for each in chosen:
                yield from self._batches(self.topics.name(each.target), each.written.blobs)
            failpoint("before-chunk-commit")

        failpoint("before-chunk-prepared")
        title = ", ".join(each.chunk.title for each in copied)
        committed = chosen if self._commit(epoch, f"chunks {title}", decide, data) is not None else []
        failpoint("after-chunk-commit")
        self.staging.release(chain.from_iterable(each.written.blobs for each in copied))
        return [each.written.rows if any(each is c for c in committed) else None for each in copied]

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""
        contents = self._contents(epoch)
        if before is None:
            self._check([target], record_contents.targets_of(contents))
        else:
            self.topics.format.require(target)
        if keys is not None:
            batches = (only(target, keys, batch) for batch in batches)
        found = self._stage_rows(epoch, contents, target, keys, batches, finish)
        if found.topic.id != id_told(contents, target):
            # A producer takes a topic that was made anew for one of which it knows more than the brokers do.
            self._writer(self.part).leave()

        def decide(contents: Contents) -> Commit | None:
            if contents.get("reads", {}).get(target.table.label, {}).get("id") == found.id:
                return None  # a try has committed them whose end was not known
            self._require_room(contents, target, found)
            read = record_contents.reread(contents, target, keys, found.watermark, found.rows)
            return Commit(read + self._read_change(contents, target, found))

        def data() -> Iterator[Batch]:
            yield from self._batches(self.topics.name(target), found.blobs)
            failpoint("before-reread-commit")

        self._commit(epoch, f"{target.table.label} read again", decide, data)
        failpoint("after-reread-commit")
        self.staging.release(found.blobs)
        return found.rows

    def _stage_rows(
        self,
        epoch: int,
        contents: Contents,
        target: Target,
        keys: Collection[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> Written:
        """Stage rows that were read from the source, and before them what they replace.

        :param keys: of the rows that they replace, ``None`` for all.
        """
        if keys is None:
            self._create([target])
        topic = self.topics.require({} if keys is None else contents, target)
        lsn = parse_lsn(contents["head"]["applied"])
        replacing = keys is None or bool(keys)
        room = _room(contents, target, lsn, replacing)
        now = int(time.time() * 1_000_000)
        blobs, rows = [], 0
        emptied = room.marker if keys is None and not self.settings.truncates else None
        if room.marker is not None and keys is None and emptied is None:
            blobs.append(self._put(CHUNKS, epoch, target, topic, events.truncate(target, lsn, room.marker, now)))
        elif room.marker is not None and keys:
            gone = events.deletes(target, sorted(keys), lsn, room.marker, now)
            blobs.append(self._put(CHUNKS, epoch, target, topic, gone))
        for batch in batches:
            if batch.num_rows:
                read = events.read_rows(target, batch, lsn, room.seq, now)
                blobs.append(self._put(CHUNKS, epoch, target, topic, read))
                rows += batch.num_rows
        return Written(uuid.uuid4().hex, topic, tuple(blobs), room, replacing, rows, finish(), emptied)

    def _read_change(self, contents: Contents, target: Target, found: Written) -> Change:
        """What the record says of rows that were read."""
        label, room = target.table.label, found.room
        read = {"lsn": format_lsn(room.lsn), "seq": room.seq, "id": found.id}
        last = room.lsn if found.blobs else last_told(contents, target)
        change = Change({"reads": {label: read}, "topics": {label: telling(found.topic.name, last, found.topic.id)}})
        return (
            change
            if found.emptied is None
            else change + truncate_events.note(label, found.topic.id, room.lsn, found.emptied)
        )

    def _require_room(self, contents: Contents, target: Target, found: Written) -> None:
        """Refuse rows that do not come behind all that is in the topic by now.

        :raises StagingLost: when the stream has gone on, or the table was read again, since they were staged.
        """
        applied = parse_lsn(contents["head"]["applied"])
        room = _room(contents, target, applied, found.replacing)
        if applied != found.room.lsn or room.seq > found.room.seq:
            raise StagingLost(
                f"rows of {target.table.label} were staged for {format_lsn(found.room.lsn)}, but the topic has gone on"
                f" to {format_lsn(applied)}",
                "Start again: the rows are read anew.",
            )


@dataclass(frozen=True)
class Written:
    """Rows that have been read from the source and staged, and not been committed yet.

    :param id: by which the record tells that they are in it.
    :param topic: for which they are.
    :param room: where they stand in the changelog.
    :param replacing: they replace what the topic amounts to, if it amounts to anything.
    :param emptied: the number of a truncate before them that is not a message.
    """

    id: str
    topic: Topic
    blobs: tuple[Blob, ...]
    room: Room
    replacing: bool
    rows: int
    watermark: Watermark
    emptied: int | None = None


def _room(contents: Contents, target: Target, lsn: LogPosition, replacing: bool) -> Room:
    """Where rows that are read now stand.

    :param lsn: the applied LSN.
    :param replacing: they replace what the topic amounts to.
    """
    read = contents.get("reads", {}).get(target.table.label)
    last = int(read["seq"]) if read is not None and parse_lsn(read["lsn"]) == lsn else None
    return room_at(lsn, last, replacing and last_told(contents, target) is not None)
