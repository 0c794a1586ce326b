"""Reading the sections of a pipeline file: keys are taken and checked one by one, and what is left over is refused.

A check takes the value as YAML gives it, and returns what it stands for, or raises
:class:`ValueError` with what would be right.

No message shows a text, a list or a mapping of the file, wherever it stands: it may be a password, or hold one, that
was written to the wrong key. Shown are numbers that are too small, and words that are nearly one of a choice.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

from airflow_cdc_provider.engine.core.errors import ConfigError

T = TypeVar("T")

VARIABLE = re.compile(r"\$\{(\w+)\}")
"""An environment variable in a value."""

_MEASURE = re.compile(r"\d{1,4}(\.\d{1,2})? ?[A-Za-z]{0,2}")
_NAME = re.compile(r"[A-Za-z_][\w.\[\]-]{0,99}")
"""What a key or the id of a connection looks like; what does not may be a password, or an address that holds one."""
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|seconds?|m|minutes?|h|hours?)$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"^(\d+)\s*(B|KiB|MiB|GiB)?$")
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Section:
    """A mapping of the document whose keys are taken one by one, so that what is left over is unknown.

    :param path: of its keys, for messages.
    :param environment: where variables and connections are looked up.
    :param resolve: whether they are: where Dags are parsed, they may not be known.
    """

    def __init__(self, path: str, value: object, environment: Mapping[str, str], resolve: bool) -> None:
        self._path = path
        self._resolve = resolve
        if not isinstance(value, dict):
            where = f"{path}: " if path else "the pipeline file "
            raise ConfigError(f"{where}must be a mapping, not {_kind(value)}", "Write it as `key: value` lines.")
        self._values: dict[Any, object] = dict(value)
        self._known: set[str] = set()
        self._environment = environment

    @property
    def path(self) -> str:
        """The path of the mapping, for messages."""
        return self._path

    def _full(self, key: str) -> str:
        shown = key if _NAME.fullmatch(key) else "…"
        return f"{self._path}.{shown}" if self._path else shown

    def take(self, key: str, check: Callable[[object], T], default: T | None = None, *, secret: bool = False) -> T:
        """The checked value of a key; one without a default must be there.

        :param secret: no message may show even a number.
        :raises ConfigError: naming the key's path and what would be right.
        """
        self._known.add(key)
        if key not in self._values and default is not None:
            return default
        self._require(key)
        value = self._values[key]
        if not self._resolve and isinstance(value, str) and self._unset(value):
            return cast(T, self._values.pop(key))
        return self.take_literally(key, check, secret=secret)

    def take_literally(self, key: str, check: Callable[[object], T], *, secret: bool = False) -> T:
        """The checked value of a key, which has to be known, wherever the file is read."""
        self._known.add(key)
        self._require(key)
        value = self._values.pop(key)
        try:
            return check(self._expand(key, value) if isinstance(value, str) else value)
        except ValueError as e:
            shown = _kind(value) if secret else _shown(value, e)
            raise ConfigError(f"{self._full(key)}: {shown} is not valid", f"Give {e}.") from None

    def section(self, key: str) -> Section:
        """The mapping at a key."""
        return self.take_literally(key, lambda value: self.inner(key, value))

    def sections(self, key: str) -> tuple[Section, ...]:
        """The mapping at a key, or each mapping of a list."""

        def check(value: object) -> tuple[Section, ...]:
            if value == []:
                raise ValueError("a mapping, or a list of mappings")
            if isinstance(value, list):
                return tuple(self.inner(f"{key}[{n}]", each) for n, each in enumerate(value))
            return (self.inner(key, value),)

        return self.take_literally(key, check)

    def inner(self, name: str, value: object) -> Section:
        """A value of this section as a section of its own."""
        return Section(self._full(name), value, self._environment, self._resolve)

    def texts(self, key: str, *, secret: bool = False) -> tuple[tuple[str, str], ...]:
        """The mapping of names to texts at a key, empty by default; variables of the environment stand in its values.

        :param secret: no message may show even numbers.
        """
        self._known.add(key)
        if key not in self._values:
            return ()
        section = self.inner(key, self._values.pop(key))
        names = [str(name) for name in section._values]
        section._values = {str(name): _spelled(value) for name, value in section._values.items()}
        return tuple((name, section.take(name, as_text, secret=secret)) for name in names)

    def settings(self, key: str, kind: type[T], **checks: Callable[[object], Any]) -> T:
        """The mapping at a key as a dataclass with defaults for all its fields.

        :param checks: of the keys, which have the fields' names.
        """
        self._known.add(key)
        if key not in self._values:
            return kind()
        section = self.inner(key, self._values.pop(key))
        defaults = kind()
        given = {name: section.take(name, check, getattr(defaults, name)) for name, check in checks.items()}
        section.finish()
        return cast(T, dataclasses.replace(cast(Any, defaults), **given))

    def dsn(self, check: Callable[[object], str], scheme: str, kind: str, prefix: str = "") -> str:
        """The section's ``dsn``, or the Airflow connection that its ``conn_id`` names, as a checked URI.

        It is empty where connections are not resolved.

        :param scheme: of the URIs.
        :param kind: what the connection must be, for messages: ``Postgres``.
        :param prefix: of both keys; with one, neither has to be there.
        """
        key, conn_id = f"{prefix}dsn", f"{prefix}conn_id"
        if prefix and not {key, conn_id} & self._values.keys():
            self._known |= {key, conn_id}
            return ""
        found = self.connection(key, kind, lambda connection: check(connection_uri(connection, scheme)), conn_id)
        if found is None and self._resolve:
            return self.take(key, check, secret=True)  # it may hold a password
        self._known.add(key)
        self._values.pop(key, None)
        return found or ""

    def connection(self, instead: str, kind: str, read: Callable[[str], T], key: str = "conn_id") -> T | None:
        """What is read from the Airflow connection that a key of the section names.

        It is ``None`` where the section has no such key, or connections are not resolved.

        :param instead: the key that stands in its place; one of both must be there.
        :param kind: what the connection must be, for messages: ``Postgres``.
        :param read: takes the connection as Airflow gives it, URI or JSON, which it must not repeat in a message.
        """
        self._known |= {key, instead}
        if key in self._values and instead in self._values:
            raise ConfigError(
                f"{self._path} has both {instead} and {key}",
                f"Keep one of {self._full(instead)} and {self._full(key)}.",
            )
        if not (self._values.get(key) or self._values.get(instead)):
            raise ConfigError(
                f"{self._full(instead)} is missing from the pipeline file",
                f"Add the key `{self._full(instead)}`, or `{self._full(key)}`.",
            )
        if key not in self._values:
            return None
        conn_id = self.take(key, as_text)
        if not self._resolve:
            return None
        variable = f"AIRFLOW_CONN_{conn_id.upper()}"
        connection = self._environment.get(variable)
        if not _NAME.fullmatch(conn_id):  # a DSN, for one
            conn_id, variable = "…", "AIRFLOW_CONN_…"
        if connection is None:
            raise ConfigError(
                f"{self._full(key)}: connection {conn_id!r} is unknown: {variable} is not set",
                f"Set {variable} to the connection's URI, or run the pipeline from Airflow, which passes it on.",
            )
        try:
            return read(connection)
        except ValueError as e:
            raise ConfigError(
                f"{self._full(key)}: connection {conn_id!r} is not a {kind} connection", f"Give {e}."
            ) from None

    def _require(self, key: str) -> None:
        if key not in self._values:
            raise ConfigError(
                f"{self._full(key)} is missing from the pipeline file", f"Add the key `{self._full(key)}`."
            )

    def _unset(self, text: str) -> bool:
        return any(name not in self._environment for name in VARIABLE.findall(text))

    def _expand(self, key: str, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] not in self._environment:
                raise ConfigError(
                    f"{self._full(key)} names the environment variable {match[1]}, which is not set",
                    f"Set {match[1]} where the pipeline runs.",
                )
            return self._environment[match[1]]

        return VARIABLE.sub(replace, text)

    def finish(self) -> None:
        """Refuse what has not been taken.

        :raises ConfigError: naming the first such key.
        """
        for key, value in self._values.items():
            raise ConfigError(
                f"{self._full(str(key))}: unknown key (its value is {_kind(value)})",
                f"Remove it, or use one of: {', '.join(sorted(self._known))}.",
            )


class Misspelt(ValueError):
    """Raised by a check for a value that is nearly one of those that it takes, and so no secret."""


def _unit(value: object) -> type[ValueError]:
    """The error for what is no duration or size: a short number with two letters is a wrong one, and no secret."""
    return Misspelt if isinstance(value, str) and _MEASURE.fullmatch(value) else ValueError


def _shown(value: object, error: ValueError) -> str:
    """A value for a message, if it can be no secret that belongs elsewhere."""
    too_small = isinstance(value, int | float) and not isinstance(value, bool) and value <= 0
    return repr(value) if too_small or isinstance(error, Misspelt) else _kind(value)


def _kind(value: object) -> str:
    """What a value is, for messages that must not show it."""
    kinds = {int: "a number", float: "a number", str: "a text", dict: "a mapping", list: "a list"}
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return kinds.get(type(value), "a value of another kind")


def as_text(value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def one_of(*choices: str) -> Callable[[object], str]:
    """A check for one of some texts."""

    def check(value: object) -> str:
        if value not in choices:
            near = isinstance(value, str) and difflib.get_close_matches(value, choices, cutoff=0.7)
            raise (Misspelt if near else ValueError)(f"one of {', '.join(choices)}")
        return str(value)

    return check


def as_flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def as_positive_integer(value: object) -> int:
    """A whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number from 1 on")
    return value


def as_seconds(value: object) -> float:
    """A duration in seconds, given as a number or as text such as ``2 minutes``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise _unit(value)("a duration such as `500 ms`, `2 seconds` or `1 minute`")
    unit = match[2]
    scale = 0.001 if unit.startswith(("ms", "milli")) else _SECONDS[unit[0]]
    return float(match[1]) * scale


def as_positive_seconds(value: object) -> float:
    """As :func:`as_seconds`, but not zero."""
    seconds = as_seconds(value)
    if seconds <= 0:
        raise ValueError("a duration above zero, such as `10 seconds`")
    return seconds


def without_password(url: str) -> str:
    """Check that a URL, which messages may show, names no password.

    :raises ValueError: when it does.
    """
    user, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise ValueError("a URL without a password; the store's library finds it in the environment")
    return url


def parse_bytes(value: object) -> int:
    """A size in bytes, given as a number or as text such as ``64MiB``.

    :raises ValueError: saying what would be right.
    """
    match = _SIZE.match(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or int(match[1]) == 0:
        raise _unit(value)("a size such as `64MiB`")
    return int(match[1]) * _BYTES[match[2]]


def as_mapping(value: object) -> dict[str, str]:
    """A mapping of texts to texts; true and false become words as Spark and Java write them."""
    if not isinstance(value, dict):
        raise ValueError("a mapping of names to values")
    return {str(k): _spelled(v) for k, v in value.items()}


def _spelled(value: object) -> str:
    """A value as Spark and Java write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_postgres_uri(value: object) -> str:
    """Check a libpq URI without ever repeating it in a message: it may hold a password."""
    text = as_text(value)
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


def connection_uri(connection: str, scheme: str = "postgresql") -> str:
    """Turn an Airflow connection (URI or JSON) into a URI; its extras that are texts become parameters.

    :param scheme: of the URI that is made of a JSON object.
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
    given = {key: value for key, value in extra.items() if isinstance(value, str)}
    query = f"?{urlencode(given, quote_via=quote)}" if given else ""
    host = parts.get("host") or ""
    database = quote(parts.get("schema") or "", safe="")
    return f"{scheme}://{user}{password}{at}{host}{port}/{database}{query}"


def database_of(dsn: str) -> str:
    """Return the name of the database that a checked DSN leads to."""
    import psycopg2.extensions  # late, as above

    return str(psycopg2.extensions.parse_dsn(dsn)["dbname"])
