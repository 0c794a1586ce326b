"""Takes messages of a topic from a consumer."""

from __future__ import annotations

from typing import NamedTuple

from airflow_cdc_provider.engine.kafka.client import Consumer, KafkaError, KafkaException

_MESSAGES = 10_000


class Received(NamedTuple):
    """A message that has been read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


def received(consumer: Consumer, seconds: float) -> tuple[list[Received], dict[int, int]]:
    """Return available messages, and by partition the end offsets that have been reached after them.

    :param seconds: seconds to wait for the first message.
    :raises KafkaException: when a message is an error.
    """
    found, ends = [], {}
    messages = consumer.consume(1, seconds)
    if messages:
        messages += consumer.consume(_MESSAGES, 0)
    for message in messages:
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is None:
            assert partition is not None
            assert offset is not None
            found.append(Received(partition, offset, message.key(), message.value()))
        elif error.code() != KafkaError._PARTITION_EOF:
            raise KafkaException(error)
        elif partition is not None and offset is not None:
            ends[partition] = offset
    return found, ends
