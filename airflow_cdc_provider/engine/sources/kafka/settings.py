"""The ``source`` section of a pipeline file for topics of Kafka."""

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
"""Kafka for the Spark that the engine needs, as Maven Central has it."""

Lenient: TypeAlias = Literal["trailing", "encoding", "decimals", "floats", "times"]
"""What may be changed: text behind the object is left out, what is no UTF-8 becomes U+FFFD or ``?``, numbers are
rounded to what their column holds, times are cut to microseconds and dates."""
Unit: TypeAlias = Literal["days", "seconds", "milliseconds", "microseconds"]
"""What a number for a date or time counts, since 1970."""

UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes by default in place of a value that an update has left alone."""

VIEW = "messages"
"""What the query names the decoded messages."""

Format: TypeAlias = Literal["json", "avro", "debezium", "text", "bytes"]
Output: TypeAlias = Literal["update", "append"]
Starting: TypeAlias = Literal["earliest", "latest"]
Late: TypeAlias = Literal["drop", "count"]
Offsets: TypeAlias = Mapping[str, Mapping[str, int]]
"""The next offset to read, by topic and partition; JSON values."""

_WHOLE = {"text": "value STRING NOT NULL", "bytes": "value BINARY NOT NULL"}
"""The columns of the view where values are taken as a whole."""

_STATE_STORE = "spark.sql.streaming.stateStore"
_RESERVED = (
    *("bootstrap.servers", "isolation.level", "group.id", "auto.offset.reset", "enable.auto.commit"),
    *("enable.auto.offset.store", "enable.partition.eof", "allow.auto.create.topics"),
    *("key.deserializer", "value.deserializer", "key.serializer", "value.serializer", "interceptor.classes"),
)
"""Properties that the engine, or Spark, sets."""
_LABEL = re.compile(r"[^.]+\.[^.]+")
_INTERNAL = "__"
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class TopicSettings:
    """Topics whose messages are read, and the query that makes rows of them.

    :param brokers: ``host:port``, several with commas.
    :param properties: of the client, as librdkafka names them.
    :param topics: their names; empty with a ``pattern``.
    :param pattern: a regular expression that whole names match, for Python and Java alike; empty with ``topics``.
    :param starting: where topics are read from that nothing is recorded of.
    :param format: of the messages' values; ``text`` and ``bytes`` take them as a whole.
    :param registry: the schema registry's URL, where values are in Avro; empty where they are in JSON.
    :param registry_properties: of its client.
    :param columns: of the values, as Spark writes a schema; those that say ``NOT NULL`` have to be there.
    :param table: the name of the result, as ``schema.table``: what a source table is to other pipelines.
    :param key: columns of the result by which its rows are told apart.
    :param sql: a query over :data:`VIEW`; empty for all columns.
    :param watermark: the column of the values that says when something happened, and the seconds that it may come late;
        without a column there is none.
    :param late: whether rows that come later than that are only left out, or counted, too.
    :param output: whether windows are told whenever they change, or once, when they are closed; empty for what fits the
        sinks.
    :param dead_letters: the topic for messages that cannot be read; empty where they stop the pipeline.
    :param max_batch_messages: that a unit is made of, at most.
    :param checkpoint: URL of Spark's checkpoint; empty for its place in the state.
    :param unavailable: what Debezium writes in place of a value that an update has left alone.
    :param units: of numbers that stand for a date or time, by column.
    :param lenient: what of a message may be changed, instead of making it one that cannot be read.
    """

    brokers: str
    properties: Properties = field(repr=False)
    topics: tuple[str, ...]
    pattern: str
    starting: Starting
    format: Format
    columns: str
    table: str
    key: tuple[str, ...]
    sql: str
    watermark: tuple[str, float]
    late: Late
    output: Output | Literal[""]
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
        """Take the section's keys, but for ``type``, which has been taken.

        :raises ConfigError: naming the key's path, the value and what would be right.
        """
        brokers, properties = brokers_of(section, _RESERVED)
        require_for_java(properties)
        nothing: tuple[str, ...] = ()
        topics, pattern = section.take("topics", _topics, nothing), section.take("pattern", _pattern, "")
        if bool(topics) == bool(pattern):
            raise ConfigError(
                "source takes either topics, a list of names, or pattern, a regular expression",
                "Give one of source.topics and source.pattern.",
            )
        whole = cast(Format | Literal[""], section.take("value", one_of(*_WHOLE), ""))
        format_ = whole or cast(Format, section.take("format", one_of("json", "avro", "debezium"), "json"))
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
            output=cast(Output, section.take("output", one_of("update", "append"), "")),
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
                f"source.bad_records: {found.dead_letters} is one of the topics that are read", "Name one that is not."
            )
        return found

    def reads(self, topic: str) -> bool:
        """Whether it reads a topic of some name; by a pattern none of Kafka's own, as Kafka's consumer has it."""
        if not self.pattern:
            return topic in self.topics
        return topic[:2] != _INTERNAL and re.fullmatch(self.pattern, topic) is not None

    @property
    def topic_options(self) -> Mapping[str, str]:
        """Options by which Spark knows the same topics; it looks for its pattern anywhere in a name."""
        if not self.pattern:
            return {"subscribe": ",".join(self.topics)}
        return {"subscribePattern": f"^(?!{_INTERNAL})(?:{self.pattern})$"}

    @property
    def place(self) -> str:
        """The topics, for messages."""
        return f"{self.pattern or ', '.join(self.topics)} at {self.brokers}"

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that no log may show."""
        return secrets_of((*self.properties, *self.registry_properties))

    @property
    def captured(self) -> tuple[str, ...]:
        """See :attr:`.SourceSettings.captured`: topics, or the pattern of their names."""
        return self.topics or (self.pattern,)

    @property
    def columns_key(self) -> str:
        """See :attr:`.SourceSettings.columns_key`."""
        return "source.sql"

    @property
    def database(self) -> str | None:
        """See :attr:`.SourceSettings.database`: none."""
        return None

    def datasets(self, identity: Mapping[str, Any], table: Table) -> list[tuple[str, str]]:
        """See :meth:`.SourceSettings.datasets`: the topics that have been read."""
        server = f"kafka://{self.brokers.partition(',')[0]}"
        return [(server, topic) for topic in sorted(noted_by("kafka", identity)["topics"])]

    @property
    def schema_and_name(self) -> tuple[str, str]:
        """The two parts of :attr:`table`."""
        schema, _, name = self.table.partition(".")
        return schema, name

    @property
    def spark_conf(self) -> Mapping[str, str]:
        """What the query needs of Spark's configuration; the pipeline file's own settings win."""
        return {
            "spark.jars.packages": PACKAGE,
            f"{_STATE_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            f"{_STATE_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
            # The files of a batch have names of their own, so that a driver that was overtaken spoils none.
            f"{_STATE_STORE}.checkpointFormatVersion": "2",
            # Of options, too, which plans show: a login is one.
            "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|[.]pem|keystore[.]key",
            # So many state stores commit in each batch, however little is in it.
            "spark.sql.shuffle.partitions": "4",
            # In bytes of byte code, beyond which Java never compiles a method: those for a whole stage that checks the
            # values of eight columns are longer, and took a third of a batch as they were interpreted.
            "spark.sql.codegen.hugeMethodLimit": "8000",
        }

    @property
    def client_options(self) -> Mapping[str, str]:
        """Options by which Spark reaches the cluster."""
        properties = {"bootstrap.servers": self.brokers, **java_properties(self.properties)}
        return {f"kafka.{name}": value for name, value in properties.items()}

    @property
    def meaning(self) -> dict[str, Any]:
        """What of the section decides about rows and state, as JSON values for the record."""
        names = ("format", "columns", "table", "key", "sql", "watermark", "output")
        values = {name: getattr(self, name) for name in names}
        epochs = {"epochs": dict(self.units)} if self.units else {}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} | epochs


def _topics(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(_TOPIC.fullmatch(str(each)) for each in value):
        raise ValueError("a list of names of topics")
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
    """The topic for messages that cannot be read, and what of others may be changed."""
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
        raise ValueError(f"columns, each with one of {', '.join(known)}")
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
    """Return the source of a pipeline over topics.

    :raises ConfigError: when the pipeline reads something else.
    """
    if not isinstance(pipeline.source, TopicSettings):
        raise ConfigError(
            f"pipeline {pipeline.name!r} reads from {pipeline.source.type}, and no topics",
            "Use what asks for topics with pipelines whose source.type is kafka.",
        )
    return pipeline.source
