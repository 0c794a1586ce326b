"""Summarizes topics between offsets in a reproducible way: the number of messages, and a checksum of their keys."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.kafka.topic import Topic


@dataclass(frozen=True)
class MessageRange:
    """The committed messages of a partition between two offsets.

    :param keys: sum of the CRC-32 of the keys, where a missing key counts 0. Both ``keys`` and ``messages`` of
        adjoining ranges can be added up.
    """

    topic: str
    partition: int
    begin: int
    end: int
    messages: int
    keys: int

    def as_dict(self) -> dict[str, Any]:
        """Return the range as JSON values."""
        return asdict(self)


def ranges_of(
    cluster: Cluster, topic: Topic, starts: Mapping[int, int], ends: Mapping[int, int] | None = None
) -> list[MessageRange]:
    """Read a topic, and return a range for each partition.

    :param starts: by partition, the offset to begin at; an offset before the first message means the first message.
    :param ends: by partition, the offset to stop before. The default is the end of the topic, or its first open
        transaction.
    """
    firsts = cluster.first(topic.name, list(starts))
    ends = cluster.committed_ends([topic])[topic.name] if ends is None else ends
    messages, keys = Counter[int](), Counter[int]()
    for received in cluster.read(topic, starts, ends=ends):
        for message in received:
            if message.offset < ends[message.partition]:
                messages[message.partition] += 1
                keys[message.partition] += zlib.crc32(message.key or b"")
    return [
        MessageRange(topic.name, p, max(start, firsts[p]), ends[p], messages[p], keys[p])
        for p, start in sorted(starts.items())
    ]
