"""Messages that a pipeline skips because they would stop it permanently; they are named in the commit record.

If a query fails on a message, or a sink refuses its row, every further attempt would fail again. So the message is
removed before the query, by a filter that keeps no state and is not part of a checkpoint. The skip is noted in the
record of each sink before the query goes on without the message. Later runs and comparisons then skip the same
messages.
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
"""The key of skipped messages in a record's ``identity``."""


@dataclass(frozen=True, order=True)
class Skip:
    """Skipped messages of a partition.

    :param first, last: their offsets, both included.
    :param cause: the reason, for people.
    """

    topic: str
    partition: int
    first: int
    last: int
    cause: str = ""

    @property
    def place(self) -> str:
        """Return the location of the messages, for texts."""
        return f"{self.topic}[{self.partition}] {self.first}{f'-{self.last}' if self.last > self.first else ''}"

    def within(self, start: Offsets, end: Offsets) -> bool:
        """Return whether some of the messages are between offsets."""
        p = str(self.partition)
        begin = start.get(self.topic, {}).get(p, 0)
        return self.last >= begin and self.first < end.get(self.topic, {}).get(p, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the messages as JSON values."""
        return asdict(self)


def skips_of(identity: Mapping[str, Any]) -> tuple[Skip, ...]:
    """Return the skipped messages in a commit record's ``identity``."""
    return tuple(Skip(**each) for each in identity.get(NOTED, ()))


def noted(skips: Iterable[Skip]) -> dict[str, Any]:
    """Return the entry for skipped messages in a record's ``identity``."""
    return {NOTED: [each.as_dict() for each in sorted(skips)]}


def without(raw: DataFrame, skips: Collection[Skip]) -> DataFrame:
    """Remove skipped messages from those read."""
    return raw.filter(~_among(skips)) if skips else raw


def only(raw: DataFrame, skips: Collection[Skip]) -> DataFrame:
    """Keep only skipped messages, and add the reason of each as ``cause``."""
    from pyspark.sql import functions as f

    causes = f.coalesce(*(f.when(_among([each]), f.lit(each.cause)) for each in skips))
    return raw.filter(_among(skips)).withColumn("cause", causes)


def _among(skips: Iterable[Skip]) -> Column:
    """Return the condition for the messages; single ones are in a list, because Spark fails on chains of thousands of
    ``or``.
    """
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
