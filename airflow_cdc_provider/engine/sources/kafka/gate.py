"""The restart gate of a pipeline over topics: checks whether the topics can continue the commit record."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, topic_settings
from airflow_cdc_provider.engine.sources.kafka.topics import Topics, behind


def pass_gate(topics: Topics, position: RecordedTopics) -> Offsets:
    """Check that the topics still have all messages after the record's offsets.

    :returns: the ends of all topics read so far, including open transactions and the messages after them.
    :raises GateClosed: naming the difference and the repair.
    :raises ConfigError: when the pipeline file leaves out topics that have been read.
    """
    left = sorted(name for name in position.topics if not topics.source.reads(name))
    if left:
        key = "pattern" if topics.source.pattern else "topics"
        raise ConfigError(
            f"source.{key} leaves out {', '.join(left)}, which this pipeline has read",
            "Put them back, or use another pipeline name for the others. To ignore their messages from now on,"
            " filter by _topic in source.sql.",
        )
    known = topics.described(position.topics.keys())
    ends = topics.written_ends(known)
    position.require_source(topics.cluster.id(), known, topics.beginnings(known), ends)
    return ends


def lag_of(pipeline: Pipeline, record: Record | None) -> dict[str, int | None]:
    """Return how far a pipeline is behind its topics, for ``status``; ``None`` before there is a record.

    :returns: ``lag_messages``, the number of unread messages; and ``held_messages``, the number of those that cannot be
        read yet because they are in or after a transaction that a producer has left open.
    :raises ConnectionFailed: when the cluster cannot be reached.
    """
    topics = Topics(topic_settings(pipeline))
    named = topics.named()
    readable, written = topics.ends(named), topics.written_ends(named)
    if record is None:
        return {"lag_messages": None, "held_messages": None}
    offsets = RecordedTopics.of(record).offsets
    lag = behind(offsets, written)
    return {"lag_messages": lag, "held_messages": lag - behind(offsets, readable)}
