"""The restart gate of a pipeline over topics: whether these can continue what the commit record says."""

from __future__ import annotations

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import ConfigError
from airflow_cdc_provider.engine.sinks.base import Record
from airflow_cdc_provider.engine.topics.cluster import Topics, behind
from airflow_cdc_provider.engine.topics.position import Position
from airflow_cdc_provider.engine.topics.settings import Offsets


def pass_gate(topics: Topics, position: Position) -> Offsets:
    """Check that the topics still have what comes after the record's offsets.

    :returns: the ends of all topics that are read by now.
    :raises GateClosed: naming what differs and the repair.
    :raises ConfigError: when the pipeline file leaves out topics that have been read.
    """
    left = sorted(name for name in position.topics if not topics.source.reads(name))
    if left:
        key = "pattern" if topics.source.pattern else "topics"
        raise ConfigError(
            f"source.{key} leaves out {', '.join(left)}, which this pipeline has read",
            "Put them back, or use another pipeline name for the others. To have none of their messages from here on,"
            " leave them out in source.sql by _topic.",
        )
    known = topics.described(position.topics.keys())
    ends = topics.ends(known)
    position.require_source(topics.cluster.id(), known, topics.beginnings(known), ends)
    return ends


def lag_of(pipeline: Pipeline, record: Record | None) -> int | None:
    """How many messages the topics have that have not been read; ``None`` before there is a record.

    :raises ConnectionFailed: when the cluster cannot be reached.
    """
    assert pipeline.topics is not None
    ends = Topics(pipeline.topics).ends()
    return None if record is None else behind(Position.of(record).offsets, ends)
