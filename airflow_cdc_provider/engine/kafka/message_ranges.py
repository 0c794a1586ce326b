"""What topics hold between offsets, told so that anybody can count it again: messages, and a sum of their keys."""

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
    """The committed messages of a partition from an offset on, up to another one.

    :param keys: the sum of the CRC-32 of their keys, of which one that is missing has 0. Those of adjoining ranges add
        up, and so do the numbers of their messages.
    """

    topic: str
    partition: int
    begin: int
    end: int
    messages: int
    keys: int

    def as_dict(self) -> dict[str, Any]:
        """The range as JSON values."""
        return asdict(self)


def ranges_of(
    cluster: Cluster, topic: Topic, starts: Mapping[int, int], ends: Mapping[int, int] | None = None
) -> list[MessageRange]:
    """Read a topic.

    :param starts: by partition the offset to begin at; one before the first message that is there means that.
    :param ends: by partition the offset before which to end; the topic's end, or its first open transaction, if
        nothing is given.
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
