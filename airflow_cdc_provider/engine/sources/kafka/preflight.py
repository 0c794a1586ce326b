"""Checks topics without Spark, changing nothing."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import ConfigError, MissingPrivilege
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.kafka.addresses import readable_logins
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.avro_texts import READ_SCHEMAS
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.topics import Topics


def check(checks: Checks, pipeline: Pipeline) -> str | None:
    """Check topics, schema registry and checkpoint of a pipeline.

    :returns: the id of the brokers' cluster; ``None`` if they do not answer.
    """
    source = topic_settings(pipeline)
    topics = Topics(source)
    named = checks.run("source", topics.cluster.id, lambda id_: f"source {source.brokers} is reachable, cluster {id_}.")
    for warning in readable_logins("source", source.properties, source.registry, source.registry_properties):
        checks.warn("encryption", warning)
    if named is not None:
        checks.run("topics", topics.named, lambda found: f"Topics that are read: {len(found)}.")
        if source.dead_letters:
            checks.run("dead letters", lambda: _dead_letters(topics))
    if source.registry:
        checks.run("schema registry", lambda: _registry(Registry(source.registry, source.registry_properties)))
    checks.run("checkpoint", lambda: _checkpoint(pipeline))
    return named


def _registry(registry: Registry) -> str:
    try:
        registry.check()
    except MissingPrivilege as e:
        raise MissingPrivilege(e.message, READ_SCHEMAS) from e
    return f"The schema registry {registry.url} answers."


def _checkpoint(pipeline: Pipeline) -> str:
    checkpoint = Checkpoint.of(pipeline)
    checkpoint.require_own()
    return f"The checkpoint {checkpoint.url} contains only files of Spark."


def _dead_letters(topics: Topics) -> str:
    name = topics.source.dead_letters
    if not topics.described([name]):
        raise ConfigError(
            f"source.bad_records: {topics.source.brokers} has no topic {name}", "Create the topic, or name another one."
        )
    return f"Messages that cannot be read go to {name}."
