"""The topics of a pipeline's targets: what they are called, whose they are, and what stands in them.

A topic is known by the id that the cluster has given it: one that was removed and made anew has another, and has lost
its messages. Where the record's contents tell of a topic, under ``topics`` by the table's label, they have its name,
the highest LSN of its messages and its id; under ``begins``, where the pipeline's own messages begin in a topic that
had others.
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

    :param pipeline: its name.
    """

    settings: KafkaSettings
    pipeline: str

    @property
    def cluster(self) -> Cluster:
        """The cluster that the settings name."""
        return Cluster(self.settings.brokers, self.settings.properties)

    @property
    def format(self) -> Format:
        """What messages look like."""
        return self.settings.messages(self.pipeline)

    def name(self, target: Target) -> str:
        """The name of a target's topic."""
        return self.settings.topic_of(self.pipeline, target.schema, target.name)

    def find(self, target: Target) -> Topic | None:
        """A target's topic, if it is there."""
        return self.cluster.topic(self.name(target))

    # -- before anything is written -----------------------------------------------------------------

    def require_apart(self, targets: Sequence[Target]) -> None:
        """Refuse names that the topics cannot have.

        :raises ConfigError: when two targets would share a topic, or one would have that of a record.
        """
        found: dict[str, Target] = {}
        for target in targets:
            if self.name(target).startswith(PREFIX):
                raise ConfigError(
                    f"the topic of {target.table.label} would be {self.name(target)}: names that begin with {PREFIX}"
                    " are those of the records of pipelines",
                    "Give the pipeline another pattern of topics by `sink.topic`.",
                )
            other = found.setdefault(self.name(target), target)
            if other.table.label != target.table.label:
                raise ConfigError(
                    f"{other.table.label} and {target.table.label} would share the topic {self.name(target)}",
                    "Tell them apart by `sink.topic`, as in `{pipeline}.{schema}.{table}`, or leave one out.",
                )

    def require_ours(self, target: Target) -> None:
        """Refuse a topic with messages of others, unless the settings let them be written on to.

        :raises ForeignTable: when it has some.
        """
        there = self.find(target)
        if there is None or self.settings.adopt:
            return
        if any(True for _ in self.cluster.read(there, there.beginning)):
            raise ForeignTable(
                f"the topic {there.name}, target of {target.schema}.{target.name}, has messages that pipeline"
                f" {self.pipeline!r} did not write",
                "Remove it, give the pipeline another pattern of topics (`sink.topic`), or have it write on to them"
                " (`sink.adopt`).",
            )

    def require_before(self, target: Target, last: LogPosition | None, start: LogPosition | None) -> None:
        """Refuse a topic that has events of a history that the source has left.

        :param last: the highest LSN of its messages, ``None`` without any.
        :param start: where the slot begins; ``None`` for a table that joins a running pipeline.
        :raises GateClosed: when new events would come before those.
        """
        if start is not None and last is not None and last > start and self.find(target) is not None:
            raise GateClosed(
                f"the topic {self.name(target)} has events up to {format_lsn(last)}, but the source's log is at"
                f" {format_lsn(start)}: they are of a history that the source has left, and new ones would come before",
                "Remove the topic, or name another one by `sink.topic`, then run `airflow-cdc resnapshot --all`.",
            )

    def create(self, targets: Sequence[Target]) -> None:
        """Make the topics that are not there."""
        settings = self.settings
        names = [self.name(target) for target in targets]
        self.cluster.create(names, settings.partitions, settings.replicas, dict(settings.topic_config))

    def described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """See :meth:`.ChangesRecord._described`."""
        told, begins = {}, {}
        there = self.cluster.described([self.name(target) for target in targets])
        joining = [t for t in targets if t.table.label not in contents.get("tables", {})]
        for target in targets:
            label, topic = target.table.label, there.get(self.name(target))
            if label in ours:
                last = self.last_event(target)
            else:
                last = None if target in joining else last_told(contents, target)
            told[label] = telling(self.name(target), last, None if topic is None else topic.id)
            if target in joining and self.settings.adopt and topic is not None:
                ends = self.cluster.ends(topic.name, range(topic.partitions))
                begins[label] = {"id": topic.id, "offsets": [ends[p] for p in sorted(ends)]}
        gone = [target.table.label for target in joining]
        return Change({"topics": told, "begins": begins}, {"reads": gone, "begins": gone})

    # -- whether they are there ---------------------------------------------------------------------

    def missing(self, contents: Contents, targets: Sequence[Target]) -> tuple[Target, ...]:
        """The targets whose topics are gone, or are others than the contents tell of."""
        there = self.cluster.described([self.name(target) for target in targets])

        def has(target: Target) -> bool:
            topic = there.get(self.name(target))
            return topic is not None and id_told(contents, target) in (None, topic.id)

        return tuple(target for target in targets if not has(target))

    def require(self, contents: Contents, target: Target) -> Topic:
        """A target's topic.

        :raises StreamFailed: when it is gone, or is another one than the contents tell of.
        """
        topic = self.find(target)
        if topic is None or id_told(contents, target) not in (None, topic.id):
            raise StreamFailed(
                f"the topic {self.name(target)} on {self.settings.place} is gone{', and made anew' if topic else ''}",
                f"Run `airflow-cdc resnapshot --table '{target.table.label}'`: all rows are written to it again.",
            )
        return topic

    # -- what stands in them ------------------------------------------------------------------------

    def events(self, contents: Contents, target: Target) -> Iterator[pa.RecordBatch]:
        """All events of a target's topic that are ours, committed, and still there."""
        there = self.find(target)
        if there is None:
            return
        yield from self._read(target, there, _starts(contents, target, there))
        if (truncate := truncate_events.event(contents, target, there.id)) is not None:
            yield truncate

    def ranges(self, contents: Contents, target: Target) -> Sequence[MessageRange]:
        """See :meth:`.Numbered.ranges`."""
        there = self.find(target)
        return [] if there is None else ranges_of(self.cluster, there, _starts(contents, target, there))

    def last_event(self, target: Target) -> LogPosition | None:
        """The highest LSN in a topic, by the last messages of each of its partitions; ``None`` without any."""
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
    """By partition the offset from which on a target's topic is ours."""
    begins = contents.get("begins", {}).get(target.table.label)
    offsets = begins["offsets"] if begins is not None and begins["id"] == topic.id else []
    return topic.beginning | dict(enumerate(offsets))


def telling(topic: str, last: LogPosition | None, topic_id: str | None) -> dict[str, Any]:
    """What the contents tell of a target's topic.

    :param last: the highest LSN of its messages; ``None`` when it has none.
    :param topic_id: which no topic of this name had before; ``None`` when it is not known.
    """
    return {"topic": topic, "last": None if last is None else format_lsn(last), "id": topic_id}


def id_told(contents: Contents, target: Target) -> str | None:
    """The id of a target's topic, as the contents tell it."""
    told: str | None = (contents.get("topics", {}).get(target.table.label) or {}).get("id")
    return told


def last_told(contents: Contents, target: Target) -> LogPosition | None:
    """The highest LSN of the messages of a target's topic, as the contents tell it."""
    told = contents.get("topics", {}).get(target.table.label) or {}
    return None if told.get("last") is None else parse_lsn(told["last"])
