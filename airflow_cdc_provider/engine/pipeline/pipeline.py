"""The pipeline file: reads YAML into frozen dataclasses.

One file describes a pipeline completely. It is read and checked as a whole before anything is changed: an unknown key,
a wrong type or an impossible combination is refused with the key's path and a description of valid values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.section_values import (
    PIPELINE_NAME,
    as_count_or_zero,
    as_flag,
    as_mapping,
    as_positive_integer,
    as_positive_seconds,
    as_seconds,
    as_text,
    one_of,
    parse_bytes,
    parse_bytes_or_zero,
)
from airflow_cdc_provider.engine.pipeline.file_position import naming_line
from airflow_cdc_provider.engine.pipeline.kinds import Naming, SinkSettings, SourceSettings, SparkBound
from airflow_cdc_provider.engine.pipeline.registry import as_type, is_type, sink_plugin, source_kind
from airflow_cdc_provider.engine.pipeline.settings import (
    MessageSettings,
    MetricsSettings,
    SnapshotSettings,
    StreamSettings,
    as_address,
    as_restart,
    as_state_url,
)
from airflow_cdc_provider.engine.spark.settings import (
    END_WITHOUT_MEMORY,
    ONE_COMPILER,
    SparkSettings,
    SparkStart,
    runs_locally,
)

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.changes.row_transform import RowTransform

_LISTS = ("spark.jars", "spark.jars.packages", "spark.sql.extensions")


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline file.

    :param name: the name, also of slot, publication and state by default; at most 40 of ``a-z 0-9 _``.
    :param source: the source of the data.
    :param sinks: at least one; each receives all captured data.
    :param state: URL of the state directory, which the driver and Airflow must be able to reach.
    """

    name: str
    source: SourceSettings
    sinks: tuple[SinkSettings, ...]
    state: str
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    messages: MessageSettings = field(default_factory=MessageSettings)

    @property
    def transform(self) -> RowTransform:
        """Return the transformation of rows on their way to the sinks; no key of the file sets one yet."""
        from airflow_cdc_provider.engine.changes.row_transform import Identity  # late: it imports pyarrow

        return Identity()

    @property
    def sink(self) -> SinkSettings:
        """Return the sink of a pipeline that has exactly one."""
        (sink,) = self.sinks
        return sink

    @property
    def branches(self) -> tuple[Pipeline, ...]:
        """Return for each sink the pipeline with that sink alone."""
        return tuple(replace(self, sinks=(sink,)) for sink in self.sinks)

    @property
    def spark_conf(self) -> dict[str, str]:
        """Return Spark's configuration: that of source and sinks, overridden by that of the file.

        Lists of all of them are joined, unless the file's list is empty.
        """
        found: dict[str, str] = {}
        for conf in (self.source.spark_conf, *(sink.spark_conf for sink in self.sinks), self.spark.conf):
            both = [name for name in _LISTS if found.get(name) and conf.get(name)]
            entries = {name: f"{found[name]},{conf[name]}".split(",") for name in both}
            found |= {**conf, **{name: ",".join(dict.fromkeys(each)) for name, each in entries.items()}}
        return found

    def spark_conf_on(self, master: str) -> dict[str, str]:
        """Return :attr:`spark_conf` with defaults that are beneficial on a master.

        If neither source nor sinks work in the JVM, the JVM of ``local[…]`` only plans small queries and starts their
        tasks. Its second, optimizing compiler then costs more processor time than it saves. The options of
        ``spark.driver.extraJavaOptions`` come after these options and take precedence.
        """
        if not runs_locally(master) or self.source.spark_conf or any(sink.spark_conf for sink in self.sinks):
            return self.spark_conf
        return {"spark.driver.defaultJavaOptions": f"{END_WITHOUT_MEMORY} {ONE_COMPILER}", **self.spark_conf}

    @property
    def spark_start(self) -> SparkStart:
        """Return the start parameters of the pipeline's Spark session, on the master that the file names."""
        return SparkStart(self.name, self.spark.master, self.spark_conf_on(self.spark.master))

    @classmethod
    def load(cls, path: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> Pipeline:
        """Read and check a pipeline file.

        :param path: a YAML file.
        :param environment: the environment in which ``${NAME}`` and ``AIRFLOW_CONN_<CONN_ID>`` are looked up.
        :raises ConfigError: if the file is invalid; names the line, the key's path and valid values.
        """
        document = _read_document(path)
        with naming_line(path):
            return cls.parse(document, environment)

    @classmethod
    def outline(cls, path: str | os.PathLike[str]) -> Pipeline:
        """Read and check a pipeline file without resolving its connections, as where Dags are parsed.

        DSNs are empty, and values that name unset variables remain as they are written.

        :raises ConfigError: as :meth:`load`.
        """
        document = _read_document(path)
        with naming_line(path):
            return cls.parse(document, resolve=False)

    @classmethod
    def parse(cls, document: object, environment: Mapping[str, str] = os.environ, *, resolve: bool = True) -> Pipeline:
        """Check a parsed pipeline document, as :meth:`load` does, or without ``resolve`` as :meth:`outline` does."""
        root = Section("", document, environment, resolve)
        name = root.take_literally("pipeline", _name)
        source, sinks = root.section("source"), root.sections("sink")
        pipeline = cls(
            name=name,
            source=_source(source, name),
            sinks=tuple(map(_sink, sinks)),
            state=root.take("state", as_state_url),
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
                restart=lambda value: as_restart(root.inner("stream.restart", value)),
                max_retained_wal=parse_bytes,
                on_max_retained_wal=one_of("warn", "stop", "drop-slot"),
            ),
            spark=root.settings(
                "spark",
                SparkSettings,
                master=as_text,
                conf=as_mapping,
                min_rows=as_count_or_zero,
                min_bytes=parse_bytes_or_zero,
            ),
            metrics=root.settings("metrics", MetricsSettings, prometheus=as_address),
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
        if (database := pipeline.source.database) is not None:
            bound = [sink.with_database(database) if isinstance(sink, Naming) else sink for sink in bound]
        return replace(pipeline, sinks=tuple(bound))


def _read_document(path: str | os.PathLike[str]) -> object:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} cannot be read: {e.strerror}", "Give the path of a YAML file."
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"the pipeline file {os.fspath(path)} is not UTF-8", "Save it as UTF-8.") from e
    except yaml.YAMLError as e:  # the text of the error quotes the file, passwords included
        mark = getattr(e, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} is not YAML{place}: {_yaml_problem(e)}",
            "Correct the file at that place.",
        ) from None
    except Exception:  # a date that does not exist, or a tag that does not accept its value
        raise ConfigError(
            f"the pipeline file {os.fspath(path)} has an invalid value, such as a date that does not exist",
            "Put values that are texts into quotes.",
        ) from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Return the problem, if it quotes at most a character of the file; aliases and tags may be passwords."""
    problem = getattr(error, "problem", None) or "unreadable"
    named = re.search(r"(['\"])[^<'\"\s]{2,}\1", problem)
    return "a tag, an anchor or an alias that is not known" if named else problem


def _source(section: Section, name: str) -> SourceSettings:
    kind = section.take("type", as_type("source"), "postgres")
    # If the type is a variable that is not set where Dags are parsed, it may be any kind.
    return source_kind(kind if is_type("source", kind) else "postgres").settings.parse(section, name)


def _sink(section: Section) -> SinkSettings:
    kind = section.take("type", as_type("sink"), "postgres")
    return sink_plugin(kind).settings.parse(section)


def _name(value: object) -> str:
    if not isinstance(value, str) or not PIPELINE_NAME.fullmatch(value):
        raise ValueError("1 to 40 of the characters a-z, 0-9 and _")
    return value
