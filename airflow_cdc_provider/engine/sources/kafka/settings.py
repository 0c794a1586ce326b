"""The ``source`` section of a pipeline file for Kafka topics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, cast, get_args

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import noted_by
from airflow_cdc_provider.engine.core.section import Section, without_password
from airflow_cdc_provider.engine.core.section_values import as_positive_integer, as_seconds, as_text, one_of
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.kafka.addresses import (
    Properties,
    as_registry,
    brokers_of,
    java_properties,
    require_for_java,
    secrets_of,
)
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""Maven coordinates of Spark's Kafka source, for the Spark version that the engine needs."""

Lenient: TypeAlias = Literal["trailing", "encoding", "decimals", "floats", "times"]
"""Permitted changes of values: text after the object is dropped, invalid UTF-8 becomes U+FFFD or ``?``, numbers are
rounded to their column, and times are truncated to microseconds or dates.
"""
Unit: TypeAlias = Literal["days", "seconds", "milliseconds", "microseconds"]
"""The unit of a number for a date or time, counted from 1970."""

UNAVAILABLE = "__debezium_unavailable_value"
"""The text that Debezium writes by default for a value that an update has not changed."""

VIEW = "messages"
"""The name of the decoded messages in the query."""

TopicFormat: TypeAlias = Literal["json", "avro", "debezium", "text", "bytes"]
OutputMode: TypeAlias = Literal["update", "append"]
Starting: TypeAlias = Literal["earliest", "latest"]
Late: TypeAlias = Literal["drop", "count"]
Offsets: TypeAlias = Mapping[str, Mapping[str, int]]
"""The next offset to read, by topic and partition; JSON values."""

_WHOLE = {"text": "value STRING NOT NULL", "bytes": "value BINARY NOT NULL"}
"""The columns of the view for values that are taken as a whole."""

_STATE_STORE = "spark.sql.streaming.stateStore"

SPARK_CONF: Mapping[str, str] = {
    "spark.jars.packages": PACKAGE,
    f"{_STATE_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    # Each attempt of a batch writes files with unique names, so that an overtaken driver cannot damage the state.
    f"{_STATE_STORE}.checkpointFormatVersion": "2",
    # Also covers options, which appear in plans and may contain a login.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|[.]pem|keystore[.]key",
    # This number of state stores commits in each batch, however small the batch is.
    "spark.sql.shuffle.partitions": "4",
    # Bytes of byte code, above which Java never compiles a method. The generated method for a stage that checks the
    # values of eight columns is longer; interpreted, it took a third of a batch.
    "spark.sql.codegen.hugeMethodLimit": "8000",
}
"""The Spark configuration that queries over topics need."""

_RESERVED = (
    *("bootstrap.servers", "isolation.level", "group.id", "auto.offset.reset", "enable.auto.commit"),
    *("enable.auto.offset.store", "enable.partition.eof", "allow.auto.create.topics"),
    *("key.deserializer", "value.deserializer", "key.serializer", "value.serializer", "interceptor.classes"),
)
"""Properties that the engine or Spark sets."""
_LABEL = re.compile(r"[^.]+\.[^.]+")
_INTERNAL = "__"
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class TopicSettings:
    """Topics whose messages are read, and the query that makes rows of them.

    :param brokers: ``host:port``, separated by commas.
    :param properties: properties of the client, under librdkafka's names.
    :param topics: names of topics; empty with a ``pattern``.
    :param pattern: a regular expression that whole names match, in Python and Java; empty with ``topics``.
    :param starting: where to begin in topics without a recorded offset.
    :param format: format of the messages' values; ``text`` and ``bytes`` take them as a whole.
    :param registry: URL of the schema registry for values in Avro; empty for values in JSON.
    :param registry_properties: properties of the registry's client.
    :param columns: columns of the values, as a Spark schema; columns with ``NOT NULL`` are required.
    :param table: the name of the result, as ``schema.table``; it corresponds to the source table of other pipelines.
    :param key: columns of the result that identify its rows.
    :param sql: a query over :data:`VIEW`; empty for all columns.
    :param watermark: the column of the values with the event time, and the seconds that an event may be late; an empty
        column means no watermark.
    :param late: whether later rows are only dropped, or also counted.
    :param output: whether windows are written at every change, or once when they are closed; empty for the default of
        the sinks' mode.
    :param dead_letters: the topic for messages that cannot be read; empty if they stop the pipeline.
    :param max_batch_messages: maximum number of messages of a unit.
    :param checkpoint: URL of Spark's checkpoint; empty for a directory in the state directory.
    :param unavailable: the text that Debezium writes for a value that an update has not changed.
    :param units: by column, the unit of numbers for dates or times.
    :param lenient: permitted changes of values; without them, such messages count as unreadable.
    """

    brokers: str
    properties: Properties = field(repr=False)
    topics: tuple[str, ...]
    pattern: str
    starting: Starting
    format: TopicFormat
    columns: str
    table: str
    key: tuple[str, ...]
    sql: str
    watermark: tuple[str, float]
    late: Late
    output: OutputMode | Literal[""]
    dead_letters: str
    max_batch_messages: int
    checkpoint: str
    registry: str = ""
    registry_properties: Properties = field(default=(), repr=False)
    unavailable: str = UNAVAILABLE
    units: tuple[tuple[str, Unit], ...] = ()
    lenient: frozenset[Lenient] = frozenset()
    type: Literal["kafka"] = "kafka"

    @classmethod
    def parse(cls, section: Section, pipeline: str) -> Self:
        """Parse the section's keys except ``type``, which has been parsed already.

        :raises ConfigError: naming the key's path, the value and what would be right.
        """
        brokers, properties = brokers_of(section, _RESERVED)
        require_for_java(properties)
        nothing: tuple[str, ...] = ()
        topics, pattern = section.take("topics", _topics, nothing), section.take("pattern", _pattern, "")
        if bool(topics) == bool(pattern):
            raise ConfigError(
                "source needs either topics, a list of names, or pattern, a regular expression",
                "Set one of source.topics and source.pattern.",
            )
        whole = cast(TopicFormat | Literal[""], section.take("value", one_of(*_WHOLE), ""))
        format_ = whole or cast(TopicFormat, section.take("format", one_of("json", "avro", "debezium"), "json"))
        debezium = format_ == "debezium"
        registry = ""
        if format_ in ("avro", "debezium"):
            registry = section.take("registry", as_registry, None if format_ == "avro" else "", secret=True)
        strict: tuple[str, frozenset[Lenient]] = ("", frozenset())
        dead_letters, lenient = section.take("bad_records", lambda value: _bad_records(section, value), strict)
        found = cls(
            brokers=brokers,
            properties=properties,
            topics=topics,
            pattern=pattern,
            starting=cast(Starting, section.take("starting", one_of("earliest", "latest"), "earliest")),
            format=format_,
            columns=_WHOLE[whole] if whole else section.take("columns", as_text),
            table=section.take("table", _label),
            key=section.take("key", _names, nothing),
            sql=section.take("sql", as_text, ""),
            watermark=section.take("watermark", lambda value: _watermark(section, value), ("", 0.0)),
            late=cast(Late, section.take("late", one_of("drop", "count"), "drop")),
            output=cast(OutputMode, section.take("output", one_of("update", "append"), "")),
            dead_letters=dead_letters,
            lenient=lenient,
            unavailable=section.take("unavailable_value", as_text, UNAVAILABLE) if debezium else UNAVAILABLE,
            units=section.take("epochs", _units, ()),
            max_batch_messages=section.take("max_batch_messages", as_positive_integer, 100_000),
            checkpoint=section.take("checkpoint", _url, ""),
            registry=registry,
            registry_properties=section.texts("registry_properties", secret=True) if registry else (),
        )
        if found.dead_letters and found.reads(found.dead_letters):
            raise ConfigError(
                f"source.bad_records: {found.dead_letters} is one of the topics that are read", "Name another topic."
            )
        return found

    def reads(self, topic: str) -> bool:
        """Return whether a topic is read; a pattern never matches Kafka's internal topics, as in Kafka's consumer."""
        if not self.pattern:
            return topic in self.topics
        return topic[:2] != _INTERNAL and re.fullmatch(self.pattern, topic) is not None

    @property
    def topic_options(self) -> Mapping[str, str]:
        """Return Spark's options for the same topics; Spark searches for its pattern anywhere in a name."""
        if not self.pattern:
            return {"subscribe": ",".join(self.topics)}
        return {"subscribePattern": f"^(?!{_INTERNAL})(?:{self.pattern})$"}

    @property
    def place(self) -> str:
        """Return the topics, for messages."""
        return f"{self.pattern or ', '.join(self.topics)} at {self.brokers}"

    @property
    def secrets(self) -> Sequence[str]:
        """Return texts that must not appear in logs."""
        return secrets_of((*self.properties, *self.registry_properties))

    @property
    def captured(self) -> tuple[str, ...]:
        """Return the topics, or the pattern of their names."""
        return self.topics or (self.pattern,)

    @property
    def columns_key(self) -> str:
        """Return the key that selects columns."""
        return "source.sql"

    @property
    def database(self) -> str | None:
        """Return ``None``, as there is no database."""
        return None

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """Return the topics that have been read, as datasets."""
        server = f"kafka://{self.brokers.partition(',')[0]}"
        return [(server, topic) for topic in sorted(noted_by("kafka", identity)["topics"])]

    @property
    def schema_and_name(self) -> tuple[str, str]:
        """Return the two parts of :attr:`table`."""
        schema, _, name = self.table.partition(".")
        return schema, name

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """Return the Spark configuration that the query needs; settings in the pipeline file take precedence."""
        return SPARK_CONF

    @property
    def client_options(self) -> Mapping[str, str]:
        """Return Spark's options to connect to the cluster."""
        properties = {"bootstrap.servers": self.brokers, **java_properties(self.properties)}
        return {f"kafka.{name}": value for name, value in properties.items()}

    @property
    def meaning(self) -> dict[str, Any]:
        """Return the keys of the section that determine rows and state, as JSON values for the record."""
        names = ("format", "columns", "table", "key", "sql", "watermark", "output")
        values = {name: getattr(self, name) for name in names}
        epochs = {"epochs": dict(self.units)} if self.units else {}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} | epochs


def _topics(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(_TOPIC.fullmatch(str(each)) for each in value):
        raise ValueError("a list of topic names")
    return tuple(map(str, value))


def _pattern(value: object) -> str:
    text = as_text(value)
    try:
        re.compile(text)
    except re.error:
        raise ValueError(r"a regular expression, such as shop\.public\..*") from None
    return text


def _label(value: object) -> str:
    text = as_text(value)
    if not _LABEL.fullmatch(text):
        raise ValueError("the name of the result as schema.table, for example public.sums")
    return text


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError("a list of columns of the result")
    return tuple(value)


def _watermark(section: Section, value: object) -> tuple[str, float]:
    inner = section.inner("watermark", value)
    found = inner.take("column", as_text), inner.take("delay", as_seconds)
    inner.finish()
    return found


def _bad_records(section: Section, value: object) -> tuple[str, frozenset[Lenient]]:
    """Return the topic for messages that cannot be read, and the permitted changes of values."""
    if value == "stop":
        return "", frozenset()
    if not isinstance(value, dict):
        raise ValueError("stop, or a mapping with dead_letter: topic or lenient: [...]")
    inner = section.inner("bad_records", value)
    lenient: frozenset[Lenient] = frozenset()
    found = inner.take("dead_letter", _topic, ""), inner.take("lenient", _lenient, lenient)
    inner.finish()
    return found


def _lenient(value: object) -> frozenset[Lenient]:
    known = get_args(Lenient)
    if not isinstance(value, list) or not all(each in known for each in value):
        raise ValueError(f"a list of some of {', '.join(known)}")
    return frozenset(value)


def _units(value: object) -> tuple[tuple[str, Unit], ...]:
    known = get_args(Unit)
    if not isinstance(value, dict) or not all(each in known for each in value.values()):
        raise ValueError(f"a mapping of columns to one of {', '.join(known)}")
    return tuple((str(name), unit) for name, unit in value.items())


def _topic(value: object) -> str:
    text = as_text(value)
    if not _TOPIC.fullmatch(text):
        raise ValueError("the name of a topic")
    return text


def _url(value: object) -> str:
    text = without_password(as_text(value))
    if "://" not in text and not text.startswith("/"):
        raise ValueError("a URL, or an absolute path")
    return (text if "://" in text else f"file://{text}").rstrip("/")


def topic_settings(pipeline: Pipeline) -> TopicSettings:
    """Return the source settings of a pipeline over topics.

    :raises ConfigError: when the pipeline has a source of another type.
    """
    if not isinstance(pipeline.source, TopicSettings):
        raise ConfigError(
            f"pipeline {pipeline.name!r} reads from {pipeline.source.type}, not from topics",
            "Use this only with pipelines whose source.type is kafka.",
        )
    return pipeline.source
