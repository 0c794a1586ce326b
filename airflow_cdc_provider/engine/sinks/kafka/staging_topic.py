"""The staging topic of a pipeline, which holds rows until they are committed.

Tasks write *blobs*, as messages of limited size, into one of its partitions; the driver finds them by their offsets.
They are removed from the front of a partition once nothing before them is needed anymore. Other messages expire after a
day.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, Message, Producer, TopicPartition

from airflow_cdc_provider.engine.core.errors import StagingLost
from airflow_cdc_provider.engine.kafka.cluster import REQUEST_SECONDS, Cluster
from airflow_cdc_provider.engine.kafka.consumer import received
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX
from airflow_cdc_provider.engine.sinks.kafka.transactions import tuned

CHUNKS, DEPOSITS, NAMES = 0, 1, 2
"""The partitions of chunks and re-reads, of deposits, and of their names."""
UNITS = range(3, 11)
"""The partitions of units."""

SUFFIX = ".staging"
"""Suffix of the topics' names."""

CONFIG = {
    "cleanup.policy": "delete",
    "retention.ms": str(86_400_000),
    "segment.bytes": str(64 << 20),
}

_SLICE_BYTES = 512 << 10
_FLUSH_SECONDS = 120.0


@dataclass(frozen=True)
class Blob:
    """The location of a blob.

    :param offsets: offsets of its messages, in order.
    :param size: bytes of all messages.
    :param sum: CRC-32 of all messages.
    """

    partition: int
    offsets: tuple[int, ...]
    size: int
    sum: int

    def to_dict(self) -> dict[str, Any]:
        """Return the blob as JSON values; :meth:`from_dict` reads them back."""
        return {"partition": self.partition, "offsets": self.offsets, "size": self.size, "sum": self.sum}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Blob:
        """Return the blob from the values of :meth:`to_dict`."""
        return cls(values["partition"], tuple(values["offsets"]), values["size"], values["sum"])


@dataclass
class _Done:
    """Offsets of a partition that are not needed anymore, after some that may be needed."""

    offsets: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


_done: defaultdict[tuple[int, str, int], _Done] = defaultdict(_Done)
_producers: dict[tuple[int, Staging], tuple[str, Producer]] = {}
_making = threading.Lock()


@dataclass(frozen=True)
class Staging:
    """The staging topic of a pipeline."""

    cluster: Cluster
    pipeline: str

    @property
    def topic(self) -> str:
        """Return the name of the topic."""
        return f"{PREFIX}{self.pipeline}{SUFFIX}"

    @property
    def _not_staged(self) -> str:
        return f"cannot stage rows in topic {self.topic}"

    def create(self, replicas: int) -> None:
        """Create the topic if it does not exist."""
        self.cluster.create([self.topic], UNITS.stop, replicas, CONFIG)

    # -- blobs --------------------------------------------------------------------------------------

    def write(self, partition: int, epoch: int, data: bytes | bytearray | memoryview) -> Blob:
        """Write a blob, which is durable when this returns.

        :param epoch: epoch of the run, which identifies leftovers of earlier runs.
        :raises CdcError: when the blob cannot be written.
        """
        producer = self._producer(self._there())
        try:
            return self._write(producer, partition, epoch, memoryview(data))
        except BaseException:
            with _making:  # the producer may be broken
                if _producers.get((os.getpid(), self), ("", None))[1] is producer:
                    del _producers[os.getpid(), self]
            raise

    def _write(self, producer: Producer, partition: int, epoch: int, view: memoryview) -> Blob:
        parts = [view[start : start + _SLICE_BYTES] for start in range(0, len(view), _SLICE_BYTES)] or [view]
        offsets: list[int | None] = [None] * len(parts)
        errors: list[KafkaError] = []
        for n, part in enumerate(parts):

            def delivered(error: KafkaError | None, message: Message, n: int = n) -> None:
                offsets[n] = message.offset()
                if error is not None:
                    errors.append(error)

            self._produce(producer, partition, str(epoch).encode(), bytes(part), delivered)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while any(offset is None for offset in offsets) and not errors and time.monotonic() < deadline:
            producer.poll(0.01)
        if errors:
            raise self.cluster.failure(errors[0], self._not_staged)
        if None in offsets:
            late = KafkaError(KafkaError._MSG_TIMED_OUT)
            raise self.cluster.failure(late, self._not_staged)
        return Blob(partition, tuple(o for o in offsets if o is not None), len(view), zlib.crc32(view))

    def _produce(self, producer: Producer, partition: int, key: bytes, value: bytes, delivered: Any) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                with self.cluster.failing(self._not_staged):
                    producer.produce(self.topic, value, key, partition, on_delivery=delivered)
            except BufferError:
                if time.monotonic() > deadline:
                    raise self.cluster.unreachable("cannot stage rows because the queue stays full") from None
                producer.poll(0.1)
            else:
                return

    def _producer(self, topic: Topic) -> Producer:
        """Return the producer that this process keeps, or a new one if the topic has been recreated."""
        key = (os.getpid(), self)
        with _making:
            if key not in _producers or _producers[key][0] != topic.id:
                conf = self.cluster.conf(enable_idempotence=True)
                with self.cluster.failing("cannot create a producer"):
                    _producers[key] = topic.id, Producer({**tuned(conf), "linger.ms": 0})
            return _producers[key][1]

    def _there(self) -> Topic:
        """Return the topic.

        :raises StagingLost: when it no longer exists.
        """
        topic = self.cluster.topic(self.topic)
        if topic is None:
            raise StagingLost(f"the topic {self.topic} no longer exists", "Start again: the topic is recreated.")
        return topic

    def read(self, blob: Blob) -> bytearray:
        """Return the contents of a blob.

        :raises StagingLost: when they are incomplete.
        """
        topic = self.cluster.topic(self.topic)
        found = self._messages(topic, blob) if topic is not None and self._has(blob) else {}
        data = bytearray().join(found.get(offset, b"") for offset in blob.offsets)
        if len(data) != blob.size or zlib.crc32(data) != blob.sum:
            raise StagingLost(
                f"{blob.size} bytes were staged in topic {self.topic}, but only {len(data)} were found",
                "Start again: the rows are staged again.",
            )
        return data

    def _messages(self, topic: Topic, blob: Blob) -> dict[int, bytes]:
        """Return the messages of a blob that exist, by offset."""
        wanted, found = set(blob.offsets), dict[int, bytes]()
        with self.cluster.borrowed_consumer(topic, committed=False) as consumer:
            consumer.assign([TopicPartition(self.topic, blob.partition, min(wanted))])
            heard = time.monotonic()
            while len(found) < len(wanted):
                messages, ends = received(consumer, 1.0)
                found |= {m.offset: m.value or b"" for m in messages if m.offset in wanted}
                if ends:
                    break
                if messages:
                    heard = time.monotonic()
                elif time.monotonic() - heard > REQUEST_SECONDS:
                    raise self.cluster.unreachable(f"no message of topic {self.topic} arrived")
        return found

    def _has(self, blob: Blob) -> bool:
        """Return whether the partition covers the offsets of a blob."""
        first = self.cluster.first(self.topic, [blob.partition])[blob.partition]
        end = self.cluster.ends(self.topic, [blob.partition])[blob.partition]
        return first <= min(blob.offsets) and max(blob.offsets) < end

    # -- removing -----------------------------------------------------------------------------------

    def release(self, blobs: Iterable[Blob]) -> None:
        """Remove blobs that are not needed anymore; those of a partition once everything before them can be removed."""
        by_partition: defaultdict[int, set[int]] = defaultdict(set)
        for blob in blobs:
            by_partition[blob.partition].update(blob.offsets)
        fronts = {}
        topic = self._there()
        for partition, offsets in by_partition.items():
            done = _done[os.getpid(), topic.id, partition]
            with done.lock:
                first = front = self.cluster.first(self.topic, [partition])[partition]
                done.offsets = {offset for offset in done.offsets | offsets if offset >= first}
                while front in done.offsets:
                    done.offsets.remove(front)
                    front += 1
                if front > first:
                    fronts[partition] = front
        self.cluster.truncate(self.topic, fronts)

    def clear(self, partitions: Sequence[int]) -> None:
        """Remove everything in the given partitions."""
        firsts = self.cluster.first(self.topic, partitions)
        ends = self.cluster.ends(self.topic, partitions)
        self.cluster.truncate(self.topic, {p: end for p, end in ends.items() if end > firsts[p]})

    def clear_before(self, partition: int, epoch: int) -> None:
        """Remove leftovers of earlier runs at the front of a partition."""
        first = self.cluster.first(self.topic, [partition])[partition]
        front = first
        for messages in self.cluster.read(self._there(), {partition: first}, committed=False):
            old = next((n for n, m in enumerate(messages) if int(m.key or 0) >= epoch), len(messages))
            front = messages[old - 1].offset + 1 if old else front
            if old < len(messages):
                break
        if front > first:
            self.cluster.truncate(self.topic, {partition: front})

    # -- deposits -----------------------------------------------------------------------------------

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """Write a blob that can be found by its name."""
        self._name(epoch, name, self.write(DEPOSITS, epoch, data))

    def _name(self, epoch: int, name: str, blob: Blob | None) -> None:
        self.write(NAMES, epoch, json.dumps([epoch, name, None if blob is None else blob.to_dict()]).encode())

    def deposited(self, epoch: int) -> dict[str, Blob]:
        """Return the blobs that a run has deposited, by name."""
        found: dict[str, Blob] = {}
        for messages in self.cluster.read(self._there(), {NAMES: 0}, committed=False):
            for message in messages:
                at, name, blob = json.loads(message.value or b"")
                if at == epoch:
                    found.pop(name, None)
                    if blob is not None:
                        found[name] = Blob.from_dict(blob)
        return found

    def discard(self, epoch: int, names: Iterable[str]) -> None:
        """Remove deposits by name."""
        deposited = self.deposited(epoch)
        gone = [name for name in names if name in deposited]
        for name in gone:
            self._name(epoch, name, None)
        self.release(deposited[name] for name in gone)

    def discard_all(self) -> None:
        """Remove all deposits, of all runs."""
        self.clear([NAMES, DEPOSITS])


def require(data: bytearray, size: int, there: bool) -> bytearray:
    """Return a deposit if it has the expected size.

    :param there: whether a deposit of this name exists.
    :raises StagingLost: when there is none, or it has another size.
    """
    if not there or len(data) != size:
        raise StagingLost(
            f"{size} bytes of the log were deposited in the sink, but {len(data)} were found",
            "Start again: the log is read again from the applied LSN.",
        )
    return data
