"""The ``sink`` section of a pipeline file for Kafka."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self, cast

from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.section_values import (
    as_flag,
    as_positive_integer,
    as_positive_seconds,
    as_text,
    one_of,
)
from airflow_cdc_provider.engine.kafka.addresses import Properties, as_registry, brokers_of, secrets_of

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.core.section import Section
    from airflow_cdc_provider.engine.sinks.kafka.formats.plain import Format as MessageFormat

FormatName = Literal["debezium", "json", "avro"]
Decimals = Literal["string", "precise"]

TOPIC = "{pipeline}.{schema}.{table}"
TIMEOUT = 300.0

_NOT_IN_TOPICS = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED = ("bootstrap.servers", "transactional.id", "transaction.timeout.ms", "isolation.level", "enable.idempotence")


@dataclass(frozen=True)
class KafkaSettings:
    """Settings of a Kafka sink.

    :param brokers: ``host:port``, separated by commas.
    :param properties: properties of the client, under librdkafka's names.
    :param format: format of the messages.
    :param topic: pattern of the topics' names, with ``{pipeline}``, ``{schema}`` and ``{table}``.
    :param partitions: number of partitions of created topics, -1 for the brokers' default.
    :param replicas: number of replicas, likewise.
    :param topic_config: configuration of created topics.
    :param transaction_timeout: seconds after which the brokers end a transaction.
    :param registry: URL of the schema registry, for Avro.
    :param registry_properties: properties of its client.
    :param decimals: how Debezium's format writes ``numeric``.
    :param schemas: whether JSON in Debezium's format contains its schema.
    :param tombstones: whether a message without a value follows a delete in Debezium's format.
    :param truncates: whether a ``TRUNCATE`` is written as a message.
    :param database: name of the source's database in Debezium's format.
    :param adopt: whether to write to topics with foreign messages.
    """

    brokers: str
    properties: Properties = field(default=(), repr=False)
    format: FormatName = "debezium"
    topic: str = TOPIC
    partitions: int = -1
    replicas: int = -1
    topic_config: Properties = ()
    transaction_timeout: float = TIMEOUT
    registry: str | None = None
    registry_properties: Properties = field(default=(), repr=False)
    decimals: Decimals = "string"
    schemas: bool = False
    tombstones: bool = True
    truncates: bool = True
    database: str = ""
    adopt: bool = False
    schema: str = "{schema}"
    mode: Mode = "changelog"
    type: Literal["kafka"] = "kafka"

    @classmethod
    def parse(cls, section: Section) -> Self:
        """Parse the section."""
        section.take("mode", _changelog, "changelog")
        brokers, properties = brokers_of(section, _RESERVED)
        format_ = cast(FormatName, section.take("format", one_of("debezium", "json", "avro"), "debezium"))
        avro = format_ == "avro"
        debezium = format_ == "debezium"
        return cls(
            brokers=brokers,
            properties=properties,
            format=format_,
            topic=section.take("topic", as_topic, TOPIC),
            partitions=section.take("partitions", as_positive_integer, -1),
            replicas=section.take("replicas", as_positive_integer, -1),
            topic_config=section.texts("topic_config"),
            transaction_timeout=section.take("transaction_timeout", as_positive_seconds, TIMEOUT),
            registry=section.take("registry", as_registry, secret=True) if avro else None,
            registry_properties=section.texts("registry_properties", secret=True) if avro else (),
            decimals=cast(Decimals, section.take("decimals", one_of("string", "precise"), "string"))
            if avro or debezium
            else "string",
            schemas=section.take("schemas", as_flag, False) if debezium else False,
            tombstones=section.take("tombstones", as_flag, True) if avro or debezium else True,
            truncates=section.take("truncates", as_flag, False) if avro or debezium else True,
            database=section.take("database", as_text, "") if avro or debezium else "",
            adopt=section.take("adopt", as_flag, False),
            schema=section.take("schema", as_text, "{schema}"),
        )

    @property
    def place(self) -> str:
        """Return the brokers, for messages."""
        return self.brokers

    @property
    def secrets(self) -> Sequence[str]:
        """Return texts that must not appear in logs."""
        return secrets_of((*self.properties, *self.registry_properties))

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return no configuration: messages are written without the JVM."""
        return {}

    def topic_of(self, pipeline: str, schema: str, name: str) -> str:
        """Return the topic of a target."""
        topic = self.topic.format(pipeline=pipeline, schema=schema, table=name)
        return _NOT_IN_TOPICS.sub("_", topic)

    def messages(self, pipeline: str) -> MessageFormat:
        """Return the format of messages.

        :param pipeline: name of the pipeline.
        """
        if self.format == "json":
            from airflow_cdc_provider.engine.sinks.kafka.formats.plain import PlainFormat

            return PlainFormat()
        if self.registry is None:
            from airflow_cdc_provider.engine.sinks.kafka.formats.debezium import DebeziumFormat

            return DebeziumFormat(pipeline, self.database, self.decimals, self.schemas, self.tombstones)
        from airflow_cdc_provider.engine.kafka.schema_registry import Registry
        from airflow_cdc_provider.engine.sinks.kafka.formats.avro import AvroFormat

        registry = Registry(self.registry, self.registry_properties)
        return AvroFormat(registry, pipeline, self.database, self.decimals, self.tombstones)

    def with_database(self, name: str) -> Self:
        """Return the settings with the name of the source's database, if none is set."""
        return self if self.database or self.format == "json" else replace(self, database=name)

    def dataset(self, pipeline: str, schema: str, name: str) -> tuple[str, str]:
        """Return the dataset of a target."""
        return f"kafka://{self.brokers.partition(',')[0]}", self.topic_of(pipeline, schema, name)


def as_topic(value: object) -> str:
    """Return a pattern of topic names; one without a table's name fits a single table only, see ``require_apart``."""
    wanted = "a pattern with {table} and {schema} where needed, as in `shop.{schema}.{table}`, or the name of one topic"
    text = as_text(value)
    try:
        name = text.format(pipeline="p", schema="s", table="t")
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ValueError(wanted) from None
    if _NOT_IN_TOPICS.search(name):
        raise ValueError(wanted)
    return text


def _changelog(value: object) -> str:
    if value != "changelog":
        raise ValueError("changelog: a topic keeps all messages; a compacted topic keeps the last row of each key")
    return "changelog"
