"""Transactions: messages of all topics, and the change of the record that commits them, at once.

There is one ``transactional.id`` for each part of a run that writes at the same time as others, stable from run to
run: who takes it ends the transaction that is open under it, and whoever had it before can commit nothing any more.
So it has to be taken before the record is read by which one decides what to commit.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from airflow_cdc_provider.engine.core.errors import LimitExceeded, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.kafka.cluster import Cluster, named
from airflow_cdc_provider.engine.sinks.kafka.record_topic import Journal, Written

_QUEUE_MESSAGES, _QUEUE_KIB = 200_000, 64 << 10
_LINGER_MS = 5
_POLL = 0.1
_END_SECONDS, _ABORT_SECONDS = 120.0, 10.0
_AT_ONCE = 16

_OVERTAKEN = (
    KafkaError._FATAL,
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.UNKNOWN_PRODUCER_ID,
)
_PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


@dataclass(frozen=True)
class Batch:
    """Messages for one partition.

    :param keys: of type ``large_binary``.
    :param values: likewise; null for a tombstone.
    """

    topic: str
    partition: int
    keys: pa.Array
    values: pa.Array


class Overtaken(Exception):
    """Somebody else has the ``transactional.id``, or the brokers have ended the transaction; nothing was committed.

    :ivar seconds: for which the transaction had been open.
    """

    def __init__(self, said: str, seconds: float) -> None:
        super().__init__(said)
        self.seconds = seconds


class Unsure(Exception):
    """Whether the transaction was committed is not known; taking the ``transactional.id`` again settles it."""


@dataclass(frozen=True)
class Writer:
    """Who writes in transactions.

    :param id: the ``transactional.id``.
    :param timeout: seconds after which the brokers end a transaction.
    """

    cluster: Cluster
    id: str
    timeout: float

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads of this process from it."""
        with _locks[self]:
            yield

    def take(self) -> None:
        """Have the ``transactional.id``, unless this process has it as far as it knows.

        :raises ConfigError: when the brokers do not take the timeout.
        """
        if (os.getpid(), self) not in _clients:
            _clients[os.getpid(), self] = self._client()

    def end(self) -> None:
        """End what is open under the ``transactional.id``, whoever has begun it: he can commit nothing any more.

        The id is taken anew even if this process has it as far as it knows: somebody may have taken it since.
        """
        with self.alone():
            client = self._client()
            if (os.getpid(), self) in _clients:
                _clients[os.getpid(), self] = client

    def leave(self) -> None:
        """Take the ``transactional.id`` anew before the next transaction."""
        _clients.pop((os.getpid(), self), None)

    def commit(self, journal: Journal, what: str, change: Written, data: Iterable[Batch]) -> None:
        """Write messages and the change of the record, in one transaction.

        The change is written last: until then nobody who reads the record is held up.

        :param what: stands as a header in the record's messages, for people.
        :raises Overtaken: when somebody else has the ``transactional.id`` by now.
        :raises Unsure: when the brokers did not say in time how it has ended.
        :raises CdcError: when the transaction was ended, as it cannot be committed.
        """
        client, topics = _clients[os.getpid(), self], set[str]()
        producer = client.producer
        begun, ending = time.monotonic(), False
        try:
            producer.begin_transaction()
            for batch in data:
                topics.add(batch.topic)
                produce(producer, batch, self.cluster)
            self._flush(client)
            failpoint("in-transaction")
            topics.add(journal.topic)
            for key, value in change:
                producer.produce(journal.topic, value, key, 0, headers=[("what", what.encode())])
            failpoint("before-transaction-end")
            ending = True
            producer.commit_transaction(_END_SECONDS)
        except KafkaException as e:
            self.leave()
            error = _reason(producer, e.args[0])
            if error.code() in _OVERTAKEN or error.fatal():
                raise Overtaken(error.str(), time.monotonic() - begun) from e
            if ending and not error.txn_requires_abort():
                raise Unsure(error.str()) from e
            _abort(producer)
            first = client.failures[0] if client.failures else error
            what = f"a transaction under {self.id}, with {named(topics)}, cannot be committed"
            raise self.cluster.failure(first, what) from e
        except SystemError as e:  # what the client makes of an error that it had met before
            self.leave()
            raise Overtaken(str(e), time.monotonic() - begun) from e
        except BaseException:
            self.leave()
            _abort(producer)
            raise
        failpoint("after-transaction")

    def _flush(self, client: _Client) -> None:
        """Wait for what has been produced; an error of it comes when the transaction ends."""
        deadline = time.monotonic() + self.timeout
        while client.producer.flush(_POLL) and not client.failures and time.monotonic() < deadline:
            continue

    def too_long(self, seconds: float) -> LimitExceeded:
        """What is raised when the brokers end transactions before they are complete."""
        return LimitExceeded(
            f"a transaction under {self.id} was ended by the brokers after {seconds:.0f} seconds",
            f"Nothing of it was applied. Raise sink.transaction_timeout, which is {self.timeout:g} seconds, and"
            " transaction.max.timeout.ms of the brokers.",
        )

    def _client(self) -> _Client:
        failures: list[KafkaError] = []

        def failed(error: KafkaError | None, message: Message) -> None:
            # Messages of a transaction that fails are purged, which does not say why it fails.
            if error is not None and error.code() not in _PURGED:
                failures.append(error)

        conf = self.cluster.conf(transactional_id=self.id, transaction_timeout_ms=int(self.timeout * 1000))
        conf |= {"message.timeout.ms": int(self.timeout * 1000), "delivery.report.only.error": True}
        with self.cluster.failing(f"transactions under {self.id} cannot be begun"):
            producer = Producer({**tuned(conf), "on_delivery": failed})
            producer.init_transactions(_END_SECONDS)
        return _Client(producer, failures)


@dataclass(frozen=True)
class _Client:
    """A producer that has its ``transactional.id``, and the errors of messages that it could not deliver."""

    producer: Producer
    failures: list[KafkaError]


def _reason(producer: Producer, error: KafkaError) -> KafkaError:
    """Why a transaction has failed: of one that can only be aborted the client takes no message, and does not say why.

    It says so to who wants to commit the transaction, which it does not do in this state.
    """
    if error.code() == KafkaError._STATE:
        try:
            producer.commit_transaction(_ABORT_SECONDS)
        except KafkaException as e:
            return e.args[0]  # type: ignore[no-any-return]
    return error


def _abort(producer: Producer) -> None:
    """End a transaction that fails, so that its messages hold up no reader; whoever comes next would end it, too."""
    with suppress(KafkaException):
        producer.abort_transaction(_ABORT_SECONDS)


_clients: dict[tuple[int, Writer], _Client] = {}
_locks: defaultdict[Writer, threading.RLock] = defaultdict(threading.RLock)


def end_all(writers: Iterable[Writer]) -> None:
    """As :meth:`Writer.end`, for many at once."""
    chosen = list(writers)
    if chosen:
        with ThreadPoolExecutor(min(len(chosen), _AT_ONCE)) as pool:
            list(pool.map(Writer.end, chosen))


def tuned(conf: dict[str, object]) -> dict[str, object]:
    """The properties of a producer, those of the user first."""
    ours = {
        "linger.ms": _LINGER_MS,
        "queue.buffering.max.messages": _QUEUE_MESSAGES,
        "queue.buffering.max.kbytes": _QUEUE_KIB,
        "compression.type": "lz4",
        "sticky.partitioning.linger.ms": 0,
    }
    return {**ours, **conf}


def produce(producer: Producer, batch: Batch, cluster: Cluster) -> None:
    """Hand messages to a producer, waiting while its queue is full.

    :raises CdcError: when it does not take one.
    """
    # One call each, its arguments by position, takes less than produce_batch() does with a dict for each message.
    take, topic, partition = producer.produce, batch.topic, batch.partition
    for key, value in zip(batch.keys.to_pylist(), batch.values.to_pylist(), strict=True):
        try:
            take(topic, value, key, partition)
        except BufferError:
            _produce_later(producer, batch, cluster, key, value)
    producer.poll(0)


def _produce_later(producer: Producer, batch: Batch, cluster: Cluster, key: bytes | None, value: bytes | None) -> None:
    """Hand over a message for which the queue has had no room.

    :raises CdcError: when there is none for too long.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        producer.poll(_POLL)
        try:
            producer.produce(batch.topic, value, key, batch.partition)
        except BufferError:
            if time.monotonic() > deadline:
                raise StreamFailed(
                    f"Kafka at {cluster.brokers} takes no message of topic {batch.topic} for {_END_SECONDS:.0f}"
                    " seconds",
                    "See that the brokers run and can be reached; then start again.",
                ) from None
        else:
            return
