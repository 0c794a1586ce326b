"""Messages that a pipeline passes over: of which one would stop it for good, named in the commit record.

A query that fails on a message, or a sink that refuses what becomes of it, would fail again with each attempt. So the
message is left out before the query, by a filter that keeps no state and that a checkpoint of the query knows nothing
of. It is noted in the record of each sink before the query goes on without it: whoever begins again, or compares, then
leaves out the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.sources.kafka.settings import Offsets

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NOTED = "skipped"
"""The key of a record's ``identity`` that they stand under."""


@dataclass(frozen=True, order=True)
class Skip:
    """Messages of a partition that are passed over.

    :param first, last: their offsets, both included.
    :param cause: why, for people.
    """

    topic: str
    partition: int
    first: int
    last: int
    cause: str = ""

    @property
    def place(self) -> str:
        """Where they are, for messages."""
        return f"{self.topic}[{self.partition}] {self.first}{f'-{self.last}' if self.last > self.first else ''}"

    def within(self, start: Offsets, end: Offsets) -> bool:
        """Return whether some of them stand between offsets."""
        p = str(self.partition)
        begin = start.get(self.topic, {}).get(p, 0)
        return self.last >= begin and self.first < end.get(self.topic, {}).get(p, 0)

    def as_dict(self) -> dict[str, Any]:
        """The messages as JSON values."""
        return asdict(self)


def skips_of(identity: Mapping[str, Any]) -> tuple[Skip, ...]:
    """Read what a commit record says."""
    return tuple(Skip(**each) for each in identity.get(NOTED, ()))


def noted(skips: Iterable[Skip]) -> dict[str, Any]:
    """Return what becomes of a record's ``identity``."""
    return {NOTED: [each.as_dict() for each in sorted(skips)]}


def without(raw: DataFrame, skips: Collection[Skip]) -> DataFrame:
    """Leave messages out of what is read of topics."""
    return raw.filter(~_among(skips)) if skips else raw


def only(raw: DataFrame, skips: Collection[Skip]) -> DataFrame:
    """Leave out all other messages, and add to each why it is passed over, as ``cause``."""
    from pyspark.sql import functions as f

    causes = f.coalesce(*(f.when(_among([each]), f.lit(each.cause)) for each in skips))
    return raw.filter(_among(skips)).withColumn("cause", causes)


def _among(skips: Iterable[Skip]) -> Column:
    """Return the condition for them: single messages in a list, as Spark fails on a chain of thousands of ``or``."""
    from pyspark.sql import functions as f

    of_partition: dict[tuple[str, int], list[Skip]] = {}
    for each in skips:
        of_partition.setdefault((each.topic, each.partition), []).append(each)
    conditions = []
    for (topic, partition), of_one in of_partition.items():
        single = f.col("offset").isin([each.first for each in of_one if each.first == each.last])
        spans = [f.col("offset").between(each.first, each.last) for each in of_one if each.first < each.last]
        conditions.append((f.col("topic") == topic) & (f.col("partition") == partition) & reduce(or_, spans, single))
    return reduce(or_, conditions)
