"""What is asked of a Kafka cluster beside Spark: which topics there are, where they begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airflow_cdc_provider.engine.errors import CdcError, ConfigError, ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.topics.settings import Offsets, TopicSource

try:
    from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec
except ImportError as e:
    # Whoever has to do with topics comes by here first.
    raise ConfigError(
        "the source type kafka needs the package confluent-kafka, which is not installed",
        "Install it where the driver and Airflow's workers run: pip install 'airflow-cdc-provider[kafka]'.",
    ) from e

_SECONDS = 15.0
_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_LOGIN = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)
_UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


@dataclass(frozen=True)
class Topic:
    """A topic that is there.

    :param id: one that no topic of this name had before.
    """

    name: str
    id: str
    partitions: int


@dataclass(frozen=True)
class Cluster:
    """The cluster of a source.

    :param source: what names it, and the topics.
    """

    source: TopicSource

    @cached_property
    def _admin(self) -> AdminClient:
        # What the library has to say, it also says by its errors.
        conf: dict[str, Any] = {**dict(self.source.properties), "bootstrap.servers": self.source.brokers}
        with _failing(self.source):
            return AdminClient(conf | {"log_level": 0})

    def id(self) -> str:
        """What the cluster calls itself, wherever it is."""
        with _failing(self.source):
            return str(self._admin.describe_cluster(request_timeout=_SECONDS).result().cluster_id)

    def topics(self) -> tuple[Topic, ...]:
        """The topics that the source names.

        :raises ConfigError: when one is not there, or none matches.
        """
        with _failing(self.source):
            there = self._admin.list_topics(timeout=_SECONDS).topics
        names: Sequence[str] = self.source.topics
        if self.source.pattern:
            # As Kafka's consumer has it: topics of its own are left out unless they are named.
            names = [name for name in sorted(there) if re.fullmatch(self.source.pattern, name) and name[:2] != "__"]
        lacking = [name for name in names if name not in there]
        if lacking or not names:
            shown = ", ".join(name for name in sorted(there) if name[:2] != "__")
            raise ConfigError(
                f"source.topics: {self.source.brokers} has no topic {', '.join(lacking)}"
                if lacking
                else f"source.pattern: {self.source.brokers} has no topic that matches {self.source.pattern}",
                f"Create it, or name some of: {shown or 'none'}.",
            )
        return self.described(names)

    def described(self, names: Collection[str]) -> tuple[Topic, ...]:
        """Topics that are there, of some names."""
        with _failing(self.source):
            asked = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=_SECONDS)
        found = []
        for name in sorted(asked):
            try:
                with _failing(self.source):
                    topic = asked[name].result()
            except _UnknownTopic:
                continue
            found.append(Topic(name, str(topic.topic_id), len(topic.partitions)))
        return tuple(found)

    def beginnings(self, topics: Collection[Topic]) -> Offsets:
        """The offsets of the first messages that are still there."""
        return self._offsets(topics, OffsetSpec.earliest())

    def ends(self, topics: Collection[Topic]) -> Offsets:
        """The offsets behind the last messages, of transactions those that have been committed."""
        return self._offsets(topics, OffsetSpec.latest())

    def _offsets(self, topics: Collection[Topic], which: Any) -> Offsets:
        asked = {TopicPartition(topic.name, n): which for topic in topics for n in range(topic.partitions)}
        if not asked:
            return {}
        found: dict[str, dict[str, int]] = {topic.name: {} for topic in topics}
        with _failing(self.source):
            answers = self._admin.list_offsets(
                asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_SECONDS
            )
            for place, answer in answers.items():
                found[place.topic][str(place.partition)] = int(answer.result().offset)
        return found


class _UnknownTopic(Exception):
    """A topic is not there any more."""


@contextmanager
def _failing(source: TopicSource) -> Iterator[None]:
    """Tell errors of Kafka's client as the engine's."""
    try:
        yield
    except KafkaException as e:
        error = e.args[0]
        if error.code() in _UNKNOWN:
            raise _UnknownTopic from e
        raise _as_ours(error, source) from e


def _as_ours(error: KafkaError, source: TopicSource) -> CdcError:
    said = f"Kafka at {source.brokers}: {error.str()}"
    if error.code() in _FORBIDDEN:
        return MissingPrivilege(
            said, "Grant the user of `source.properties` to describe and read the topics, and to describe the cluster."
        )
    if error.code() in _LOGIN:
        return ConnectionFailed(said, "Check user and password in `source.properties`, or in the connection.")
    if error.code() == KafkaError._INVALID_ARG:
        return ConfigError(said, "Give properties of librdkafka's names and values in `source.properties`.")
    return ConnectionFailed(said, "See that the brokers run, and that `source.brokers` can be reached from here.")


def behind(offsets: Offsets, ends: Offsets) -> int:
    """The messages, and markers of transactions, between offsets and the ends of topics."""
    return sum(
        max(0, end - offsets.get(topic, {}).get(partition, 0))
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )


def reached(offsets: Offsets, goal: Offsets) -> bool:
    """Whether everything before the goal has been read."""
    return all(
        offsets.get(topic, {}).get(partition, 0) >= end
        for topic, partitions in goal.items()
        for partition, end in partitions.items()
    )


def with_all(offsets: Offsets, topics: Collection[Topic], otherwise: Callable[[Topic, str], int]) -> Mapping[str, Any]:
    """The offsets of all partitions of topics, as Spark wants to be told where to start.

    :param otherwise: tells that of a partition which has none.
    """
    return {
        topic.name: {
            str(n): offsets.get(topic.name, {}).get(str(n), otherwise(topic, str(n))) for n in range(topic.partitions)
        }
        for topic in topics
    }
