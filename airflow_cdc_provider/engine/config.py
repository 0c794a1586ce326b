"""The pipeline file: frozen dataclasses to and from YAML.

Everything a pipeline does is said in one file. It is read and checked as a whole
before anything is touched: an unknown key, a wrong type or an impossible
combination is refused with the key's path, the value and what would be right.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import yaml

from airflow_cdc_provider.engine.condition import find_trouble
from airflow_cdc_provider.engine.errors import ConfigError
from airflow_cdc_provider.engine.restart import Restart, Strategy

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9_]{1,40}")
_SLOT = re.compile(r"[a-z0-9_]{1,63}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|seconds?|m|minutes?|h|hours?)$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"^(\d+)\s*(B|KiB|MiB|GiB)?$")
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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
    """Where changes come from; ``dsn`` is a libpq URI with its variables and connection id resolved."""

    dsn: str = field(repr=False)
    tables: tuple[TableRule, ...]
    slot: str
    publication: str
    type: Literal["postgres"] = "postgres"


@dataclass(frozen=True)
class Sink:
    """Where rows go; ``schema`` is the target schema's name, in which ``{schema}`` stands for the source's."""

    dsn: str = field(repr=False)
    type: Literal["postgres"] = "postgres"
    mode: Literal["mirror", "changelog"] = "mirror"
    schema: str = "{schema}"


@dataclass(frozen=True)
class SnapshotSettings:
    """How the initial copy is made: ``chunk_rows`` rows a chunk, ``parallelism`` chunks at a time."""

    mode: Literal["initial", "never", "only"] = "initial"
    chunk_rows: int = 100_000
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
class Pipeline:
    """A whole pipeline file.

    :param name: names slot, publication and state by default; at most 40 of ``a-z 0-9 _``.
    :param state: URL of the state directory, reachable by the driver and by Airflow.
    """

    name: str
    source: Source
    sink: Sink
    state: str
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    spark: SparkSettings = field(default_factory=SparkSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

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
        root = _Section("", document, environment, resolve)
        name = root.take("pipeline", _name)
        source, sink = root.section("source"), root.section("sink")
        pipeline = cls(
            name=name,
            source=Source(
                type=cast(Literal["postgres"], source.take("type", _one_of("postgres"), "postgres")),
                dsn=source.dsn(),
                tables=source.take("tables", _table_rules),
                slot=source.take("slot", _slot_name, f"airflow_cdc_{name}"),
                publication=source.take("publication", _publication_name, f"airflow_cdc_{name}"),
            ),
            sink=Sink(
                type=cast(Literal["postgres"], sink.take("type", _one_of("postgres"), "postgres")),
                dsn=sink.dsn(),
                mode=cast(Literal["mirror", "changelog"], sink.take("mode", _one_of("mirror", "changelog"), "mirror")),
                schema=sink.take("schema", _text, "{schema}"),
            ),
            state=root.take("state", _state_url),
            snapshot=root.settings(
                "snapshot",
                SnapshotSettings,
                mode=_one_of("initial", "never", "only"),
                chunk_rows=_positive_integer,
                parallelism=_positive_integer,
            ),
            stream=root.settings(
                "stream",
                StreamSettings,
                trigger=_seconds,
                max_batch_bytes=parse_bytes,
                heartbeat=_positive_seconds,
                restart=lambda value: _restart(_Section("stream.restart", value, environment, resolve)),
                max_retained_wal=parse_bytes,
                on_max_retained_wal=_one_of("warn", "stop", "drop-slot"),
            ),
            spark=root.settings("spark", SparkSettings, master=_text, conf=_string_mapping),
            metrics=root.settings("metrics", MetricsSettings, prometheus=_address),
        )
        source.finish()
        sink.finish()
        root.finish()
        return pipeline


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
            f"the pipeline file {os.fspath(path)} is not YAML{place}: {getattr(e, 'problem', 'unreadable')}",
            "Mend the file at that place.",
        ) from None


class _Section:
    """A mapping of the document whose keys are taken one by one, so that what is left over is unknown."""

    def __init__(self, path: str, value: object, environment: Mapping[str, str], resolve: bool) -> None:
        self._path = path
        self._resolve = resolve
        if not isinstance(value, dict):
            where = f"{path}: " if path else "the pipeline file "
            raise ConfigError(f"{where}must be a mapping, not {self._shown(value)}", "Write it as `key: value` lines.")
        self._values: dict[Any, object] = dict(value)
        self._known: list[str] = []
        self._environment = environment

    def _shown(self, value: object) -> str:
        """A value for a message; those of source and sink may hold a password."""
        return "not shown" if self._path.startswith(("source", "sink")) else repr(value)

    def _full(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str, check: Callable[[object], T], default: T | None = None) -> T:
        self._known.append(key)
        if key not in self._values:
            if default is not None:
                return default
            raise ConfigError(
                f"{self._full(key)} is missing from the pipeline file", f"Add the key `{self._full(key)}`."
            )
        value = self._values.pop(key)
        if isinstance(value, str):
            if not self._resolve and self._full(key) != "pipeline" and self._unset(value):
                return cast(T, value)
            value = self._expand(key, value)
        try:
            return check(value)
        except ValueError as e:
            shown = "the value" if check is _dsn else repr(value)  # a DSN may hold a password
            raise ConfigError(f"{self._full(key)}: {shown} is not valid", f"Give {e}.") from None

    def section(self, key: str) -> _Section:
        return self.take(key, lambda value: _Section(self._full(key), value, self._environment, self._resolve))

    def settings(self, key: str, kind: type[T], **checks: Callable[[object], Any]) -> T:
        self._known.append(key)
        if key not in self._values:
            return kind()
        section = _Section(self._full(key), self._values.pop(key), self._environment, self._resolve)
        defaults = kind()
        given = {name: section.take(name, check, getattr(defaults, name)) for name, check in checks.items()}
        section.finish()
        return cast(T, dataclasses.replace(cast(Any, defaults), **given))

    def dsn(self) -> str:
        """The section's ``dsn``, or the connection named by its ``conn_id``."""
        if "conn_id" in self._values and "dsn" in self._values:
            raise ConfigError(
                f"{self._path} has both dsn and conn_id",
                f"Keep one of {self._full('dsn')} and {self._full('conn_id')}.",
            )
        if not self._resolve:
            self._known += ["conn_id", "dsn"]
            if not (self._values.pop("conn_id", None) or self._values.pop("dsn", None)):
                raise ConfigError(f"{self._full('dsn')} is missing from the pipeline file", "Add it, or a conn_id.")
            return ""
        if "conn_id" not in self._values:
            self._known.append("conn_id")
            return self.take("dsn", _dsn)
        self._known.append("dsn")
        conn_id = self.take("conn_id", _text)
        variable = f"AIRFLOW_CONN_{conn_id.upper()}"
        connection = self._environment.get(variable)
        if connection is None:
            raise ConfigError(
                f"{self._full('conn_id')}: connection {conn_id!r} is unknown: {variable} is not set",
                f"Set {variable} to the connection's URI, or run the pipeline from Airflow, which passes it on.",
            )
        try:
            return _dsn(connection_uri(connection))
        except ValueError as e:
            raise ConfigError(
                f"{self._full('conn_id')}: connection {conn_id!r} is not a Postgres connection", f"Give {e}."
            ) from None

    def _unset(self, text: str) -> bool:
        return any(name not in self._environment for name in _VARIABLE.findall(text))

    def _expand(self, key: str, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] not in self._environment:
                raise ConfigError(
                    f"{self._full(key)} names the environment variable {match[1]}, which is not set",
                    f"Set {match[1]} where the pipeline runs.",
                )
            return self._environment[match[1]]

        return _VARIABLE.sub(replace, text)

    def finish(self) -> None:
        for key, value in self._values.items():
            raise ConfigError(
                f"{self._full(str(key))}: unknown key (value {self._shown(value)})",
                f"Remove it, or use one of: {', '.join(sorted(self._known))}.",
            )


def _restart(section: _Section) -> Restart:
    """A restart strategy with the keys that belong to it."""
    default = Restart()
    checks: dict[str, dict[str, Callable[[object], Any]]] = {
        "fixed-delay": {"attempts": _positive_integer, "delay": _seconds},
        "failure-rate": {"failures": _positive_integer, "interval": _positive_seconds, "delay": _seconds},
        "none": {},
    }
    strategy = section.take("strategy", _one_of(*checks), default.strategy)
    given = {name: section.take(name, check, getattr(default, name)) for name, check in checks[strategy].items()}
    section.finish()
    return dataclasses.replace(default, strategy=cast(Strategy, strategy), **given)


def connection_uri(connection: str) -> str:
    """Turn an Airflow connection (URI or JSON) into a libpq URI.

    :raises ValueError: when the JSON is malformed.
    """
    if not connection.lstrip().startswith("{"):
        return connection
    try:
        parts = json.loads(connection)
        extra = parts.get("extra") or {}
        extra = json.loads(extra) if isinstance(extra, str) else extra
    except (json.JSONDecodeError, AttributeError) as e:
        raise ValueError("a connection as URI or as JSON object") from e
    user = quote(parts.get("login") or "", safe="")
    password = f":{quote(parts['password'], safe='')}" if parts.get("password") else ""
    at = "@" if user or password else ""
    port = f":{parts['port']}" if parts.get("port") else ""
    libpq = {key: value for key, value in extra.items() if isinstance(value, str)}
    query = f"?{urlencode(libpq, quote_via=quote)}" if libpq else ""
    host = parts.get("host") or ""
    database = quote(parts.get("schema") or "", safe="")
    return f"postgresql://{user}{password}{at}{host}{port}/{database}{query}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
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


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return str(value)

    return check


def _positive_integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number from 1 on")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a duration such as `500 ms`, `2 seconds` or `1 minute`")
    unit = match[2]
    scale = 0.001 if unit.startswith(("ms", "milli")) else _SECONDS[unit[0]]
    return float(match[1]) * scale


def _positive_seconds(value: object) -> float:
    seconds = _seconds(value)
    if seconds <= 0:
        raise ValueError("a duration above zero, such as `10 seconds`")
    return seconds


def _address(value: object) -> tuple[str, int]:
    wanted = "an address such as `127.0.0.1:9464`, of this host"
    try:
        parts = urlsplit(f"//{_text(value)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if not host or port is None or parts.netloc != value or parts.username is not None:
        raise ValueError(wanted)
    return host, port


def parse_bytes(value: object) -> int:
    """A size in bytes, given as a number or as text such as ``64MiB``.

    :raises ValueError: saying what would be right.
    """
    match = _SIZE.match(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or int(match[1]) == 0:
        raise ValueError("a size such as `64MiB`")
    return int(match[1]) * _BYTES[match[2]]


def _string_mapping(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("a mapping of names to values")
    return {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}


def _dsn(value: object) -> str:
    """Check a libpq URI without ever repeating it in a message: it may hold a password."""
    text = _text(value)
    if text.startswith("postgres://"):
        text = "postgresql://" + text.removeprefix("postgres://")
    wanted = "a URI of the form postgresql://user@host:port/database"
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(wanted) from None
    if parts.scheme != "postgresql" or not parts.path.strip("/"):
        raise ValueError(wanted)
    # libpq takes the first @ for the password's end and would name the rest, as a host, in its messages.
    if parts.netloc.count("@") > 1:
        raise ValueError(f"{wanted}, with special characters of user and password escaped (%40 for @)")
    import psycopg2.extensions  # late: reading Dags must not load a driver

    try:
        ports = psycopg2.extensions.parse_dsn(text).get("port", "")
    except psycopg2.Error:
        raise ValueError(f"{wanted}, with parameters that libpq knows") from None
    # One a host, which urllib does not know.
    if not all(port == "" or (port.isdecimal() and 0 < int(port) < 1 << 16) for port in ports.split(",")):
        raise ValueError(wanted)
    return text


def _state_url(value: object) -> str:
    text = _text(value)
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
