"""The commit record of a pipeline in Kafka: a compacted topic with one partition.

Each message is a value of the record's contents, see :mod:`.record_contents`: its key names section and key, and a
message without a value removes it. A change is written in the transaction that writes what it commits; so whoever reads
what is committed, up to the end, has the record.

A process keeps what it has read, and reads on from there. It reads everything again when the topic is another one by
now, and when it has not looked for so long that the brokers may have forgotten what was removed.
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
"""Of all topics that hold no rows."""

CONFIG = {
    "cleanup.policy": "compact",
    # A segment is compacted once it is closed; who begins reads all that is left.
    "segment.bytes": str(16 << 20),
    "segment.ms": str(3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(86_400_000),
}

_MAX_AGE = 3600.0  # seconds; brokers must keep for longer that something was removed
_POLL = 0.1

Written = list[tuple[bytes, bytes | None]]


@dataclass
class _Read:
    """What this process has read of a topic."""

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
        """Its name."""
        return PREFIX + self.pipeline

    def create(self, replicas: int) -> None:
        """Make the topic, if it is not there."""
        self.cluster.create([self.topic], 1, replicas, CONFIG)
        self.require()

    def require(self) -> None:
        """Refuse a topic that does not keep the record; one that is not there is none.

        :raises TargetConflict: saying what it is set to.
        """
        if self.cluster.topic(self.topic) is None:
            return
        told = CONFIG | self.cluster.topic_settings([self.topic])[self.topic]
        policy, kept = told["cleanup.policy"], int(told["delete.retention.ms"])
        if policy != "compact" or kept < _MAX_AGE * 1000:
            raise TargetConflict(
                f"the topic {self.topic} has cleanup.policy {policy} and delete.retention.ms {kept}: it would"
                " forget what the commit record holds",
                f"Set both by `kafka-configs --alter --entity-type topics --entity-name {self.topic} --add-config"
                f" cleanup.policy={CONFIG['cleanup.policy']},delete.retention.ms={CONFIG['delete.retention.ms']}`; then"
                " start again.",
            )

    def contents(self, patience: float | None = None) -> Contents | None:
        """What the record holds; ``None`` when there is none.

        :param patience: seconds to wait for transactions that are open; by default what was committed before them is
            told.
        :raises Blocked: when they stay open.
        :raises GateClosed: when what was committed is not whole.
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
                f"the commit record in topic {self.topic} is not whole: messages are missing",
                "Restore the topic. Without a copy, remove it, and follow the messages of `airflow-cdc provision`.",
            )
        return contents or None

    def others(self) -> Contents | None:
        """What the record holds, of another pipeline; ``None`` when the topic holds no record."""
        try:
            return self.contents()
        except (ValueError, TypeError):  # somebody else's messages
            return None

    def _kept(self) -> _Read:
        with _reads_lock:
            return _reads.setdefault((os.getpid(), self), _Read())

    def _read_on(self, topic: Topic, read: _Read, patience: float | None) -> None:
        """Read from where the last reading has ended up to the end of the topic."""
        end = self.cluster.ends(self.topic, [0])[0]
        if read.offset > end:  # brokers have lost messages: what they had removed may be there again
            read.offset, read.contents = 0, {}
        if read.offset >= end:
            return
        first = self.cluster.first(self.topic, [0])[0]
        with self.cluster.lent(topic) as consumer:
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
                    "Start again: whoever has left it is overtaken then, or its timeout has come.",
                )
            if not at_end and time.monotonic() - heard > REQUEST_SECONDS:
                raise self.cluster.unreachable(f"nothing came of topic {self.topic}")
            found, ends = received(consumer, _POLL)
            for message in found:
                _apply(read.contents, message)
                read.offset = message.offset + 1
            # The end of a partition tells the offset behind the marks of transactions, which are no messages.
            at_end = 0 in ends or (at_end and not found)
            read.offset = max(read.offset, ends.get(0, 0))
            if found or ends:
                heard = time.monotonic()


def written(change: Change, contents: Contents) -> Written:
    """A change as messages: keys and values.

    :param contents: before.
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
        raise ValueError(f"{message.key!r} names no value of a record")
    name, key = place
    if message.value is None:
        contents.get(name, {}).pop(key, None)
    else:
        contents.setdefault(name, {})[key] = json.loads(message.value)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
