"""Events for Kafka topics: a producer that writes them in transactions, and the windows that are expected of them.

The expected windows are computed from the topic by a plain consumer of committed messages and by plain Python,
independently of the engine and of Spark.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_cdc_provider.engine.core.errors import CdcError

SECONDS = 60.0

TRANSACTIONS_PER_SECOND = 4
ABORTED = 10  # one in so many transactions is aborted
UNORDERED = timedelta(milliseconds=500)  # by how much an event may arrive after a later one


class Message(NamedTuple):
    """A message for a topic."""

    key: str | None
    value: bytes


class Event(NamedTuple):
    """An event that is summed up in a window."""

    key: str
    at: datetime
    value: int


_EPOCH = datetime.fromtimestamp(0, UTC)

Draw: TypeAlias = Callable[[Random, datetime], Message]
Rows: TypeAlias = Counter[tuple[str, datetime, int]]
"""Windows, each with key, start and sum; each should exist once."""


class ProducerFailed(CdcError):
    """The producer failed."""


class EventProducer:
    """Writes events at a steady rate in transactions, some of which it aborts, in its own thread.

    Use it as a context manager, or ``start`` and ``stop``.

    :param draw: draws a message for a given time.
    :param rate: messages per second.
    :ivar messages: messages written so far, including those of aborted transactions.
    :ivar transactions: transactions that have ended.
    :ivar aborted: transactions that were aborted.
    """

    def __init__(self, brokers: str, topic: str, draw: Draw, rate: int, seed: int = 1) -> None:
        self.messages = self.transactions = self.aborted = 0
        self._topic = topic
        self._draw = draw
        self._size = rate // TRANSACTIONS_PER_SECOND
        self._random = Random(seed)
        self._producer = Producer({**_client(brokers), "transactional.id": f"{topic}-producer", "linger.ms": 5})
        self._halt = threading.Event()
        self._failure: KafkaException | None = None
        self._thread = threading.Thread(target=self._run, name="event producer", daemon=True)

    @property
    def account(self) -> str:
        """Return a summary of what the producer has written so far."""
        return (
            f"{self.messages:,} messages in {self.transactions:,} transactions, of which {self.aborted:,} were aborted"
        )

    def start(self) -> None:
        """Start writing in the background."""
        self._producer.init_transactions(SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current transaction.

        :raises ProducerFailed: if the producer failed before.
        """
        self._halt.set()
        self._thread.join()
        if self._failure is not None:
            raise ProducerFailed(
                f"The producer of topic {self._topic} failed after {self.messages} messages: {self._failure}.",
                "Check the log of the broker.",
            ) from self._failure

    def send(self, *messages: Message, commit: bool = True) -> None:
        """Write messages in one transaction."""
        self._producer.begin_transaction()
        for key, value in messages:
            self._producer.produce(self._topic, value, key)
            self._producer.poll(0)
        if commit:
            self._producer.commit_transaction()
        else:
            self._producer.flush(SECONDS)  # messages that have not reached the broker would not exercise the abort
            self._producer.abort_transaction()
            self.aborted += 1
        self.transactions += 1
        self.messages += len(messages)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._halt.wait(max(0.0, due - time.monotonic())):
                due = max(due, time.monotonic() - 1) + 1 / TRANSACTIONS_PER_SECOND
                commit = self.transactions % ABORTED != ABORTED - 1
                self.send(*(self._message() for _ in range(self._size)), commit=commit)
        except KafkaException as e:
            self._failure = e

    def _message(self) -> Message:
        return self._draw(self._random, datetime.now(UTC) - self._random.random() * UNORDERED)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failure here must not hide the error that ends the block.
        with suppress(*(() if kind is None else (ProducerFailed,))):
            self.stop()


def written(at: datetime) -> str:
    """Return a time in the format of events."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def windows(events: Iterable[Event], width: timedelta, until: datetime | None = None) -> Rows:
    """Return the tumbling windows that events should yield.

    :param until: leave out windows that end after this time.
    """
    sums: Counter[tuple[str, datetime]] = Counter()
    for event in events:
        sums[event.key, event.at - (event.at - _EPOCH) % width] += event.value
    return Counter((key, start, total) for (key, start), total in sums.items() if not until or start + width <= until)


def make_topics(brokers: str, topics: Mapping[str, int]) -> None:
    """Create topics with the given numbers of partitions."""
    client = AdminClient(_client(brokers))  # keep it alive until the topics exist
    for made in client.create_topics([NewTopic(name, partitions, 1) for name, partitions in topics.items()]).values():
        made.result(SECONDS)


def ends(brokers: str, topic: str) -> dict[str, int]:
    """Return the offsets after the last messages of a topic's partitions, including those of open transactions.

    A consumer of committed messages reaches them only after their transactions have ended on the broker, which is a
    moment after the producer gets its answer.
    """
    with closing(_consumer(brokers, "read_uncommitted")) as consumer:
        places = _partitions(consumer, topic)
        return {str(each.partition): consumer.get_watermark_offsets(each, SECONDS)[1] for each in places}


def read_committed(brokers: str, topic: str) -> Iterator[bytes]:
    """Yield the values of all messages of a topic, except those of aborted transactions."""
    with closing(_consumer(brokers, "read_committed")) as consumer:
        places = _partitions(consumer, topic)
        consumer.assign(places)
        left = len(places)
        while left:
            message = consumer.poll(SECONDS)
            if message is None:
                raise ProducerFailed(f"The end of topic {topic} was not reached.", "Check the log of the broker.")
            error = message.error()
            if error is None:
                yield message.value() or b""
            elif error.code() == KafkaError._PARTITION_EOF:
                left -= 1
            else:
                raise KafkaException(error)


def parsed(value: bytes) -> dict[str, Any]:
    """Return the JSON object in a message, or an empty one if it holds something else."""
    with suppress(ValueError):
        found = json.loads(value)
        if isinstance(found, dict):
            return found
    return {}


def _partitions(consumer: Consumer, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, n, 0) for n in consumer.list_topics(topic, SECONDS).topics[topic].partitions]


def _consumer(brokers: str, isolation: str) -> Consumer:
    ours = {"group.id": "demo", "isolation.level": isolation, "enable.partition.eof": True, "enable.auto.commit": False}
    return Consumer({**_client(brokers), **ours})


def _client(brokers: str) -> dict[str, Any]:
    return {"bootstrap.servers": brokers, "log_level": 0}
