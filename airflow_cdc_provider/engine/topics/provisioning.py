"""Making a pipeline over topics ready, and removing it: checks, target tables, commit record.

At the source nothing is made. Where the topics begin is recorded before anything is read, so that a first run that
breaks off begins there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import ConfigError, MissingPrivilege, SinkIsSource
from airflow_cdc_provider.engine.findings import Checks, Finding, require
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.ledger import forget_ledger, read_ledger, write_ledger
from airflow_cdc_provider.engine.preflight import check_beside_source, preflight, target_name
from airflow_cdc_provider.engine.run import (
    commit_record_of,
    existing_record,
    record_if_any,
    refuse_second_writer,
    require_epoch,
    require_targets,
    sink_of,
    take_epoch,
)
from airflow_cdc_provider.engine.sinks.base import Record, Target
from airflow_cdc_provider.engine.sinks.kafka.avro import Registry
from airflow_cdc_provider.engine.sinks.kafka.journal import PREFIX
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.staging import SUFFIX
from airflow_cdc_provider.engine.state import State
from airflow_cdc_provider.engine.topics.avro import READ_SCHEMAS
from airflow_cdc_provider.engine.topics.checkpoint import Checkpoint
from airflow_cdc_provider.engine.topics.cluster import Topics
from airflow_cdc_provider.engine.topics.gate import pass_gate
from airflow_cdc_provider.engine.topics.position import Position
from airflow_cdc_provider.engine.topics.settings import TopicSource


def check(pipeline: Pipeline) -> list[Finding]:
    """Check topics, sinks and state of a pipeline without Spark; changes nothing."""
    checks, source = Checks(), _source(pipeline)
    topics = Topics(source)
    named = checks.run("source", topics.cluster.id, lambda id_: f"source {source.brokers} is reachable, cluster {id_}.")
    if named is not None:
        checks.run("topics", topics.named, lambda found: f"Topics that are read: {len(found)}.")
        if source.dead_letters:
            checks.run("dead letters", lambda: _dead_letters(topics))
        checks.run("identity", lambda: _identity(pipeline, named))
    if source.registry:
        checks.run("schema registry", lambda: _registry(Registry(source.registry, source.registry_properties)))
    checks.run("checkpoint", lambda: _checkpoint(pipeline))
    check_beside_source(checks, pipeline, None, None)
    return checks.findings


def provision(pipeline: Pipeline, takeover: bool) -> Record:
    """Create, or verify, target tables and commit record; take the epoch of a run.

    :raises CdcError: when something stands in the way; then nothing has been changed, but for sinks that have begun
        before one that refuses.
    """
    state = State(pipeline.state)
    for branch in pipeline.branches:
        if read_ledger(branch, state) is not None:
            existing_record(branch)  # there has been one
    require(preflight(pipeline))
    record = record_if_any(pipeline)
    refuse_second_writer(state, record.epoch if record else 0, None, takeover)
    new = [branch for branch in pipeline.branches if record is None or sink_of(branch).record() is None]
    for branch in pipeline.branches:
        if branch not in new:
            _require_same(branch, existing_record(branch), _meaning(pipeline))
    if new:
        _begin(pipeline, new, record)
    epoch = take_epoch(pipeline, state, takeover)
    record = existing_record(pipeline)
    require_epoch(record, epoch)
    write_ledger(pipeline, state, record)
    for branch in pipeline.branches:
        own = existing_record(branch)
        require_targets(sink_of(branch), own)
        pass_gate(Topics(_source(pipeline)), Position.of(own))
    return record


def _begin(pipeline: Pipeline, new: Sequence[Pipeline], record: Record | None) -> None:
    """Let the records of sinks begin, all at the same offsets; those that a try has begun which broke off say where.

    :raises ConfigError: when others have gone on from there.
    """
    if record is not None and record.applied:
        raise ConfigError(
            f"sink: {new[0].sink.place} has been added to a pipeline that has read its topics up to unit"
            f" {record.applied}: it would lack what came before",
            "Fill it by a pipeline of another name.",
        )
    table, stateful = _look_at_query(pipeline)
    identity = _first_position(pipeline, stateful) if record is None else _without_mode(record.identity)
    for branch in new:
        target = Target(table, *target_name(branch, table))
        sink_of(branch).prepare([target], [], {**identity, "mode": branch.sink.mode}, 0)


def _look_at_query(pipeline: Pipeline) -> tuple[Table, bool]:
    from airflow_cdc_provider.engine.session import spark_session
    from airflow_cdc_provider.engine.topics.query import shape_of

    with spark_session(pipeline, "provision") as spark:
        shape = shape_of(spark, pipeline)
    return shape.table, shape.stateful


def _first_position(pipeline: Pipeline, stateful: bool) -> dict[str, Any]:
    source = _source(pipeline)
    topics = Topics(source)
    named = topics.named()
    offsets = topics.beginnings(named) if source.starting == "earliest" else topics.ends(named)
    ids = {topic.name: topic.id for topic in named}
    return Position(0, topics.cluster.id(), offsets, offsets, ids, _meaning(pipeline), stateful, None, 0).to_identity()


def _without_mode(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != "mode"}


def _meaning(pipeline: Pipeline) -> Mapping[str, Any]:
    """What of the file decides about rows and state; the sinks may decide about the output."""
    from airflow_cdc_provider.engine.topics.query import output_of

    return {**_source(pipeline).meaning, "output": output_of(pipeline)}


def _require_same(branch: Pipeline, record: Record, meaning: Mapping[str, Any]) -> None:
    """Refuse a file whose meaning is no longer that of what has been written, or of the state that is kept.

    :param meaning: see :func:`_meaning`, of the whole pipeline.
    :raises ConfigError: naming the key.
    """
    position = Position.of(record)
    if record.identity["mode"] != branch.sink.mode:
        raise ConfigError(
            f"sink.mode: {branch.sink.mode!r}, but the pipeline has been provisioned as {record.identity['mode']!r}",
            "Put the mode back, or use another pipeline name for the other mode.",
        )
    for target in record.targets:
        if (target.schema, target.name) != target_name(branch, target.table):
            raise ConfigError(
                f"sink.schema: {branch.sink.schema!r}, but {target.table.label} has been provisioned into"
                f" {target.schema}.{target.name}",
                "Put the schema back, or use another pipeline name for the other schema.",
            )
    fixed = meaning.keys() if position.stateful else ("table", "key")
    for name in fixed:
        if meaning[name] != position.query[name]:
            raise ConfigError(
                f"source.{name}: {meaning[name]!r}, but the pipeline has been provisioned with"
                f" {position.query[name]!r}",
                "Put it back, or use another pipeline name. A query that keeps state cannot be changed: what it has"
                " added up is of the query of before.",
            )


def _registry(registry: Registry) -> str:
    try:
        registry.check()
    except MissingPrivilege as e:
        raise MissingPrivilege(e.message, READ_SCHEMAS) from e
    return f"The schema registry {registry.url} answers."


def _checkpoint(pipeline: Pipeline) -> str:
    checkpoint = Checkpoint.of(pipeline)
    checkpoint.require_own()
    return f"The checkpoint {checkpoint.url} holds nothing of others."


def _identity(pipeline: Pipeline, cluster: str) -> str:
    """Refuse to read what the pipeline itself writes: it would never come to an end."""
    source = _source(pipeline)
    schema, name = source.schema_and_name
    for sink in pipeline.sinks:
        if not isinstance(sink, KafkaSettings) or Cluster(sink.brokers, sink.properties).id() != cluster:
            continue
        own = f"{PREFIX}{pipeline.name}"
        target = sink.topic_of(pipeline.name, sink.schema.replace("{schema}", schema), name)
        for topic in (target, own, f"{own}{SUFFIX}"):
            if source.reads(topic):
                raise SinkIsSource(
                    f"source.{'pattern' if source.pattern else 'topics'} reads {topic}, which the pipeline writes",
                    "Give the sink another topic by sink.topic, or let source.pattern leave the pipeline's own out.",
                )
    return "The pipeline reads no topic that it writes."


def _dead_letters(topics: Topics) -> str:
    name = topics.source.dead_letters
    if not topics.described([name]):
        raise ConfigError(
            f"source.bad_records: {topics.source.brokers} has no topic {name}", "Create it, or name another one."
        )
    return f"Messages that cannot be read go to {name}."


def remove(pipeline: Pipeline, takeover: bool) -> None:
    """Remove the state, checkpoint included, the sinks' records and what is staged; never target tables or topics.

    :raises SecondWriter: when another run is alive and ``takeover`` is not set.
    """
    state, records = State(pipeline.state), commit_record_of(pipeline)
    record = record_if_any(pipeline)
    refuse_second_writer(state, record.epoch if record else 0, None, takeover)
    forget_ledger(state)
    records.drop()
    Checkpoint.of(pipeline).remove()
    state.remove("")


def _source(pipeline: Pipeline) -> TopicSource:
    assert pipeline.topics is not None
    return pipeline.topics
