"""Checks a Kafka sink, changing nothing; a transaction without messages is begun and ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from airflow_cdc_provider.engine.core.errors import ConfigError, SinkIsSource
from airflow_cdc_provider.engine.core.findings import Caution, Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.kafka.addresses import Properties, readable_logins
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink

_LONGEST = 249
_MAXIMUM = "transaction.max.timeout.ms"


def check(
    settings: KafkaSettings,
    sink: KafkaSink,
    checks: Checks,
    targets: Sequence[Target] | None,
    source: SourceIdentity | None,
) -> None:
    """Check the sink, and whether it can have the targets."""
    checks.run("sink", lambda: f"Kafka answers at {settings.place}, cluster {sink.cluster.id()}.")
    for warning in readable_logins("sink", settings.properties, settings.registry, settings.registry_properties):
        checks.warn("encryption", warning)
    if not checks.passed("sink"):
        return
    checks.run("commit record", partial(_journal, sink))
    if source is not None:
        checks.run("identity", partial(_identity, sink, source, targets))
    checks.run("transaction timeout", partial(_timeout, settings, sink))
    if checks.passed("transaction timeout"):
        checks.run("transactions", partial(_transactions, sink))
    if settings.registry is not None:
        checks.run("schema registry", partial(_registry, settings.registry, settings.registry_properties))
    if targets is not None:
        checks.run("topic names", partial(_names, sink, targets))
        if checks.passed("topic names"):
            checks.run("cleanup policy", partial(_cleanup, sink, targets))
            checks.run("topics", partial(_topics, sink, targets))


def _timeout(settings: KafkaSettings, sink: KafkaSink) -> str:
    wanted, allowed = int(settings.transaction_timeout * 1000), sink.cluster.broker_setting(_MAXIMUM)
    if allowed is None:
        raise Caution(f"The brokers do not report their {_MAXIMUM}.")
    if wanted > int(allowed):
        raise ConfigError(
            f"sink.transaction_timeout is {wanted} ms, but the brokers' {_MAXIMUM} is {allowed}",
            f"Lower `sink.transaction_timeout`, or raise {_MAXIMUM} of the brokers.",
        )
    return f"The brokers allow transactions of {settings.transaction_timeout:g} seconds."


def _transactions(sink: KafkaSink) -> str:
    sink.probe().end()
    return "Transactions can be started."


def _journal(sink: KafkaSink) -> str:
    sink.journal.require()
    return f"The topic {sink.journal.topic} keeps the commit record, or will be created."


def _identity(sink: KafkaSink, source: SourceIdentity, targets: Sequence[Target] | None) -> str:
    """Refuse to write topics that the pipeline reads, because that would never end."""
    record = sink.record()
    known = {target.table.label: target for target in (*(record.targets if record else ()), *(targets or ()))}
    own = (sink.journal.topic, sink.staging.topic, *map(sink.topics.name, known.values()))
    for topic in own:
        if source.holds(f"kafka {sink.cluster.id()}", topic):
            raise SinkIsSource(
                f"the pipeline reads {topic}, but also writes to it",
                "Set another topic in `sink.topic`, or exclude the pipeline's own topics from the source.",
            )
    return "The pipeline does not write to topics that it reads."


def _registry(url: str, properties: Properties) -> str:
    Registry(url, properties).check()
    return f"The schema registry answers at {url}."


def _names(sink: KafkaSink, targets: Sequence[Target]) -> str:
    for target in targets:
        topic = sink.topics.name(target)
        if len(topic) > _LONGEST:
            raise ConfigError(
                f"the topic of {target.table.label} would have {len(topic)} characters: {topic}",
                f"Kafka allows {_LONGEST}; shorten `sink.topic`, `sink.schema` or the pipeline's name.",
            )
    return "The name of every topic is valid in Kafka."


def _cleanup(sink: KafkaSink, targets: Sequence[Target]) -> str:
    names = [sink.topics.name(target) for target in targets]
    there = sink.cluster.topic_settings(sink.cluster.described(names).keys())
    default = sink.cluster.broker_setting("log.cleanup.policy") or ""
    made = {"cleanup.policy": default, **dict(sink.settings.topic_config)}
    policies = [there.get(name, made).get("cleanup.policy", default) for name in names]
    compacted = [target for target, policy in zip(targets, policies, strict=True) if "compact" in policy]
    if not compacted:
        return "Topics keep every change for the brokers' retention time."
    keyless = next((target for target in compacted if not target.table.key), None)
    if keyless is not None:
        raise ConfigError(
            f"the topic {sink.topics.name(keyless)} is compacted (cleanup.policy) and rejects messages without a"
            f" key, but {keyless.table.label} has no key",
            "Give the table a primary key, do not capture it, or set the topic's cleanup.policy to delete.",
        )
    if not sink.settings.truncates:
        return "Topics keep the last change of each key."
    raise Caution(
        "Compacted topics reject messages without a key: a TRUNCATE of a source table, or a re-read of a whole table,"
        " will stop the pipeline."
    )


def _topics(sink: KafkaSink, targets: Sequence[Target]) -> str:
    sink.check_targets(targets)
    return "No topic contains foreign messages."
