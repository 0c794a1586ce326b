"""The topics of a pipeline's targets: their names, ownership and contents.

A topic is identified by the cluster's id for it. A recreated topic has another id, and has lost its messages. The
record's contents describe topics by the table's label. ``topics`` contains the name, the highest LSN of the messages,
and the id. ``begins`` contains where the pipeline's own messages begin in a topic with foreign ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, GateClosed, StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.kafka.message_ranges import MessageRange, ranges_of
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sinks.kafka import truncate_events
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import Format
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

_TAIL = 100


@dataclass(frozen=True)
class TargetTopics:
    """The topics of a pipeline's targets.

    :param pipeline: name of the pipeline.
    """

    settings: KafkaSettings
    pipeline: str

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the sink."""
        return Cluster(self.settings.brokers, self.settings.properties)

    @property
    def format(self) -> Format:
        """Return the format of messages."""
        return self.settings.messages(self.pipeline)

    def name(self, target: Target) -> str:
        """Return the name of a target's topic."""
        return self.settings.topic_of(self.pipeline, target.schema, target.name)

    def find(self, target: Target) -> Topic | None:
        """Return a target's topic; ``None`` if it does not exist."""
        return self.cluster.topic(self.name(target))

    # -- before anything is written -----------------------------------------------------------------

    def require_apart(self, targets: Sequence[Target]) -> None:
        """Refuse impossible names of topics.

        :raises ConfigError: when two targets would share a topic, or a target would use that of a record.
        """
        found: dict[str, Target] = {}
        for target in targets:
            if self.name(target).startswith(PREFIX):
                raise ConfigError(
                    f"the topic of {target.table.label} would be {self.name(target)}, but names that begin with"
                    f" {PREFIX} are reserved for the records of pipelines",
                    "Set another pattern of topic names in `sink.topic`.",
                )
            other = found.setdefault(self.name(target), target)
            if other.table.label != target.table.label:
                raise ConfigError(
                    f"{other.table.label} and {target.table.label} would share the topic {self.name(target)}",
                    "Distinguish them in `sink.topic`, as in `{pipeline}.{schema}.{table}`, or capture only one.",
                )

    def require_ours(self, target: Target) -> None:
        """Refuse a topic with foreign messages, unless the settings permit writing to it.

        :raises ForeignTable: when it has some.
        """
        there = self.find(target)
        if there is None or self.settings.adopt:
            return
        if any(True for _ in self.cluster.read(there, there.beginning)):
            raise ForeignTable(
                f"the topic {there.name}, target of {target.schema}.{target.name}, has messages that pipeline"
                f" {self.pipeline!r} did not write",
                "Remove the topic, set another pattern of topic names (`sink.topic`), or allow the pipeline to append"
                " to such topics (`sink.adopt`).",
            )

    def require_before(self, target: Target, last: LogPosition | None, start: LogPosition | None) -> None:
        """Refuse a topic with events of an abandoned timeline.

        :param last: the highest LSN of its messages, ``None`` if there are none.
        :param start: start of the slot; ``None`` for a table that joins a running pipeline.
        :raises GateClosed: when new events would sort before those.
        """
        if start is not None and last is not None and last > start and self.find(target) is not None:
            raise GateClosed(
                f"the topic {self.name(target)} has events up to {format_lsn(last)}, but the source's log is at"
                f" {format_lsn(start)}: they belong to a timeline that the source has abandoned, so new events would"
                " sort before them",
                "Remove the topic, or set another one in `sink.topic`, then run `airflow-cdc resnapshot --all`.",
            )

    def create(self, targets: Sequence[Target]) -> None:
        """Create missing topics."""
        settings = self.settings
        names = [self.name(target) for target in targets]
        self.cluster.create(names, settings.partitions, settings.replicas, dict(settings.topic_config))

    def described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """Return the change that describes topics in the record."""
        heads, begins = {}, {}
        there = self.cluster.described([self.name(target) for target in targets])
        joining = [t for t in targets if t.table.label not in contents.get("tables", {})]
        for target in targets:
            label, topic = target.table.label, there.get(self.name(target))
            if label in ours:
                last = self.last_event(target)
            else:
                last = None if target in joining else last_recorded_lsn(contents, target)
            heads[label] = head_entry(self.name(target), last, None if topic is None else topic.id)
            if target in joining and self.settings.adopt and topic is not None:
                ends = self.cluster.ends(topic.name, range(topic.partitions))
                begins[label] = {"id": topic.id, "offsets": [ends[p] for p in sorted(ends)]}
        gone = [target.table.label for target in joining]
        return Change({"topics": heads, "begins": begins}, {"reads": gone, "begins": gone})

    # -- existence ----------------------------------------------------------------------------------

    def missing(self, contents: Contents, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose topics are gone, or differ from those in the record."""
        there = self.cluster.described([self.name(target) for target in targets])

        def has(target: Target) -> bool:
            topic = there.get(self.name(target))
            return topic is not None and recorded_topic_id(contents, target) in (None, topic.id)

        return tuple(target for target in targets if not has(target))

    def require(self, contents: Contents, target: Target) -> Topic:
        """Return a target's topic.

        :raises StreamFailed: when it is gone, or differs from the topic in the record.
        """
        topic = self.find(target)
        if topic is None or recorded_topic_id(contents, target) not in (None, topic.id):
            raise StreamFailed(
                f"the topic {self.name(target)} on {self.settings.place}"
                f" {'has been recreated' if topic else 'no longer exists'}",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'` to write all rows to it again.",
            )
        return topic

    # -- contents -----------------------------------------------------------------------------------

    def events(self, contents: Contents, target: Target) -> Iterator[pa.RecordBatch]:
        """Yield all committed events of the pipeline in a target's topic that still exist."""
        there = self.find(target)
        if there is None:
            return
        yield from self._read(target, there, _starts(contents, target, there))
        if (truncate := truncate_events.last_truncate(contents, target, there.id)) is not None:
            yield truncate

    def ranges(self, contents: Contents, target: Target) -> Sequence[MessageRange]:
        """Return the ranges of messages in a target's topic."""
        there = self.find(target)
        return [] if there is None else ranges_of(self.cluster, there, _starts(contents, target, there))

    def last_event(self, target: Target) -> LogPosition | None:
        """Return the highest LSN in a topic, from the last messages of each partition; ``None`` if there are none."""
        there = self.find(target)
        if there is None:
            return None
        every = range(there.partitions)
        firsts, ends = self.cluster.first(there.name, every), self.cluster.ends(there.name, every)
        found = [self._last_of(target, there, p, firsts[p], ends[p]) for p in every]
        return max((lsn for lsn in found if lsn is not None), default=None)

    def _last_of(self, target: Target, topic: Topic, partition: int, first: int, end: int) -> LogPosition | None:
        tail = _TAIL
        while True:
            start = max(first, end - tail)
            lsns = [
                lsn
                for batch in self._read(target, topic, {partition: start})
                for lsn in batch["_commit_lsn"].to_pylist()
            ]
            if lsns or start == first:
                return max(map(parse_lsn, lsns), default=None)
            tail *= 10

    def _read(self, target: Target, topic: Topic, starts: Mapping[int, int]) -> Iterator[pa.RecordBatch]:
        for messages in self.cluster.read(topic, starts):
            found = [(message.key, message.value) for message in messages]
            keys, values = (pa.array(column, pa.large_binary()) for column in zip(*found, strict=True))
            yield self.format.decode(target, keys, values)


def _starts(contents: Contents, target: Target, topic: Topic) -> dict[int, int]:
    """Return by partition the first offset of the pipeline's own messages in a target's topic."""
    begins = contents.get("begins", {}).get(target.table.label)
    offsets = begins["offsets"] if begins is not None and begins["id"] == topic.id else []
    return topic.beginning | dict(enumerate(offsets))


def head_entry(topic: str, last: LogPosition | None, topic_id: str | None) -> dict[str, Any]:
    """Return the entry for a target's topic in the record.

    :param last: the highest LSN of its messages; ``None`` if there are none.
    :param topic_id: an id that no earlier topic of this name had; ``None`` if it is not known.
    """
    return {"topic": topic, "last": None if last is None else format_lsn(last), "id": topic_id}


def recorded_topic_id(contents: Contents, target: Target) -> str | None:
    """Return the id of a target's topic in the record."""
    topic_id: str | None = (contents.get("topics", {}).get(target.table.label) or {}).get("id")
    return topic_id


def last_recorded_lsn(contents: Contents, target: Target) -> LogPosition | None:
    """Return the highest LSN of a target's messages in the record."""
    head = contents.get("topics", {}).get(target.table.label) or {}
    return None if head.get("last") is None else parse_lsn(head["last"])
