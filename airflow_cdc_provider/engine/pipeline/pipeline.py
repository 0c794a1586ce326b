"""The pipeline file: frozen dataclasses to and from YAML.

Everything a pipeline does is said in one file. It is read and checked as a whole
before anything is touched: an unknown key, a wrong type or an impossible
combination is refused with the key's path, the value and what would be right.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import yaml

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section import Section, without_password
from airflow_cdc_provider.engine.core.section_values import (
    as_flag,
    as_mapping,
    as_positive_integer,
    as_positive_seconds,
    as_postgres_uri,
    as_seconds,
    as_text,
    database_of,
    one_of,
    parse_bytes,
)
from airflow_cdc_provider.engine.pipeline.kinds import Naming, SinkSettings, SparkBound
from airflow_cdc_provider.engine.pipeline.registry import sink_settings, sink_types
from airflow_cdc_provider.engine.pipeline.restart_strategy import Restart, Strategy
from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble
from airflow_cdc_provider.engine.sources.kafka.settings import TopicSource

_LISTS = ("spark.jars", "spark.jars.packages", "spark.sql.extensions")
NAME = re.compile(r"[a-z0-9_]{1,40}")
_SLOT = re.compile(r"[a-z0-9_]{1,63}")
# A JVM that has run out of memory loses any of its threads and may hang for ever; one that is killed is noticed. (The
# flag ExitOnOutOfMemoryError would do, but for its exit code, which is 3.) It says so on standard output, unless told.
END_WITHOUT_MEMORY = "-XX:+DisplayVMOutputToStderr -XX:OnOutOfMemoryError='kill -9 %p'"
_ONE_COMPILER = "-XX:TieredStopAtLevel=1"


@dataclass(frozen=True)
class TableRule:
    """One entry of ``source.tables``.

    :param pattern: ``schema.table``, shell globs allowed, double quotes protect a dot or a glob character.
    :param columns: the columns to capture, ``None`` for all.
    :param where: an SQL condition on the rows to capture, ``None`` for all.
    """

    pattern: str
    columns: tuple[str, ...] | None = None
    where: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableRule:
        """Read a rule from its fields as JSON values."""
        columns = values["columns"]
        return cls(values["pattern"], None if columns is None else tuple(columns), values["where"])


@dataclass(frozen=True)
class Source:
    """Where changes come from; DSNs are libpq URIs with their variables and connection ids resolved.

    :param replication_dsn: for what takes REPLICATION, the slot and the log; ``""`` to use ``dsn`` for it.
    """

    dsn: str = field(repr=False)
    tables: tuple[TableRule, ...]
    slot: str
    publication: str
    type: Literal["postgres"] = "postgres"
    replication_dsn: str = field(default="", repr=False)

    @property
    def log_dsn(self) -> str:
        """As whom the log is read."""
        return self.replication_dsn or self.dsn

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that no log may show."""
        from airflow_cdc_provider.engine.postgres.connection import (
            passwords,  # late: reading Dags must not load a driver
        )

        return [*passwords(self.dsn), *passwords(self.replication_dsn)]


@dataclass(frozen=True)
class SnapshotSettings:
    """How the initial copy is made: ``chunk_rows`` rows a chunk, ``parallelism`` chunks at a time."""

    mode: Literal["initial", "never", "only"] = "initial"
    chunk_rows: int = 500_000
    parallelism: int = 2


@dataclass(frozen=True)
class StreamSettings:
    """How the log is followed; ``trigger`` and ``heartbeat`` in seconds, sizes in bytes.

    :param restart: when a job that broke, of stream or snapshot, is begun again.
    :param max_retained_wal: the log that the source may keep for the slot before ``on_max_retained_wal`` is done.
    """

    trigger: float = 2.0
    max_batch_bytes: int = 64 << 20
    heartbeat: float = 10.0
    restart: Restart = field(default_factory=Restart)
    max_retained_wal: int = 10 << 30
    on_max_retained_wal: Literal["warn", "stop", "drop-slot"] = "warn"


@dataclass(frozen=True)
class SparkSettings:
    """Spark's master and configuration for runs without ``spark-submit``."""

    master: str = "local[2]"
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsSettings:
    """Where jobs show their metrics; ``prometheus`` is the host and port at which Prometheus finds them, if at all."""

    prometheus: tuple[str, int] | None = None


@dataclass(frozen=True)
class MessageSettings:
    """What messages show: ``values`` of rows, and bounds of keys, or none."""

    values: bool = True


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline file.

    :param name: names slot, publication and state by default; at most 40 of ``a-z 0-9 _``.
    :param reads: where data comes from.
    :param sinks: at least one; each gets all that is captured.
    :param state: URL of the state directory, reachable by the driver and by Airflow.
    """

    name: str
    reads: Source | TopicSource
    sinks: tuple[SinkSettings, ...]
    state: str
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    messages: MessageSettings = field(default_factory=MessageSettings)

    @property
    def source(self) -> Source:
        """The database whose tables are copied.

        :raises ConfigError: when the pipeline reads topics.
        """
        if isinstance(self.reads, TopicSource):
            raise ConfigError(
                f"pipeline {self.name!r} reads topics of Kafka: it has no replication slot, and no tables at a source",
                "Use what asks for them with pipelines whose source.type is postgres.",
            )
        return self.reads

    @property
    def topics(self) -> TopicSource | None:
        """The topics that are read; ``None`` when the pipeline copies a database."""
        return self.reads if isinstance(self.reads, TopicSource) else None

    @property
    def captured(self) -> tuple[str, ...]:
        """What is read of the source, as the file names it: patterns of tables, or topics."""
        if self.topics is None:
            return tuple(rule.pattern for rule in self.source.tables)
        return self.topics.topics or (self.topics.pattern,)

    @property
    def sink(self) -> SinkSettings:
        """The sink of a pipeline that has one."""
        (sink,) = self.sinks
        return sink

    @property
    def branches(self) -> tuple[Pipeline, ...]:
        """For each sink, the pipeline as if it had no other."""
        return tuple(replace(self, sinks=(sink,)) for sink in self.sinks)

    @property
    def spark_conf(self) -> dict[str, str]:
        """Spark's configuration: what topics and sinks need, and over it the file's own.

        Lists of all are joined, unless the file's is empty.
        """
        found: dict[str, str] = {}
        needed = [self.topics.spark_conf] if self.topics is not None else []
        for conf in (*needed, *(sink.spark_conf for sink in self.sinks), self.spark.conf):
            both = [name for name in _LISTS if found.get(name) and conf.get(name)]
            entries = {name: f"{found[name]},{conf[name]}".split(",") for name in both}
            found |= {**conf, **{name: ",".join(dict.fromkeys(each)) for name, each in entries.items()}}
        return found

    def spark_conf_on(self, master: str) -> dict[str, str]:
        """:attr:`spark_conf`, and beneath it what pays on a master.

        Where neither source nor sinks work in the JVM, that of ``local[…]`` only plans small queries and starts their
        tasks. Its second, optimising compiler then takes more processor time than it ever saves. What
        ``spark.driver.extraJavaOptions`` says, stands behind these options and wins.
        """
        if not runs_locally(master) or self.topics is not None or any(sink.spark_conf for sink in self.sinks):
            return self.spark_conf
        return {"spark.driver.defaultJavaOptions": f"{END_WITHOUT_MEMORY} {_ONE_COMPILER}", **self.spark_conf}

    @classmethod
    def load(cls, path: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> Pipeline:
        """Read and check a pipeline file.

        :param path: a YAML file.
        :param environment: where ``${NAME}`` and ``AIRFLOW_CONN_<CONN_ID>`` are looked up.
        :raises ConfigError: naming the key's path, the value and what would be right.
        """
        return cls.parse(_read_document(path), environment)

    @classmethod
    def outline(cls, path: str | os.PathLike[str]) -> Pipeline:
        """Read and check a pipeline file where its connections are unknown, as where Dags are parsed.

        DSNs are empty, and values that name variables which are not set stay as they are written.

        :raises ConfigError: as :meth:`load`.
        """
        return cls.parse(_read_document(path), resolve=False)

    @classmethod
    def parse(cls, document: object, environment: Mapping[str, str] = os.environ, *, resolve: bool = True) -> Pipeline:
        """Check a parsed pipeline document; see :meth:`load`, and without ``resolve`` :meth:`outline`."""
        root = Section("", document, environment, resolve)
        name = root.take_literally("pipeline", _name)
        source, sinks = root.section("source"), root.sections("sink")
        pipeline = cls(
            name=name,
            reads=_source(source, name),
            sinks=tuple(map(_sink, sinks)),
            state=root.take("state", _state_url),
            snapshot=root.settings(
                "snapshot",
                SnapshotSettings,
                mode=one_of("initial", "never", "only"),
                chunk_rows=as_positive_integer,
                parallelism=as_positive_integer,
            ),
            stream=root.settings(
                "stream",
                StreamSettings,
                trigger=as_seconds,
                max_batch_bytes=parse_bytes,
                heartbeat=as_positive_seconds,
                restart=lambda value: _restart(root.inner("stream.restart", value)),
                max_retained_wal=parse_bytes,
                on_max_retained_wal=one_of("warn", "stop", "drop-slot"),
            ),
            spark=root.settings("spark", SparkSettings, master=as_text, conf=as_mapping),
            metrics=root.settings("metrics", MetricsSettings, prometheus=_address),
            messages=root.settings("messages", MessageSettings, values=as_flag),
        )
        source.finish()
        for sink in sinks:
            sink.finish()
        root.finish()
        if not resolve:
            return pipeline
        conf = {"spark.master": pipeline.spark.master, **pipeline.spark_conf}
        bound = [sink.with_spark(conf) if isinstance(sink, SparkBound) else sink for sink in pipeline.sinks]
        if pipeline.topics is None:
            name = database_of(pipeline.source.dsn)
            bound = [sink.with_database(name) if isinstance(sink, Naming) else sink for sink in bound]
        return replace(pipeline, sinks=tuple(bound))


def runs_locally(master: str) -> bool:
    """Whether Spark's tasks run in the driver's own JVM."""
    return master == "local" or master.startswith("local[")


def _read_document(path: str | os.PathLike[str]) -> object:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} cannot be read: {e.strerror}", "Give the path of a YAML file."
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"the pipeline file {os.fspath(path)} is not UTF-8", "Save it as UTF-8.") from e
    except yaml.YAMLError as e:  # whose text quotes the file, passwords and all
        mark = getattr(e, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} is not YAML{place}: {_yaml_problem(e)}",
            "Mend the file at that place.",
        ) from None
    except Exception:  # a date that there is not, or what a tag makes of its value
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} has a value that is not what it looks like, as 2024-02-30 is no date",
            "Put values that are texts into quotes.",
        ) from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong, if that names no more of the file than a character: aliases and tags may be passwords."""
    problem = getattr(error, "problem", None) or "unreadable"
    named = re.search(r"(['\"])[^<'\"\s]{2,}\1", problem)
    return "a tag, an anchor or an alias that is not known" if named else problem


def _source(section: Section, name: str) -> Source | TopicSource:
    if section.take("type", one_of("postgres", "kafka"), "postgres") == "kafka":
        return TopicSource.parse(section)
    return Source(
        dsn=section.dsn(as_postgres_uri, "postgresql", "Postgres"),
        tables=section.take("tables", _table_rules),
        slot=section.take("slot", _slot_name, f"airflow_cdc_{name}"),
        publication=section.take("publication", _publication_name, f"airflow_cdc_{name}"),
        replication_dsn=section.dsn(as_postgres_uri, "postgresql", "Postgres", prefix="replication_"),
    )


def _sink(section: Section) -> SinkSettings:
    kind = section.take("type", one_of(*sink_types()), "postgres")
    return sink_settings(kind).parse(section)


def _restart(section: Section) -> Restart:
    """A restart strategy with the keys that belong to it."""
    default = Restart()
    checks: dict[str, dict[str, Callable[[object], Any]]] = {
        "fixed-delay": {"attempts": as_positive_integer, "delay": as_seconds},
        "failure-rate": {"failures": as_positive_integer, "interval": as_positive_seconds, "delay": as_seconds},
        "none": {},
    }
    strategy = section.take("strategy", one_of(*checks), default.strategy)
    if strategy not in checks:  # a variable that is unknown here; it decides about the other keys
        return default
    given = {name: section.take(name, check, getattr(default, name)) for name, check in checks[strategy].items()}
    section.finish()
    return dataclasses.replace(default, strategy=cast(Strategy, strategy), **given)


def _name(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError("1 to 40 of the characters a-z, 0-9 and _")
    return value


def _slot_name(value: object) -> str:
    if not isinstance(value, str) or not _SLOT.fullmatch(value):
        raise ValueError("1 to 63 of the characters a-z, 0-9 and _, as Postgres demands of slot names")
    return value


def _publication_name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= 63 or "\0" in value:
        raise ValueError("a name of 1 to 63 bytes")
    return value


def _address(value: object) -> tuple[str, int]:
    wanted = "an address such as `127.0.0.1:9464`, of this host"
    try:
        parts = urlsplit(f"//{as_text(value)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if not host or port is None or parts.netloc != value or parts.username is not None:
        raise ValueError(wanted)
    return host, port


def _state_url(value: object) -> str:
    text = without_password(as_text(value))
    return text if "://" in text else f"file://{Path(text).absolute()}"


def _table_rules(value: object) -> tuple[TableRule, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of `schema.table` entries")
    return tuple(_table_rule(entry) for entry in value)


def _table_rule(entry: object) -> TableRule:
    if isinstance(entry, str):
        return TableRule(_pattern(entry))
    if not isinstance(entry, dict) or not set(entry) <= {"table", "columns", "where"}:
        raise ValueError("entries `schema.table` or {table: …, columns: […], where: …}")
    columns = entry.get("columns")
    if columns is not None and not (isinstance(columns, list) and columns and all(isinstance(c, str) for c in columns)):
        raise ValueError("columns as a list of names")
    where = entry.get("where")
    if where is not None and not isinstance(where, str):
        raise ValueError("where as an SQL condition")
    if where is not None and (trouble := find_trouble(where)):
        raise ValueError(f"where as one SQL condition ({trouble})")
    return TableRule(_pattern(entry.get("table")), tuple(columns) if columns else None, where)


def _pattern(value: object) -> str:
    if not isinstance(value, str) or "." not in value:
        raise ValueError('tables as `schema.table`, for example public.orders or "sales.*"')
    return value
