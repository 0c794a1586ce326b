"""Talks to a Kafka cluster: describes its topics, reads them, and keeps clients open.

Clients hold connections and threads, so a process keeps them: one for administration, and consumers that are borrowed
while something is read. A forked process opens its own, because it lacks the threads of its parent.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConnectionFailed,
)
from airflow_cdc_provider.engine.kafka.addresses import Properties
from airflow_cdc_provider.engine.kafka.client import (
    AdminClient,
    ConfigResource,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicCollection,
    TopicPartition,
)
from airflow_cdc_provider.engine.kafka.client_errors import LOGIN, PASSING, UNKNOWN, client_failure
from airflow_cdc_provider.engine.kafka.consumer import Received, received
from airflow_cdc_provider.engine.kafka.topic import Topic

REQUEST_SECONDS = 15.0


_GROUP = "airflow_cdc"  # no offsets are committed, but a consumer must name a group


_PATIENCE = 60.0  # seconds to wait for background work of the cluster, and for a read that returns nothing


_LOOK_SECONDS = 0.05


_BUFFER_KIB = 16 << 10


_FETCH_WAIT_MS = 10  # a long poll at the end of a topic would only delay the end-of-partition event


_SHOWN = 3


# Messages of librdkafka other than its errors, for example that a broker is briefly unreachable, are not logged.
_log = logging.getLogger("airflow_cdc_provider.kafka")
_log.setLevel(logging.ERROR)


@dataclass(frozen=True)
class Cluster:
    """The address of a cluster.

    :param brokers: ``host:port``, separated by commas.
    :param properties: further properties of librdkafka, by name.
    :param section: the section of the pipeline file that contains both.
    """

    brokers: str
    properties: Properties = field(default=(), repr=False)
    section: Literal["sink", "source"] = "sink"

    def conf(self, **ours: Any) -> dict[str, Any]:
        """Return the properties of a client.

        :param ours: further properties, with underscores for dots.
        """
        named = {name.replace("_", "."): value for name, value in ours.items()}
        # A missing topic must not be created implicitly, with the brokers' default number of partitions.
        fixed = {"bootstrap.servers": self.brokers, "logger": _log, "allow.auto.create.topics": False}
        return {**dict(self.properties), **fixed, **named}

    @property
    def _admin(self) -> _Admin:
        key = (os.getpid(), self)
        if key not in _admins:
            heard: list[KafkaError] = []
            with self.failing("cannot create a client"):
                _admins[key] = _Admin(AdminClient(self.conf() | {"error_cb": heard.append}), heard)
        return _admins[key]

    def id(self) -> str:
        """Return the cluster's own id, which does not depend on its address."""
        return str(self._description().cluster_id)

    def topics(self) -> list[str]:
        """Return the names of all topics that are visible to this user."""
        found = self._ask("cannot list topics", lambda admin: admin.list_topics(timeout=REQUEST_SECONDS))
        return sorted(found.topics)

    def topic(self, name: str) -> Topic | None:
        """Return a topic; ``None`` if it does not exist."""
        return self.described([name]).get(name)

    def described(self, names: Collection[str]) -> dict[str, Topic]:
        """Return those of the named topics that exist, by name."""

        def ask(admin: AdminClient) -> dict[str, Topic]:
            asked = admin.describe_topics(TopicCollection(list(names)), request_timeout=REQUEST_SECONDS)
            answers = {name: _unless(UNKNOWN, each) for name, each in asked.items()}
            there = {name: found for name, found in answers.items() if found is not None}
            return {name: Topic(name, str(found.topic_id), len(found.partitions)) for name, found in there.items()}

        found: dict[str, Topic] = self._ask(f"cannot describe {named(names)}", ask) if names else {}
        return found

    def create(self, names: Collection[str], partitions: int, replicas: int, config: Mapping[str, str]) -> None:
        """Create topics unless they exist.

        :param partitions: the number of partitions of each, -1 for the brokers' default.
        :param replicas: the number of replicas, likewise.
        """
        deadline = time.monotonic() + _PATIENCE
        while missing := sorted(set(names) - self.described(names).keys()):
            if time.monotonic() > deadline:
                raise ConnectionFailed(
                    f"topic {missing[0]} on {self.brokers} was created but does not appear", _LOOK_AGAIN
                )
            self._make([NewTopic(name, partitions, replicas, config=dict(config)) for name in missing])
            time.sleep(_LOOK_SECONDS)  # the next request may go to another broker that does not know the topic yet

    def _make(self, topics: list[NewTopic]) -> None:
        """Create topics; one that exists already was just created, or is just being removed."""

        def ask(admin: AdminClient) -> None:
            for each in admin.create_topics(topics, request_timeout=REQUEST_SECONDS).values():
                _unless((KafkaError.TOPIC_ALREADY_EXISTS,), each)

        self._ask(f"cannot create {named([topic.topic for topic in topics])}", ask)

    def remove(self, name: str) -> None:
        """Remove a topic if it exists."""

        def ask(admin: AdminClient) -> None:
            _unless(UNKNOWN, admin.delete_topics([name], request_timeout=REQUEST_SECONDS)[name])

        deadline = time.monotonic() + _PATIENCE
        while self.topic(name) is not None:
            if time.monotonic() > deadline:
                raise ConnectionFailed(f"topic {name} on {self.brokers} was removed but still appears", _LOOK_AGAIN)
            self._ask(f"cannot remove topic {name}", ask)
            time.sleep(_LOOK_SECONDS)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        """Remove messages from the front of a topic.

        :param before: by partition, the offset of the first message to keep.
        """
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        if wanted:
            self._ask(
                f"cannot remove messages of topic {topic}",
                lambda admin: _all(admin.delete_records(wanted, request_timeout=REQUEST_SECONDS)),
            )

    def first(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Return the offsets of the first messages of partitions."""
        return self._offsets([(topic, partition) for partition in partitions], OffsetSpec.earliest())[topic]

    def ends(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Return the offsets after the last messages of partitions, including those of open transactions."""
        return self._offsets([(topic, partition) for partition in partitions], OffsetSpec.latest())[topic]

    def beginnings(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """Return the offsets of the first messages of whole topics."""
        return self._offsets([(topic.name, n) for topic in topics for n in topic.beginning], OffsetSpec.earliest())

    def written_ends(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """Return the offsets after the last messages of whole topics, including those of open transactions."""
        return self._offsets([(topic.name, n) for topic in topics for n in topic.beginning], OffsetSpec.latest())

    def committed_ends(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """Return the offsets up to which whole topics are committed.

        These are the offsets of the first messages of open transactions, or otherwise those after the last messages.
        """
        wanted = [(topic.name, n) for topic in topics for n in topic.beginning]
        return self._offsets(wanted, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)

    def _offsets(
        self,
        places: Collection[tuple[str, int]],
        which: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = defaultdict(dict)
        wanted = {TopicPartition(*place): which for place in places}
        options = {"isolation_level": isolation, "request_timeout": REQUEST_SECONDS}
        if not wanted:
            return found
        what = f"cannot get offsets of {named({topic for topic, _ in places})}"
        answers = self._ask(what, lambda admin: _all(admin.list_offsets(wanted, **options)))
        for place, answer in answers.items():
            found[place.topic][place.partition] = answer.offset
        return found

    def broker_setting(self, name: str) -> str | None:
        """Return a setting of the brokers; ``None`` if they do not report it."""
        broker = ConfigResource(ResourceType.BROKER, str(self._description().nodes[0].id))
        return self._settings("cannot get settings of the brokers", [broker])[broker.name].get(name)

    def topic_settings(self, topics: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the effective settings of topics by name: their own, or the brokers' defaults."""
        if not topics:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        return self._settings(f"cannot get settings of {named(topics)}", resources)

    def _settings(self, what: str, resources: list[ConfigResource]) -> dict[str, dict[str, str]]:
        found = self._ask(what, lambda admin: _all(admin.describe_configs(resources, request_timeout=REQUEST_SECONDS)))
        return {each.name: {name: str(entry.value) for name, entry in found[each].items()} for each in resources}

    def _description(self) -> Any:
        return self._ask(
            "cannot describe the cluster",
            lambda admin: admin.describe_cluster(request_timeout=REQUEST_SECONDS).result(),
        )

    def _ask(self, what: str, ask: Callable[[AdminClient], Any]) -> Any:
        """Send a request to the brokers; while leadership is changing, retry it with a new client.

        :param what: what failed, for the message.
        :param ask: takes the administration client of this process, which stays open after the request.
        """
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            kept = self._admin
            try:
                return ask(kept.client)
            except KafkaException as e:
                error = kept.refused_login() or e.args[0]
                if error.code() not in PASSING or time.monotonic() > deadline:
                    raise self.failure(error, what) from e
            _admins.pop((os.getpid(), self), None)
            time.sleep(_LOOK_SECONDS)

    # -- reading ------------------------------------------------------------------------------------

    @contextmanager
    def borrowed_consumer(self, topic: Topic, committed: bool = True) -> Iterator[Consumer]:
        """Lend a consumer while something of a topic is read.

        :param committed: hide messages of open and aborted transactions.
        """
        kept = _consumers[os.getpid(), self, committed]
        borrowed = kept.pop() if kept else _Kept(self._consumer(committed))
        if borrowed.topics.setdefault(topic.name, topic.id) != topic.id:
            # The consumer would treat a recreated topic as the old one, and trust its own metadata over the brokers'.
            borrowed.consumer.close()
            borrowed = _Kept(self._consumer(committed), {topic.name: topic.id})
        try:
            with self.failing(f"cannot read topic {topic.name}"):
                yield borrowed.consumer
                borrowed.consumer.unassign()
        except BaseException:
            borrowed.consumer.close()
            raise
        kept.append(borrowed)

    def _consumer(self, committed: bool) -> Consumer:
        conf = self.conf(
            group_id=_GROUP,
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
            isolation_level="read_committed" if committed else "read_uncommitted",
            fetch_wait_max_ms=_FETCH_WAIT_MS,
            queued_max_messages_kbytes=_BUFFER_KIB,
        )
        conf["fetch.queue.backoff.ms"] = _FETCH_WAIT_MS
        with self.failing("cannot create a consumer"):
            return Consumer(conf)

    def read(
        self,
        topic: Topic,
        starts: Mapping[int, int],
        committed: bool = True,
        ends: Mapping[int, int] | None = None,
    ) -> Iterator[list[Received]]:
        """Yield the messages of a topic as they arrive, up to its end or the first open transaction.

        :param starts: by partition, the offset to begin at; an offset before the first message means the first message.
        :param committed: see :meth:`borrowed_consumer`.
        :param ends: by partition, the offset to stop before; some later messages may be included.
        """
        firsts = self.first(topic.name, list(starts))
        with self.borrowed_consumer(topic, committed) as consumer:
            left = {partition: max(start, firsts[partition]) for partition, start in starts.items()}
            consumer.assign([TopicPartition(topic.name, partition, start) for partition, start in left.items()])
            heard = time.monotonic()
            while left:
                found, reached = received(consumer, 1.0)
                if found:
                    yield found
                passed = {each.partition for each in found if ends and each.offset + 1 >= ends[each.partition]}
                for partition in {*reached, *passed}:
                    left.pop(partition, None)
                if found or reached:
                    heard = time.monotonic()
                elif time.monotonic() - heard > _PATIENCE:
                    raise self.unreachable(f"no message of topic {topic.name} arrived for {_PATIENCE:.0f} seconds")

    # -- errors -------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Translate errors of the client into errors of the engine.

        :param what: what failed, for the message.
        """
        try:
            yield
        except KafkaException as e:
            raise self.failure(e.args[0], what) from e

    def failure(self, error: KafkaError, what: str) -> CdcError:
        """Return an error of the client as an error of the engine, see :func:`.client_failure`."""
        return client_failure(error, self.brokers, self.section, what)

    def unreachable(self, what: str) -> ConnectionFailed:
        """Return the error to raise when the cluster does not answer."""
        return ConnectionFailed(f"Kafka at {self.brokers}: {what}", "Check that the brokers run and can be reached.")


_LOOK_AGAIN = "Check the brokers' logs; then start again."


@dataclass(frozen=True)
class _Kept:
    """A consumer, and the ids of the topics that it has read."""

    consumer: Consumer
    topics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Admin:
    """A client for administration, and the errors that it has reported."""

    client: AdminClient
    heard: list[KafkaError]

    def refused_login(self) -> KafkaError | None:
        """Return the brokers' answer to our login; an unanswered request does not include it."""
        while self.client.poll(0):
            pass
        return next((error for error in self.heard if error.code() in LOGIN), None)


_admins: dict[tuple[int, Cluster], _Admin] = {}


_consumers: defaultdict[tuple[int, Cluster, bool], list[_Kept]] = defaultdict(list)


def named(topics: Collection[str]) -> str:
    """Return the names of topics for a message, shortened, as a pipeline may have very many."""
    more = len(topics) - _SHOWN
    shown = f"topic{'s' * (len(topics) > 1)} {', '.join(sorted(topics)[:_SHOWN])}"
    return shown + (f" and {more} more" if more > 0 else "")


def _unless(codes: Sequence[int], asked: Any) -> Any:
    """Return the answer; ``None`` if it is an error with one of the given codes."""
    try:
        return asked.result()
    except KafkaException as e:
        if e.args[0].code() not in codes:
            raise
        return None


def _all(asked: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: each.result() for key, each in asked.items()}
