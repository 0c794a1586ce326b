"""The commit record of a pipeline in Kafka: a compacted topic with one partition.

Each message is a value of the record's contents, see :mod:`.record_contents`. Its key contains the section and the key,
and a message without a value removes that key. A change is written in the same transaction as the data that it commits.
So the committed messages, up to the end of the topic, are the record.

A process keeps the contents and reads only new messages. It reads everything again in two cases: the topic has been
recreated, or the last read was so long ago that the brokers may have removed tombstones.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from airflow_cdc_provider.engine.core.errors import Blocked, GateClosed, TargetConflict
from airflow_cdc_provider.engine.kafka.cluster import REQUEST_SECONDS, Cluster
from airflow_cdc_provider.engine.kafka.consumer import Received, received
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

PREFIX = "airflow_cdc."
"""Prefix of all topics that hold no rows."""

CONFIG = {
    "cleanup.policy": "compact",
    # A segment is compacted once it is closed; a new reader reads everything that is left.
    "segment.bytes": str(16 << 20),
    "segment.ms": str(3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(86_400_000),
}

_MAX_AGE = 3600.0  # seconds; brokers must keep tombstones for longer
_POLL = 0.1

RecordMessages = list[tuple[bytes, bytes | None]]


@dataclass
class _Read:
    """The part of a topic that this process has read."""

    id: str = ""
    offset: int = 0
    at: float = 0.0
    contents: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


_reads: dict[tuple[int, Journal], _Read] = {}
_reads_lock = threading.Lock()


@dataclass(frozen=True)
class Journal:
    """The record's topic.

    :param pipeline: name of the pipeline.
    """

    cluster: Cluster
    pipeline: str

    @property
    def topic(self) -> str:
        """Return the name of the topic."""
        return PREFIX + self.pipeline

    def create(self, replicas: int) -> None:
        """Create the topic if it does not exist."""
        self.cluster.create([self.topic], 1, replicas, CONFIG)
        self.require()

    def require(self) -> None:
        """Refuse a topic with settings that could lose the record; a missing topic is accepted.

        :raises TargetConflict: naming the settings.
        """
        if self.cluster.topic(self.topic) is None:
            return
        settings = CONFIG | self.cluster.topic_settings([self.topic])[self.topic]
        policy, kept = settings["cleanup.policy"], int(settings["delete.retention.ms"])
        if policy != "compact" or kept < _MAX_AGE * 1000:
            raise TargetConflict(
                f"the topic {self.topic} could lose the commit record because of its settings: cleanup.policy {policy},"
                f" delete.retention.ms {kept}",
                f"Run `kafka-configs --alter --entity-type topics --entity-name {self.topic} --add-config"
                f" cleanup.policy={CONFIG['cleanup.policy']},delete.retention.ms={CONFIG['delete.retention.ms']}`; then"
                " start again.",
            )

    def contents(self, patience: float | None = None) -> Contents | None:
        """Return the contents of the record; ``None`` if there is none.

        :param patience: seconds to wait for open transactions; by default, messages after their beginning are ignored.
        :raises Blocked: when they stay open.
        :raises GateClosed: when the committed contents are incomplete.
        """
        topic = self.cluster.topic(self.topic)
        if topic is None:
            return None
        read = self._kept()
        with read.lock:
            if read.id != topic.id or time.monotonic() - read.at > _MAX_AGE:
                read.id, read.offset, read.contents = topic.id, 0, {}
            self._read_on(topic, read, patience)
            read.at = time.monotonic()
            contents = {name: dict(section) for name, section in read.contents.items() if section}
        if contents and not (
            {"epoch", "applied", "advanced"} <= contents.get("head", {}).keys() and "source" in contents
        ):
            raise GateClosed(
                f"the commit record in topic {self.topic} is incomplete: messages are missing",
                "Restore the topic. Without a copy, remove it, and follow the messages of `airflow-cdc provision`.",
            )
        return contents or None

    def others(self) -> Contents | None:
        """Return the contents of another pipeline's record; ``None`` if the topic contains no record."""
        try:
            return self.contents()
        except (ValueError, TypeError):  # messages of another program
            return None

    def _kept(self) -> _Read:
        with _reads_lock:
            return _reads.setdefault((os.getpid(), self), _Read())

    def _read_on(self, topic: Topic, read: _Read, patience: float | None) -> None:
        """Read from the end of the last read to the end of the topic."""
        end = self.cluster.ends(self.topic, [0])[0]
        if read.offset > end:  # brokers have lost messages; removed values may be back
            read.offset, read.contents = 0, {}
        if read.offset >= end:
            return
        first = self.cluster.first(self.topic, [0])[0]
        with self.cluster.borrowed_consumer(topic) as consumer:
            consumer.assign([TopicPartition(self.topic, 0, max(read.offset, first))])
            self._follow(consumer, read, end, patience)

    def _follow(self, consumer: Consumer, read: _Read, end: int, patience: float | None) -> None:
        begun = heard = time.monotonic()
        at_end = False
        while read.offset < end:
            if at_end and patience is None:
                return
            if at_end and patience is not None and time.monotonic() - begun > patience:
                raise Blocked(
                    f"a transaction in topic {self.topic} has been open for {patience:.0f} seconds",
                    "Start again: the new run ends the transaction, or its timeout has expired by then.",
                )
            if not at_end and time.monotonic() - heard > REQUEST_SECONDS:
                raise self.cluster.unreachable(f"no message of topic {self.topic} arrived")
            found, ends = received(consumer, _POLL)
            for message in found:
                _apply(read.contents, message)
                read.offset = message.offset + 1
            # At the end of a partition, the offset includes transaction markers, which are not messages.
            at_end = 0 in ends or (at_end and not found)
            read.offset = max(read.offset, ends.get(0, 0))
            if found or ends:
                heard = time.monotonic()


def written(change: Change, contents: Contents) -> RecordMessages:
    """Return a change as messages: keys and values.

    :param contents: the contents before the change.
    """
    gone = {(name, key) for name in change.emptied for key in contents.get(name, {})}
    gone |= {(name, key) for name, keys in change.removed.items() for key in keys if key in contents.get(name, {})}
    found: dict[tuple[str, str], bytes | None] = dict.fromkeys(sorted(gone))
    for name, section in change.set.items():
        found |= {(name, key): _json(value) for key, value in section.items()}
    return [(_json(place), value) for place, value in found.items()]


def _apply(contents: dict[str, dict[str, Any]], message: Received) -> None:
    place = json.loads(message.key or b"")
    if not isinstance(place, list):
        raise ValueError(f"{message.key!r} is not the key of a record's value")
    name, key = place
    if message.value is None:
        contents.get(name, {}).pop(key, None)
    else:
        contents.setdefault(name, {})[key] = json.loads(message.value)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
