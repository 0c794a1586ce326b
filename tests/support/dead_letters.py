"""Reads the dead letters of a pipeline."""

from __future__ import annotations

from confluent_kafka import Consumer, TopicPartition

from tests.support.kafka_server import SECONDS, committed, properties
from tests.support.topics import TopicsPipeline


def dead_letters(pipeline: TopicsPipeline, topic: str) -> dict[tuple[str, int], str]:
    """Return the reason for each message that was set aside, by partition and offset; none occurs twice."""
    count = len(committed(pipeline.broker.brokers, topic))
    consumer = Consumer(properties(pipeline.broker.brokers, group_id="tests", enable_partition_eof=False))
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    for _ in range(count):
        message = consumer.poll(SECONDS)
        assert message is not None
        found.append({name: bytes(value).decode() for name, value in message.headers() or ()})
    consumer.close()
    told = {
        (each["airflow_cdc.partition"], int(each["airflow_cdc.offset"])): each["airflow_cdc.error"] for each in found
    }
    assert len(told) == len(found)
    assert {each["airflow_cdc.topic"] for each in found} <= {pipeline.topic}
    return told
