"""Writes units of the stream to Kafka: stages them in a separate topic, and copies them in one transaction."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sinks.kafka import events, truncate_events
from airflow_cdc_provider.engine.sinks.kafka.record import KafkaRecord
from airflow_cdc_provider.engine.sinks.kafka.staged_messages import pack, unpack
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import CHUNKS, UNITS, Blob, require
from airflow_cdc_provider.engine.sinks.kafka.target_topics import head_entry, recorded_topic_id
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch, end_all
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import Staged, StagedPiece


@dataclass(frozen=True)
class KafkaUnits(KafkaRecord):
    """The part of a Kafka sink that writes units."""

    def sweep(self, epoch: int) -> None:
        """Remove staged units, and chunks left by earlier runs."""
        if self._is_at(epoch):
            self.staging.clear(UNITS)
            self.staging.clear_before(CHUNKS, epoch)

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Keep a piece of the log in the staging topic."""
        self._contents(epoch)
        self.staging.deposit(epoch, name, data)

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """Return a deposit."""
        self._contents(epoch)
        blob = self.staging.deposited(epoch).get(name)
        return require(bytearray() if blob is None else self.staging.read(blob), size, blob is not None)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """Remove deposits."""
        if self._is_at(epoch):
            if names is None:
                self.staging.discard_all()
            else:
                self.staging.discard(epoch, names)

    def _is_at(self, epoch: int) -> bool:
        contents = self._current()
        return contents is not None and contents["head"]["epoch"] == epoch

    def drop(self) -> None:
        """Remove the record's topic and the staging topic."""
        contents = self._current() or {}
        end_all([self._writer(), *self._writers(contents)])
        self.cluster.remove(self.journal.topic)
        self.cluster.remove(self.staging.topic)

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Stage effects as encoded messages."""
        if not effects:
            return ()
        contents = self._contents(epoch)
        partition = UNITS[zlib.crc32(attempt.encode()) % len(UNITS)]
        staged = []
        for effect in effects:
            target, relation = record_contents.target_of(contents, effect.label), None
            if effect.rows.num_rows:
                topic = self.topics.require(contents, target)
                rows, truncate = (
                    (effect.rows, None) if self.settings.truncates else truncate_events.split_truncates(effect.rows)
                )
                blob = self._put(partition, epoch, target, topic, events.settled(target, rows)) if len(rows) else None
                extent = {"last": pc.max(effect.rows.column("commit_lsn")).as_py(), "truncate": truncate}
                relation = json.dumps({"blob": None if blob is None else blob.to_dict(), **extent})
            columns = tuple(effect.rows.column_names)
            staged.append(Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, columns))
        failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: LogPosition,
        end: LogPosition,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """Commit a unit in one transaction."""
        failpoint("before-batch-commit")
        staged = chain.from_iterable(piece.tables for piece in sorted(pieces, key=lambda piece: piece.index))
        relations = [(each.label, json.loads(each.relation)) for each in staged if each.relation is not None]
        found = [(label, Blob.from_dict(relation["blob"])) for label, relation in relations if relation["blob"]]
        truncates = {label: relation["truncate"] for label, relation in relations if relation["truncate"]}
        lasts: dict[str, LogPosition] = {}
        for label, relation in relations:
            lasts[label] = max(lasts.get(label, 0), relation["last"])
        targets: dict[str, Target] = {}

        def decide(contents: Contents) -> Commit | None:
            if not self._is_next(contents, start, end, pieces):
                return None
            targets.update({label: record_contents.target_of(contents, label) for label in lasts})
            topics = {
                label: head_entry(self.topics.name(targets[label]), last, recorded_topic_id(contents, targets[label]))
                for label, last in lasts.items()
            }
            change = record_contents.unit_applied(contents, end, time.time(), noted) + Change({"topics": topics})
            for label, (lsn, seq) in truncates.items():
                change += truncate_events.truncate_change(label, topics[label]["id"], lsn, seq)
            return Commit(change)

        def data() -> Iterator[Batch]:
            for label, blob in found:
                yield from self._batches(self.topics.name(targets[label]), [blob])
            failpoint("in-batch-commit")

        title = f"unit ({format_lsn(start)}, {format_lsn(end)}]"
        applied = self._commit(epoch, title, decide, data) is not None
        failpoint("after-batch-commit")
        self.staging.release(blob for _, blob in found)
        return applied

    def _put(self, partition: int, epoch: int, target: Target, topic: Topic, rows: pa.Table) -> Blob:
        """Stage events as the messages to be written.

        :param partition: partition of the staging topic.
        """
        messages = self.topics.format.encode(target, topic.name, rows)
        return self.staging.write(partition, epoch, pack(messages, topic.partitions))

    def _batches(self, topic: str, blobs: Iterable[Blob]) -> Iterator[Batch]:
        for blob in blobs:
            yield from unpack(topic, self.staging.read(blob))
