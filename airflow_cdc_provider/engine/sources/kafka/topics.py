"""The topics of a source: their names, beginnings and ends, and comparisons of offsets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, TopicSettings


@dataclass(frozen=True)
class Topics:
    """The topics of a source, in their cluster.

    :param source: the settings that name topics and cluster.
    """

    source: TopicSettings

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the topics."""
        return Cluster(self.source.brokers, self.source.properties, "source")

    def identity(self, cluster: str) -> SourceIdentity:
        """Return the identity of the source, for sinks that may be in the same cluster.

        :param cluster: the cluster's id.
        """
        return SourceIdentity(f"kafka {cluster}", self.source.reads)

    def named(self) -> tuple[Topic, ...]:
        """Return the topics that the source names.

        :raises ConfigError: when one does not exist, or none matches.
        :raises MissingPrivilege: when one may not be described; brokers hide it from their list.
        """
        names: Sequence[str] = self.source.topics
        if self.source.pattern:
            names = [name for name in self._listed() if self.source.reads(name)]
        found = self.described(names)
        lacking = sorted({*names} - {topic.name for topic in found})
        if lacking or not found:
            raise ConfigError(
                f"source.topics: {self.source.brokers} has no topic {', '.join(lacking)}"
                if lacking
                else f"source.pattern: {self.source.brokers} has no topic that matches {self.source.pattern}",
                f"Create the topic, or name existing ones: {', '.join(self._listed()) or 'none'}.",
            )
        return found

    def _listed(self) -> list[str]:
        return [name for name in self.cluster.topics() if name[:2] != "__"]

    def described(self, names: Collection[str]) -> tuple[Topic, ...]:
        """Return those of the named topics that exist."""
        found = self.cluster.described(names)
        return tuple(found[name] for name in sorted(found))

    def beginnings(self, topics: Collection[Topic]) -> Offsets:
        """Return the offsets of the first messages that still exist."""
        return _as_offsets(self.cluster.beginnings(topics))

    def ends(self, topics: Collection[Topic] | None = None) -> Offsets:
        """Return the offsets after the last committed messages.

        :param topics: by default all that the source names.
        """
        return _as_offsets(self.cluster.committed_ends(self.named() if topics is None else topics))

    def written_ends(self, topics: Collection[Topic] | None = None) -> Offsets:
        """Return the offsets after the last messages, including open transactions and the messages after them.

        :param topics: by default all that the source names.
        """
        return _as_offsets(self.cluster.written_ends(self.named() if topics is None else topics))


def _as_offsets(found: Mapping[str, Mapping[int, int]]) -> Offsets:
    return {topic: {str(n): offset for n, offset in partitions.items()} for topic, partitions in found.items()}


def behind(offsets: Offsets, ends: Offsets) -> int:
    """Return the number of messages and transaction markers between offsets and the ends of topics."""
    return sum(
        max(0, end - offsets.get(topic, {}).get(partition, 0))
        for topic, partitions in ends.items()
        for partition, end in partitions.items()
    )


def reached(offsets: Offsets, goal: Offsets) -> bool:
    """Return whether everything before the goal has been read."""
    return all(
        offsets.get(topic, {}).get(partition, 0) >= end
        for topic, partitions in goal.items()
        for partition, end in partitions.items()
    )


def with_all(offsets: Offsets, topics: Collection[Topic], otherwise: Callable[[Topic, str], int]) -> Mapping[str, Any]:
    """Return the offsets of all partitions of topics, in Spark's format for starting offsets.

    :param otherwise: returns the offset of a partition that has none.
    """
    return {
        topic.name: {
            str(n): offsets.get(topic.name, {}).get(str(n), otherwise(topic, str(n))) for n in range(topic.partitions)
        }
        for topic in topics
    }
