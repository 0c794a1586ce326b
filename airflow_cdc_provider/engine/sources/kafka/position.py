"""Where a pipeline over topics is, as its commit record says, and whether source and checkpoint can go on from there.

The record's ``identity`` says which cluster and topics have been read, and up to which offsets: these change in the
same step as a unit's rows. Unit *n* is what a batch of Spark has made of the messages between the offsets of unit
*n - 1* and its own, and *n* stands where an LSN does in other records.

Spark's checkpoint numbers batches from 0. The record names the checkpoint and the unit that came before it, so that a
batch has one number only, and none but the named checkpoint is ever gone on with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Record, noted_by
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, skips_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

UnitNumber: TypeAlias = LogPosition
"""How many units have been made of the messages of a pipeline's topics."""

REPAIR = (
    "Run `airflow-cdc drop`, empty or drop the target tables, then `airflow-cdc run`: it begins again from the first"
    " messages that the topics still have."
)


@dataclass(frozen=True)
class RecordedTopics:
    """What the record says.

    :param applied: number of the last unit.
    :param begun: the offsets at which the pipeline began; what came to partitions and topics later was read as a whole.
    :param offsets: from which on nothing has been read.
    :param topics: ids of the topics that have been read, by name.
    :param stateful: the query keeps state from one batch to the next.
    :param checkpoint: the id of Spark's checkpoint; ``None`` before the first unit.
    :param base: the number of the last unit before the checkpoint's first batch.
    :param skipped: messages that are passed over.
    :param truncates: offsets of truncates that the next unit begins with, in their order.
    :param truncated: offsets up to which a truncate has been applied.
    """

    applied: UnitNumber
    cluster: str
    begun: Offsets
    offsets: Offsets
    topics: Mapping[str, str]
    query: Mapping[str, Any]
    stateful: bool
    checkpoint: str | None
    base: int
    skipped: tuple[Skip, ...] = ()
    truncates: tuple[Offsets, ...] = ()
    truncated: Offsets = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record) -> RecordedTopics:
        """Read it.

        :raises ConfigError: when it is that of another kind of source.
        """
        noted = noted_by("kafka", record.identity)
        return cls(
            record.applied,
            noted["cluster"],
            noted["begun"],
            noted["offsets"],
            noted["topics"],
            noted["query"],
            noted["stateful"],
            noted["checkpoint"],
            noted["base"],
            skips_of(noted),
            tuple(noted["truncates"]),
            noted["truncated"],
        )

    @property
    def floors(self) -> Offsets:
        """The offsets up to which messages are of before a truncate."""
        return self.truncates[-1] if self.truncates else self.truncated

    def shown(self) -> dict[str, Any]:
        """What ``status`` shows of it, as JSON values."""
        return {"offsets": self.offsets, "skipped": [asdict(skip) for skip in self.skipped]}

    def to_notes(self) -> dict[str, Any]:
        """What is noted in the record."""
        return {name: value for name, value in asdict(self).items() if name != "applied"}

    def require_source(self, cluster: str, topics: Collection[Topic], beginnings: Offsets, ends: Offsets) -> None:
        """Refuse a source that cannot continue what the record says.

        :param topics: those of the record's that are there.
        :param beginnings, ends: their first and next offsets.
        :raises GateClosed: naming what differs and the repair.
        """
        if cluster != self.cluster:
            raise GateClosed(
                f"the brokers are of cluster {cluster}, but the sink was filled from {self.cluster}",
                f"If `source.brokers` is wrong, correct it. If the cluster has been replaced: {REPAIR}",
            )
        there = {topic.name: topic.id for topic in topics}
        for name, id_ in self.topics.items():
            if there.get(name) != id_:
                raise GateClosed(
                    f"topic {name} {'has been made anew' if name in there else 'no longer exists'}: offsets of before"
                    " mean nothing in it",
                    REPAIR,
                )
        for name, partitions in self.offsets.items():
            for partition, offset in partitions.items():
                first, end = beginnings[name].get(partition, 0), ends[name].get(partition, 0)
                if first > offset:
                    raise GateClosed(
                        f"{name}[{partition}] begins at offset {first} by now, but has been read up to {offset} only:"
                        " what lay between has been removed",
                        f"{REPAIR} So that it does not happen again, raise the topic's retention.",
                    )
                if end < offset:
                    raise GateClosed(
                        f"{name}[{partition}] ends at offset {end}, but the sink was filled from it up to {offset}",
                        REPAIR,
                    )

    @staticmethod
    def noted(offsets: Offsets, checkpoint: str | None, base: int, topics: Mapping[str, str]) -> dict[str, Any]:
        """What becomes of the identity with a unit."""
        return {"offsets": offsets, "checkpoint": checkpoint, "base": base, "topics": dict(topics)}


@dataclass(frozen=True)
class Found:
    """A checkpoint as it is found.

    :param id: ``None`` where there is none.
    :param committed: the last batch that Spark counts as done, -1 before the first.
    :param planned: the last batch of which the offsets stand there, -1 before the first.
    :param offsets: of the batch that the record knows last; ``None`` where the checkpoint does not have it, or is not
        the one that the record names.
    """

    id: str | None
    committed: int = -1
    planned: int = -1
    offsets: Offsets | None = None


def goes_on(positions: Collection[RecordedTopics], found: Found, place: str) -> bool:
    """Whether the query goes on with a checkpoint; otherwise it begins with another one, at the records' offsets.

    Nothing but the records is needed for that, unless the query has state, which the checkpoint keeps, or a unit is in
    one sink only, as after one that failed: Spark alone knows where it ended.

    :param positions: of all sinks.
    :param found: what stands there of the one that has most, see :func:`foremost`.
    :param place: of the checkpoint, for messages.
    :raises GateClosed: when it has to go on with the checkpoint, and that is not the one that goes with the records; or
        when a sink lacks more than a unit that another one has.
    """
    most, least = foremost(positions), min(position.applied for position in positions)
    ahead = most.applied - least
    if ahead > 1:
        raise GateClosed(
            f"the sinks stand at different units, {least} and {most.applied}, as when one is restored from a backup",
            f"Restore all sinks of the same moment. Without that: {REPAIR}",
        )
    last = least - most.base - 1
    in_step = last - 1 <= found.committed <= last and last + ahead <= found.planned <= last + 1
    if in_step and found.offsets == most.offsets:
        return True
    what = "is gone" if found.id is None else "is not the one that goes with the sink's commit record"
    if most.stateful and most.checkpoint is not None:
        raise GateClosed(
            f"the checkpoint {place}, which keeps the state of the pipeline's query, {what}: sums would begin anew in"
            " the middle of their windows",
            f"Restore checkpoint and sink of the same moment. Without that: {REPAIR}",
        )
    if ahead:
        raise GateClosed(
            f"the checkpoint {place} {what}, and the sinks stand at different units",
            "Restore the checkpoint; or run each sink as a pipeline of its own.",
        )
    return False


def foremost(positions: Collection[RecordedTopics]) -> RecordedTopics:
    """Of a pipeline's sinks the one that has most: those that lack its last unit may not know the checkpoint yet."""
    return max(positions, key=lambda position: position.applied)


def with_truncates(offsets: Offsets, floors: Offsets) -> Offsets:
    """Return how far messages have been looked at once a unit ends: up to a truncate, also where that stands behind it.

    :param offsets: at which the unit ends.
    :param floors: see :attr:`RecordedTopics.floors`.
    """
    reached = {topic: dict(found) for topic, found in offsets.items()}
    for topic, found in floors.items():
        there = reached.setdefault(topic, {})
        there.update({p: max(there.get(p, 0), offset) for p, offset in found.items()})
    return reached


def behind_truncates(raw: DataFrame, floors: Offsets) -> DataFrame:
    """Leave out of what is read of topics what a truncate has taken, and the truncate itself.

    :param floors: see :attr:`RecordedTopics.floors`.
    """
    from pyspark.sql import functions as f

    taken = [
        (f.col("topic") == topic) & (f.col("partition") == int(p)) & (f.col("offset") <= offset)
        for topic, partitions in floors.items()
        for p, offset in partitions.items()
    ]
    return raw.filter(~reduce(or_, taken)) if taken else raw
