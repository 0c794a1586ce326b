"""A Kafka cluster as it is talked to: its topics, and clients that are kept.

Clients hold connections and threads, so a process keeps them: one for administration, and consumers that are lent for
as long as something is read. A process that was forked has none of its parent's, whose threads it lacks.
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
from airflow_cdc_provider.engine.kafka.client_errors import LOGIN, PASSING, UNKNOWN, failure_of
from airflow_cdc_provider.engine.kafka.consumer import Received, received
from airflow_cdc_provider.engine.kafka.topic import Topic

REQUEST_SECONDS = 15.0


_GROUP = "airflow_cdc"  # no offsets are committed, but a consumer must have the name of a group


_PATIENCE = 60.0  # seconds for what the cluster does in the background, and for a read in which nothing comes


_LOOK_SECONDS = 0.05


_BUFFER_KIB = 16 << 10


_FETCH_WAIT_MS = 10  # a long poll at a topic's end would only delay the word that it is the end


_SHOWN = 3


# What librdkafka has to say beside its errors, such as that a broker is out of reach for a moment.
_log = logging.getLogger("airflow_cdc_provider.kafka")
_log.setLevel(logging.ERROR)


@dataclass(frozen=True)
class Cluster:
    """How a cluster is reached.

    :param brokers: ``host:port``, several with commas.
    :param properties: further ones of librdkafka, by name.
    :param section: of the pipeline file, in which both stand.
    """

    brokers: str
    properties: Properties = field(default=(), repr=False)
    section: Literal["sink", "source"] = "sink"

    def conf(self, **ours: Any) -> dict[str, Any]:
        """The properties of a client.

        :param ours: further ones, dots as underscores.
        """
        named = {name.replace("_", "."): value for name, value in ours.items()}
        # A topic that is gone is not made by the way, with whatever partitions the brokers think of.
        fixed = {"bootstrap.servers": self.brokers, "logger": _log, "allow.auto.create.topics": False}
        return {**dict(self.properties), **fixed, **named}

    @property
    def _admin(self) -> _Admin:
        key = (os.getpid(), self)
        if key not in _admins:
            heard: list[KafkaError] = []
            with self.failing("a client cannot be made"):
                _admins[key] = _Admin(AdminClient(self.conf() | {"error_cb": heard.append}), heard)
        return _admins[key]

    def id(self) -> str:
        """What the cluster calls itself, wherever it is."""
        return str(self._description().cluster_id)

    def topics(self) -> list[str]:
        """The names of all topics that we may see."""
        found = self._ask("topics cannot be listed", lambda admin: admin.list_topics(timeout=REQUEST_SECONDS))
        return sorted(found.topics)

    def topic(self, name: str) -> Topic | None:
        """A topic; ``None`` when there is none of that name."""
        return self.described([name]).get(name)

    def described(self, names: Collection[str]) -> dict[str, Topic]:
        """Of some topics those that are there, by name."""

        def ask(admin: AdminClient) -> dict[str, Topic]:
            asked = admin.describe_topics(TopicCollection(list(names)), request_timeout=REQUEST_SECONDS)
            answers = {name: _unless(UNKNOWN, each) for name, each in asked.items()}
            there = {name: found for name, found in answers.items() if found is not None}
            return {name: Topic(name, str(found.topic_id), len(found.partitions)) for name, found in there.items()}

        found: dict[str, Topic] = self._ask(f"{named(names)} cannot be described", ask) if names else {}
        return found

    def create(self, names: Collection[str], partitions: int, replicas: int, config: Mapping[str, str]) -> None:
        """Make topics, unless they are there.

        :param partitions: how many each has, -1 for the brokers' default.
        :param replicas: likewise.
        """
        deadline = time.monotonic() + _PATIENCE
        while missing := sorted(set(names) - self.described(names).keys()):
            if time.monotonic() > deadline:
                raise ConnectionFailed(f"topic {missing[0]} on {self.brokers} was made, and is not there", _LOOK_AGAIN)
            self._make([NewTopic(name, partitions, replicas, config=dict(config)) for name in missing])
            time.sleep(_LOOK_SECONDS)  # another broker may be asked next, which has yet to hear of it

    def _make(self, topics: list[NewTopic]) -> None:
        """Make topics; one that is there was made, or is being removed, this moment."""

        def ask(admin: AdminClient) -> None:
            for each in admin.create_topics(topics, request_timeout=REQUEST_SECONDS).values():
                _unless((KafkaError.TOPIC_ALREADY_EXISTS,), each)

        self._ask(f"{named([topic.topic for topic in topics])} cannot be made", ask)

    def remove(self, name: str) -> None:
        """Remove a topic if it is there."""

        def ask(admin: AdminClient) -> None:
            _unless(UNKNOWN, admin.delete_topics([name], request_timeout=REQUEST_SECONDS)[name])

        deadline = time.monotonic() + _PATIENCE
        while self.topic(name) is not None:
            if time.monotonic() > deadline:
                raise ConnectionFailed(f"the topic {name} on {self.brokers} was removed, and is there", _LOOK_AGAIN)
            self._ask(f"topic {name} cannot be removed", ask)
            time.sleep(_LOOK_SECONDS)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        """Remove messages of a topic from its front.

        :param before: by partition the offset of the first that stays.
        """
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        if wanted:
            self._ask(
                f"messages of topic {topic} cannot be removed",
                lambda admin: _all(admin.delete_records(wanted, request_timeout=REQUEST_SECONDS)),
            )

    def first(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """The offsets of the first messages that are there."""
        return self._offsets([(topic, partition) for partition in partitions], OffsetSpec.earliest())[topic]

    def ends(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """The offsets after the last messages, those of open transactions among them."""
        return self._offsets([(topic, partition) for partition in partitions], OffsetSpec.latest())[topic]

    def beginnings(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """The offsets of the first messages that are there, of whole topics."""
        return self._offsets([(topic.name, n) for topic in topics for n in topic.beginning], OffsetSpec.earliest())

    def written_ends(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """The offsets after the last messages, those of open transactions among them, of whole topics."""
        return self._offsets([(topic.name, n) for topic in topics for n in topic.beginning], OffsetSpec.latest())

    def committed_ends(self, topics: Collection[Topic]) -> dict[str, dict[int, int]]:
        """The offsets before the first messages of open transactions, or else after the last ones, of whole topics."""
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
        what = f"offsets of {named({topic for topic, _ in places})} cannot be had"
        answers = self._ask(what, lambda admin: _all(admin.list_offsets(wanted, **options)))
        for place, answer in answers.items():
            found[place.topic][place.partition] = answer.offset
        return found

    def broker_setting(self, name: str) -> str | None:
        """What a broker is set to; ``None`` when it does not say."""
        broker = ConfigResource(ResourceType.BROKER, str(self._description().nodes[0].id))
        return self._settings("settings of the brokers cannot be had", [broker])[broker.name].get(name)

    def topic_settings(self, topics: Collection[str]) -> dict[str, dict[str, str]]:
        """What topics are set to, of their own or by the brokers' defaults, by their names."""
        if not topics:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        return self._settings(f"settings of {named(topics)} cannot be had", resources)

    def _settings(self, what: str, resources: list[ConfigResource]) -> dict[str, dict[str, str]]:
        told = self._ask(what, lambda admin: _all(admin.describe_configs(resources, request_timeout=REQUEST_SECONDS)))
        return {each.name: {name: str(entry.value) for name, entry in told[each].items()} for each in resources}

    def _description(self) -> Any:
        return self._ask(
            "the cluster cannot be described",
            lambda admin: admin.describe_cluster(request_timeout=REQUEST_SECONDS).result(),
        )

    def _ask(self, what: str, ask: Callable[[AdminClient], Any]) -> Any:
        """Ask the brokers something; again, with a client that knows nothing yet, while they are about to change.

        :param what: could not be done, for the message.
        :param ask: takes the client for administration that this process keeps, which outlives what it has asked.
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
    def lent(self, topic: Topic, committed: bool = True) -> Iterator[Consumer]:
        """A consumer, for as long as something of a topic is read.

        :param committed: it is shown nothing of transactions that are open or were aborted.
        """
        kept = _consumers[os.getpid(), self, committed]
        lent = kept.pop() if kept else _Kept(self._consumer(committed))
        if lent.topics.setdefault(topic.name, topic.id) != topic.id:
            # It takes a topic that was made anew for one of which it knows more than the brokers do.
            lent.consumer.close()
            lent = _Kept(self._consumer(committed), {topic.name: topic.id})
        try:
            with self.failing(f"topic {topic.name} cannot be read"):
                yield lent.consumer
                lent.consumer.unassign()
        except BaseException:
            lent.consumer.close()
            raise
        kept.append(lent)

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
        with self.failing("a consumer cannot be made"):
            return Consumer(conf)

    def read(
        self,
        topic: Topic,
        starts: Mapping[int, int],
        committed: bool = True,
        ends: Mapping[int, int] | None = None,
    ) -> Iterator[list[Received]]:
        """The messages of a topic up to its end, or the first open transaction, as they come.

        :param starts: by partition the offset to begin at; one before the first message that is there means that.
        :param committed: see :meth:`lent`.
        :param ends: by partition the offset before which to end; some messages behind it may come, too.
        """
        firsts = self.first(topic.name, list(starts))
        with self.lent(topic, committed) as consumer:
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
                    raise self.unreachable(f"nothing came of topic {topic.name} for {_PATIENCE:.0f} seconds")

    # -- errors -------------------------------------------------------------------------------------

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn the errors of the client into ours.

        :param what: could not be done, for the message.
        """
        try:
            yield
        except KafkaException as e:
            raise self.failure(e.args[0], what) from e

    def failure(self, error: KafkaError, what: str) -> CdcError:
        """Return an error of the client as one of ours, see :func:`.failure_of`."""
        return failure_of(error, self.brokers, self.section, what)

    def unreachable(self, what: str) -> ConnectionFailed:
        """What is raised when the cluster does not answer."""
        return ConnectionFailed(f"Kafka at {self.brokers}: {what}", "See that the brokers run and can be reached.")


_LOOK_AGAIN = "Look into the brokers' logs; then start again."


@dataclass(frozen=True)
class _Kept:
    """A consumer, and the ids of the topics that it has read."""

    consumer: Consumer
    topics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Admin:
    """A client for administration, and what it has told of its brokers."""

    client: AdminClient
    heard: list[KafkaError]

    def refused_login(self) -> KafkaError | None:
        """What a broker has said to our login, which a request that it does not answer then does not tell."""
        while self.client.poll(0):
            pass
        return next((error for error in self.heard if error.code() in LOGIN), None)


_admins: dict[tuple[int, Cluster], _Admin] = {}


_consumers: defaultdict[tuple[int, Cluster, bool], list[_Kept]] = defaultdict(list)


def named(topics: Collection[str]) -> str:
    """Topics in a message; a pipeline may have very many."""
    more = len(topics) - _SHOWN
    shown = f"topic{'s' * (len(topics) > 1)} {', '.join(sorted(topics)[:_SHOWN])}"
    return shown + (f" and {more} more" if more > 0 else "")


def _unless(codes: Sequence[int], asked: Any) -> Any:
    """What is answered; ``None`` when that is an error with one of some codes."""
    try:
        return asked.result()
    except KafkaException as e:
        if e.args[0].code() not in codes:
            raise
        return None


def _all(asked: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: each.result() for key, each in asked.items()}
