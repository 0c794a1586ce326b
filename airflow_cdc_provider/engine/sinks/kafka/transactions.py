"""Transactions: write messages to all topics, together with the change of the record that commits them.

Each part of a run that writes concurrently has its own ``transactional.id``, the same in every run. When a process
takes the id, the open transaction under it ends, and its previous owner can no longer commit. So a process must take
the id before it reads the record and decides what to commit.
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
from airflow_cdc_provider.engine.sinks.kafka.record_topic import Journal, RecordMessages

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
    """Nothing was committed: another process has taken the ``transactional.id``, or the brokers have ended the
    transaction.

    :ivar seconds: seconds for which the transaction had been open.
    """

    def __init__(self, said: str, seconds: float) -> None:
        super().__init__(said)
        self.seconds = seconds


class Unsure(Exception):
    """It is unknown whether the transaction was committed; taking the ``transactional.id`` again settles it."""


@dataclass(frozen=True)
class Writer:
    """A writer of transactions.

    :param id: the ``transactional.id``.
    :param timeout: seconds after which the brokers end a transaction.
    """

    cluster: Cluster
    id: str
    timeout: float

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the writer for this thread within the block."""
        with _locks[self]:
            yield

    def take(self) -> None:
        """Take the ``transactional.id`` unless this process believes that it has it.

        :raises ConfigError: when the brokers reject the timeout.
        """
        if (os.getpid(), self) not in _clients:
            _clients[os.getpid(), self] = self._client()

    def end(self) -> None:
        """End any open transaction under the ``transactional.id``; its owner cannot commit anymore.

        The id is taken again even if this process believes that it has it, because another process may have taken it
        since.
        """
        with self.locked():
            client = self._client()
            if (os.getpid(), self) in _clients:
                _clients[os.getpid(), self] = client

    def leave(self) -> None:
        """Make the next transaction take the ``transactional.id`` again."""
        _clients.pop((os.getpid(), self), None)

    def commit(self, journal: Journal, what: str, change: RecordMessages, data: Iterable[Batch]) -> None:
        """Write messages and the change of the record, in one transaction.

        The change is written last, so that readers of the record are held up as briefly as possible.

        :param what: a description for people, written as a header of the record's messages.
        :raises Overtaken: when another process has the ``transactional.id`` by now.
        :raises Unsure: when the brokers did not report the outcome in time.
        :raises CdcError: when the transaction was aborted because it cannot be committed.
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
            what = f"cannot commit a transaction under {self.id} with {named(topics)}"
            raise self.cluster.failure(first, what) from e
        except SystemError as e:  # the client raises this after an earlier error
            self.leave()
            raise Overtaken(str(e), time.monotonic() - begun) from e
        except BaseException:
            self.leave()
            _abort(producer)
            raise
        failpoint("after-transaction")

    def _flush(self, client: _Client) -> None:
        """Wait for the delivery of messages; their errors appear when the transaction ends."""
        deadline = time.monotonic() + self.timeout
        while client.producer.flush(_POLL) and not client.failures and time.monotonic() < deadline:
            continue

    def too_long(self, seconds: float) -> LimitExceeded:
        """Return the error to raise when the brokers end transactions before they are complete."""
        return LimitExceeded(
            f"the brokers ended a transaction under {self.id} after {seconds:.0f} seconds",
            f"Nothing of it was applied. Raise sink.transaction_timeout, now {self.timeout:g} seconds, and, if needed,"
            " transaction.max.timeout.ms of the brokers.",
        )

    def _client(self) -> _Client:
        failures: list[KafkaError] = []

        def failed(error: KafkaError | None, message: Message) -> None:
            # Messages of a failed transaction are purged; that error does not contain the cause.
            if error is not None and error.code() not in _PURGED:
                failures.append(error)

        conf = self.cluster.conf(transactional_id=self.id, transaction_timeout_ms=int(self.timeout * 1000))
        conf |= {"message.timeout.ms": int(self.timeout * 1000), "delivery.report.only.error": True}
        with self.cluster.failing(f"cannot start transactions under {self.id}"):
            producer = Producer({**tuned(conf), "on_delivery": failed})
            producer.init_transactions(_END_SECONDS)
        return _Client(producer, failures)


@dataclass(frozen=True)
class _Client:
    """A producer that has its ``transactional.id``, and the errors of messages that it could not deliver."""

    producer: Producer
    failures: list[KafkaError]


def _reason(producer: Producer, error: KafkaError) -> KafkaError:
    """Return why a transaction has failed.

    If a transaction can only be aborted, the client rejects messages without naming the cause. It names the cause for
    an attempt to commit, which does not succeed in this state.
    """
    if error.code() == KafkaError._STATE:
        try:
            producer.commit_transaction(_ABORT_SECONDS)
        except KafkaException as e:
            return e.args[0]  # type: ignore[no-any-return]
    return error


def _abort(producer: Producer) -> None:
    """Abort a failed transaction, so that its messages do not hold up readers; otherwise the next owner
    would end it.
    """
    with suppress(KafkaException):
        producer.abort_transaction(_ABORT_SECONDS)


_clients: dict[tuple[int, Writer], _Client] = {}
_locks: defaultdict[Writer, threading.RLock] = defaultdict(threading.RLock)


def end_all(writers: Iterable[Writer]) -> None:
    """Call :meth:`Writer.end` for many writers at once."""
    chosen = list(writers)
    if chosen:
        with ThreadPoolExecutor(min(len(chosen), _AT_ONCE)) as pool:
            list(pool.map(Writer.end, chosen))


def tuned(conf: dict[str, object]) -> dict[str, object]:
    """Return the properties of a producer; the user's take precedence."""
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

    :raises CdcError: when it rejects a message.
    """
    # One call per message with positional arguments is faster than produce_batch() with a dict for each message.
    take, topic, partition = producer.produce, batch.topic, batch.partition
    for key, value in zip(batch.keys.to_pylist(), batch.values.to_pylist(), strict=True):
        try:
            take(topic, value, key, partition)
        except BufferError:
            _produce_later(producer, batch, cluster, key, value)
    producer.poll(0)


def _produce_later(producer: Producer, batch: Batch, cluster: Cluster, key: bytes | None, value: bytes | None) -> None:
    """Hand over a message that did not fit into the queue.

    :raises CdcError: when the queue stays full for too long.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        producer.poll(_POLL)
        try:
            producer.produce(batch.topic, value, key, batch.partition)
        except BufferError:
            if time.monotonic() > deadline:
                raise StreamFailed(
                    f"Kafka at {cluster.brokers} has accepted no message of topic {batch.topic} for"
                    f" {_END_SECONDS:.0f} seconds",
                    "Check that the brokers run and can be reached; then start again.",
                ) from None
        else:
            return
