"""The position of a pipeline over topics in its commit record, and checks whether source and checkpoint can continue
there.

The record's ``identity`` contains the cluster, the topics, and the offsets up to which they have been read. It changes
in the same step as a unit's rows. Unit *n* is what a Spark batch has made of the messages between the offsets of unit
*n - 1* and its own. The number *n* takes the place of an LSN in other records.

Spark's checkpoint numbers batches from 0. The record names the checkpoint and the unit before it, so that a batch has
only one number, and the pipeline never continues with any other checkpoint.
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
"""The number of units made of the messages of a pipeline's topics."""

REPAIR = (
    "Run `airflow-cdc drop`, empty or drop the target tables, then run `airflow-cdc run`: it begins again at the first"
    " messages that the topics still have."
)


@dataclass(frozen=True)
class RecordedTopics:
    """The source's part of a commit record.

    :param applied: number of the last unit.
    :param begun: the offsets at which the pipeline began; partitions and topics added later were read from the start.
    :param offsets: the next offsets to read.
    :param topics: by name, the ids of the topics that have been read.
    :param stateful: the query keeps state from one batch to the next.
    :param checkpoint: the id of Spark's checkpoint; ``None`` before the first unit.
    :param base: the number of the last unit before the checkpoint's first batch.
    :param skipped: messages to skip.
    :param truncates: offsets of the truncates with which the next unit begins, in order.
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
        """Read it from a commit record.

        :raises ConfigError: when the record belongs to another kind of source.
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
        """Return the offsets up to which a truncate removes messages."""
        return self.truncates[-1] if self.truncates else self.truncated

    def shown(self) -> dict[str, Any]:
        """Return what ``status`` shows, as JSON values."""
        return {"offsets": self.offsets, "skipped": [asdict(skip) for skip in self.skipped]}

    def to_notes(self) -> dict[str, Any]:
        """Return the notes for the record."""
        return {name: value for name, value in asdict(self).items() if name != "applied"}

    def require_source(self, cluster: str, topics: Collection[Topic], beginnings: Offsets, ends: Offsets) -> None:
        """Refuse a source that cannot continue the record.

        :param topics: the record's topics that exist.
        :param beginnings, ends: their first and next offsets.
        :raises GateClosed: naming the difference and the repair.
        """
        if cluster != self.cluster:
            raise GateClosed(
                f"the brokers belong to cluster {cluster}, but the sink was filled from {self.cluster}",
                f"If `source.brokers` is wrong, correct it. If the cluster has been replaced: {REPAIR}",
            )
        there = {topic.name: topic.id for topic in topics}
        for name, id_ in self.topics.items():
            if there.get(name) != id_:
                raise GateClosed(
                    f"topic {name} {'has been recreated' if name in there else 'no longer exists'}, so the recorded"
                    " offsets do not apply to it",
                    REPAIR,
                )
        for name, partitions in self.offsets.items():
            for partition, offset in partitions.items():
                first, end = beginnings[name].get(partition, 0), ends[name].get(partition, 0)
                if first > offset:
                    raise GateClosed(
                        f"{name}[{partition}] now begins at offset {first}, but has been read only up to {offset}:"
                        " the messages between were removed",
                        f"{REPAIR} To prevent this, raise the topic's retention.",
                    )
                if end < offset:
                    raise GateClosed(
                        f"{name}[{partition}] ends at offset {end}, but the sink was filled from it up to {offset}",
                        REPAIR,
                    )

    @staticmethod
    def noted(offsets: Offsets, checkpoint: str | None, base: int, topics: Mapping[str, str]) -> dict[str, Any]:
        """Return what changes in the identity with a unit."""
        return {"offsets": offsets, "checkpoint": checkpoint, "base": base, "topics": dict(topics)}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint as found.

    :param id: ``None`` if there is no checkpoint.
    :param committed: the last batch that Spark has completed, -1 before the first.
    :param planned: the last batch whose offsets are in the checkpoint, -1 before the first.
    :param offsets: the offsets of the last batch in the record; ``None`` if the checkpoint lacks it, or is not the
        checkpoint that the record names.
    """

    id: str | None
    committed: int = -1
    planned: int = -1
    offsets: Offsets | None = None


def continues_checkpoint(positions: Collection[RecordedTopics], found: FoundCheckpoint, place: str) -> bool:
    """Return whether the query continues with a checkpoint; otherwise it begins with another one, at the records'
    offsets.

    A new beginning needs only the records, with two exceptions: a query with state, which is in the checkpoint, and a
    unit that is in one sink only, for example after a failure. Only Spark's checkpoint contains the end of such a unit.

    :param positions: the positions of all sinks.
    :param found: the checkpoint of the sink that has most, see :func:`most_advanced`.
    :param place: location of the checkpoint, for messages.
    :raises GateClosed: when the query has to continue with the checkpoint but that does not match the records, or when
        a sink lacks more than one unit that another one has.
    """
    most, least = most_advanced(positions), min(position.applied for position in positions)
    ahead = most.applied - least
    if ahead > 1:
        raise GateClosed(
            f"the sinks are at different units, {least} and {most.applied}; one may have been restored from a backup",
            f"Restore all sinks to the same moment. If that is impossible: {REPAIR}",
        )
    last = least - most.base - 1
    in_step = last - 1 <= found.committed <= last and last + ahead <= found.planned <= last + 1
    if in_step and found.offsets == most.offsets:
        return True
    what = "is missing" if found.id is None else "does not match the sink's commit record"
    if most.stateful and most.checkpoint is not None:
        raise GateClosed(
            f"the checkpoint {place}, which contains the state of the pipeline's query, {what}: sums would restart in"
            " the middle of their windows",
            f"Restore checkpoint and sink to the same moment. If that is impossible: {REPAIR}",
        )
    if ahead:
        raise GateClosed(
            f"the checkpoint {place} {what}, and the sinks are at different units",
            "Restore the checkpoint; or run each sink in its own pipeline.",
        )
    return False


def most_advanced(positions: Collection[RecordedTopics]) -> RecordedTopics:
    """Return the position of the sink that has most; sinks without its last unit may not know the checkpoint yet."""
    return max(positions, key=lambda position: position.applied)


def with_truncates(offsets: Offsets, floors: Offsets) -> Offsets:
    """Return how far messages have been examined when a unit ends; a truncate may lie after its end.

    :param offsets: the offsets at which the unit ends.
    :param floors: see :attr:`RecordedTopics.floors`.
    """
    reached = {topic: dict(found) for topic, found in offsets.items()}
    for topic, found in floors.items():
        there = reached.setdefault(topic, {})
        there.update({p: max(there.get(p, 0), offset) for p, offset in found.items()})
    return reached


def behind_truncates(raw: DataFrame, floors: Offsets) -> DataFrame:
    """Remove messages up to a truncate, and the truncate itself, from those read.

    :param floors: see :attr:`RecordedTopics.floors`.
    """
    from pyspark.sql import functions as f

    taken = [
        (f.col("topic") == topic) & (f.col("partition") == int(p)) & (f.col("offset") <= offset)
        for topic, partitions in floors.items()
        for p, offset in partitions.items()
    ]
    return raw.filter(~reduce(or_, taken)) if taken else raw
