"""Writes chunks and re-reads to Kafka: tasks stage them, and one transaction commits them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.kafka import events, truncate_events
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import CHUNKS, Blob
from airflow_cdc_provider.engine.sinks.kafka.target_topics import head_entry, last_recorded_lsn, recorded_topic_id
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch
from airflow_cdc_provider.engine.sinks.kafka.units import KafkaUnits
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.append_only import only
from airflow_cdc_provider.engine.sinks.record_log.read_position import ReadPosition, read_position
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk


@dataclass(frozen=True)
class KafkaReads(KafkaUnits):
    """The part of a Kafka sink that writes rows read from the source."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: ServerIdentity,
        rows: SourceRows,
    ) -> StagedRead | None:
        """Stage the rows of a chunk."""
        contents = self._contents(epoch)
        if not self._is_open(contents, chunk, origin):
            return None
        failpoint("before-chunk-staged")
        found = self._stage_rows(epoch, contents, target, None if chunk.whole else (), rows)
        failpoint("after-chunk-staged")
        return found

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """Commit chunks that have been staged, all in one transaction."""
        chosen: list[CopiedChunk] = []

        def decide(contents: Contents) -> Commit | None:
            chosen.clear()
            change = Change()
            for each in copied:
                if self._is_open(contents, each.chunk, each.origin) and each.chunk not in [c.chunk for c in chosen]:
                    self._require_position(contents, each.target, each.written)
                    found: StagedRead = each.written
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
        rows: SourceRows,
        before: Target | None,
    ) -> int:
        """Commit a re-read."""
        contents = self._contents(epoch)
        if before is None:
            self._check([target], record_contents.targets_of(contents))
        else:
            self.topics.format.require(target)
        if keys is not None:
            rows = rows.changed(partial(only, target, keys))
        found = self._stage_rows(epoch, contents, target, keys, rows)
        if found.topic.id != recorded_topic_id(contents, target):
            # The producer would treat a recreated topic as the old one, and trust its own metadata over the brokers'.
            self._writer(self.part).leave()

        def decide(contents: Contents) -> Commit | None:
            if contents.get("reads", {}).get(target.table.label, {}).get("id") == found.id:
                return None  # an earlier attempt with unknown outcome has committed them
            self._require_position(contents, target, found)
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
        rows: SourceRows,
    ) -> StagedRead:
        """Stage rows read from the source, preceded by events for the rows that they replace.

        :param keys: keys of the replaced rows; ``None`` for all rows.
        """
        if keys is None:
            self._create([target])
        topic = self.topics.require({} if keys is None else contents, target)
        lsn = parse_lsn(contents["head"]["applied"])
        replacing = keys is None or bool(keys)
        position = _read_position(contents, target, lsn, replacing)
        now = int(time.time() * 1_000_000)
        blobs, count = [], 0
        emptied = position.marker if keys is None and not self.settings.truncates else None
        if position.marker is not None and keys is None and emptied is None:
            blobs.append(self._put(CHUNKS, epoch, target, topic, events.truncate(target, lsn, position.marker, now)))
        elif position.marker is not None and keys:
            gone = events.deletes(target, sorted(keys), lsn, position.marker, now)
            blobs.append(self._put(CHUNKS, epoch, target, topic, gone))
        for batch in rows.batches():
            if batch.num_rows:
                read = events.read_rows(target, batch, lsn, position.seq, now)
                blobs.append(self._put(CHUNKS, epoch, target, topic, read))
                count += batch.num_rows
        return StagedRead(uuid.uuid4().hex, topic, tuple(blobs), position, replacing, count, rows.finish(), emptied)

    def _read_change(self, contents: Contents, target: Target, found: StagedRead) -> Change:
        """Return the change that records the read of rows."""
        label, position = target.table.label, found.position
        read = {"lsn": format_lsn(position.lsn), "seq": position.seq, "id": found.id}
        last = position.lsn if found.blobs else last_recorded_lsn(contents, target)
        change = Change({"reads": {label: read}, "topics": {label: head_entry(found.topic.name, last, found.topic.id)}})
        return (
            change
            if found.emptied is None
            else change + truncate_events.truncate_change(label, found.topic.id, position.lsn, found.emptied)
        )

    def _require_position(self, contents: Contents, target: Target, found: StagedRead) -> None:
        """Refuse rows that would not come after everything in the topic.

        :raises StagingLost: when the stream has advanced, or the table was read again, since the rows were staged.
        """
        applied = parse_lsn(contents["head"]["applied"])
        position = _read_position(contents, target, applied, found.replacing)
        if applied != found.position.lsn or position.seq > found.position.seq:
            raise StagingLost(
                f"rows of {target.table.label} were staged for {format_lsn(found.position.lsn)}, but the topic has"
                f" advanced to {format_lsn(applied)}",
                "Start again: the rows are read again.",
            )


@dataclass(frozen=True)
class StagedRead:
    """Rows that have been read from the source and staged, but not yet committed.

    :param id: the id by which the record identifies the read.
    :param topic: the topic of the rows.
    :param position: their position in the changelog.
    :param replacing: they replace the current rows of the topic, if there are any.
    :param emptied: the number of a preceding truncate that is not written as a message.
    """

    id: str
    topic: Topic
    blobs: tuple[Blob, ...]
    position: ReadPosition
    replacing: bool
    rows: int
    watermark: Watermark
    emptied: int | None = None


def _read_position(contents: Contents, target: Target, lsn: LogPosition, replacing: bool) -> ReadPosition:
    """Return the position for rows that are read now.

    :param lsn: the applied LSN.
    :param replacing: the rows replace the current rows of the topic.
    """
    read = contents.get("reads", {}).get(target.table.label)
    last = int(read["seq"]) if read is not None and parse_lsn(read["lsn"]) == lsn else None
    return read_position(lsn, last, replacing and last_recorded_lsn(contents, target) is not None)
