"""Parses and checks values of the pipeline file, and describes valid ones."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from urllib.parse import quote, urlencode, urlsplit

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|seconds?|m|minutes?|h|hours?)$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"^(\d+)\s*(B|KiB|MiB|GiB)?$")
_BYTES = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def as_text(value: object) -> str:
    """Check a text that must not be empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a check that accepts one of the given texts."""

    def check(value: object) -> str:
        if value not in choices:
            near = isinstance(value, str) and difflib.get_close_matches(value, choices, cutoff=0.7)
            raise (Misspelt if near else ValueError)(f"one of {', '.join(choices)}")
        return str(value)

    return check


def as_flag(value: object) -> bool:
    """Check a value that must be true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def as_positive_integer(value: object) -> int:
    """Check a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a whole number from 1 on")
    return value


def as_seconds(value: object) -> float:
    """Parse a duration, given as a number of seconds or as text such as ``2 minutes``, into seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise _unit(value)("a duration such as `500 ms`, `2 seconds` or `1 minute`")
    unit = match[2]
    scale = 0.001 if unit.startswith(("ms", "milli")) else _SECONDS[unit[0]]
    return float(match[1]) * scale


def as_positive_seconds(value: object) -> float:
    """Parse a duration as :func:`as_seconds` does, and refuse zero."""
    seconds = as_seconds(value)
    if seconds <= 0:
        raise ValueError("a duration above zero, such as `10 seconds`")
    return seconds


def parse_bytes(value: object) -> int:
    """Parse a size, given as a number of bytes or as text such as ``64MiB``, into bytes.

    :raises ValueError: if it is invalid; describes valid sizes.
    """
    match = _SIZE.match(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or int(match[1]) == 0:
        raise _unit(value)("a size such as `64MiB`")
    return int(match[1]) * _BYTES[match[2]]


def as_count_or_zero(value: object) -> int:
    """Check a whole number from zero on."""
    return 0 if value == 0 and not isinstance(value, bool) else as_positive_integer(value)


def parse_bytes_or_zero(value: object) -> int:
    """Parse a size as :func:`parse_bytes` does, or zero."""
    return 0 if value == 0 and not isinstance(value, bool) else parse_bytes(value)


def as_mapping(value: object) -> dict[str, str]:
    """Check a mapping of texts to texts; true and false become words as Spark and Java write them."""
    if not isinstance(value, dict):
        raise ValueError("a mapping of names to values")
    return {str(k): spelled(v) for k, v in value.items()}


def spelled(value: object) -> str:
    """Return a value as Spark and Java write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_postgres_uri(value: object) -> str:
    """Check a libpq URI without quoting it in a message, because it may contain a password."""
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
    # libpq lets the password end at the first @, and would show the rest as a host in its messages.
    if parts.netloc.count("@") > 1:
        raise ValueError(f"{wanted}, with special characters of user and password escaped (%40 for @)")
    import psycopg2.extensions  # late: reading Dags must not load a driver

    try:
        ports = psycopg2.extensions.parse_dsn(text).get("port", "")
    except psycopg2.Error:
        raise ValueError(f"{wanted}, with parameters that libpq knows") from None
    # There is one port for each host; urllib does not support that.
    if not all(port == "" or (port.isdecimal() and 0 < int(port) < 1 << 16) for port in ports.split(",")):
        raise ValueError(wanted)
    return text


def connection_uri(connection: str, scheme: str = "postgresql") -> str:
    """Turn an Airflow connection (URI or JSON) into a URI; extras that are texts become parameters.

    :param scheme: the scheme of a URI that is built from JSON.
    :raises ValueError: if the JSON is malformed.
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
    """Return the name of the database in a checked DSN."""
    import psycopg2.extensions  # late, as above

    return str(psycopg2.extensions.parse_dsn(dsn)["dbname"])


_MEASURE = re.compile(r"\d{1,4}(\.\d{1,2})? ?[A-Za-z]{0,2}")


class Misspelt(ValueError):
    """An error for a value that resembles a valid one, so that it is not a secret and may be shown."""


def _unit(value: object) -> type[ValueError]:
    """Return the class of the error for an invalid duration or size.

    A short number followed by up to two letters has a wrong unit; it is not a secret and may be shown.
    """
    return Misspelt if isinstance(value, str) and _MEASURE.fullmatch(value) else ValueError


PIPELINE_NAME = re.compile(r"[a-z0-9_]{1,40}")
