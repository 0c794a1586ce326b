"""Converts Postgres values to Debezium's JSON encodings, and back to exactly the same texts.

These are the encodings of Debezium's Postgres connector with adaptive time precision. Two kinds of values are written
as Postgres texts instead: those that Debezium encodes with loss (an ``interval`` as microseconds, a ``timetz`` in UTC),
and those with a special structure (arrays, points, ranges).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.kafka.formats.json_columns import TEXT, joined, quoted

Decimals = Literal["string", "precise"]

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_TYPE = re.compile(r"^([a-z ]+?)(?:\((\d+)(?:,(-?\d+))?\))?( with(?:out)? time zone)?$")
_DATE = re.compile(r"^(\d+)-(\d\d)-(\d\d)(?: (\d\d:\d\d:\d\d(?:\.\d+)?))?( BC)?$")
_TIME = re.compile(r"^(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?$")
_EPOCH = "1970-01-01 "
_ISO = re.compile(r"^([+-]?\d+)-(\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.(\d+))?Z$")
_LAST_UNSIGNED = 9999
_FAR = r"( BC|^\d{5,}-.*)$"
_UNITS = {0: "s", 3: "ms", 6: "us"}  # units of Arrow, by digits of the second
_MILLIS = 3  # up to this many digits of the second, Debezium counts milliseconds


@dataclass(frozen=True)
class DebeziumType:
    """The encoding of a column's values.

    :param type: Kafka Connect's name of the type.
    :param name: name of its logical type, if it has one.
    :param parameters: parameters of the logical type.
    :param encode: makes JSON of texts, vectorized; null stays null.
    :param decode: makes the text of a JSON value, with numbers as texts.
    """

    type: str
    name: str | None
    encode: Callable[[pa.Array], pa.Array]
    decode: Callable[[Any], str]
    parameters: tuple[tuple[str, str], ...] = ()


def debezium_type(column: Column, decimals: Decimals) -> DebeziumType:
    """Return the encoding of a column; a domain has that of its base type."""
    name = column.type if column.builtin else (column.beneath or "").partition(" COLLATE ")[0]
    return _debezium_type(name, decimals)


@cache
def _debezium_type(name: str, decimals: Decimals) -> DebeziumType:
    match = _TYPE.fullmatch(name)
    if match is None:
        return _STRING
    base, precision, scale = match[1] + (match[4] or ""), match[2], match[3]
    if base == "numeric" and decimals == "precise":
        return _VARIABLE if precision is None else _decimal(int(precision), int(scale or 0))
    digits = 6 if precision is None else int(precision)
    if base in ("timestamp without time zone", "time without time zone"):
        return _TIMES[base, digits <= _MILLIS]
    if base == "timestamp with time zone":
        return DebeziumType("string", "io.debezium.time.ZonedTimestamp", _zoned(digits), _zoned_text)
    return _KINDS.get(base, _STRING)


# -- numbers and texts -------------------------------------------------------------------------------


def _as_is(texts: pa.Array) -> pa.Array:
    return texts


def _floats(texts: pa.Array) -> pa.Array:
    """Return numbers unchanged; NaN and infinities, which JSON lacks, become strings."""
    return pc.if_else(pc.match_substring(texts, "N"), quoted(texts), _infinite(texts))


def _infinite(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.match_substring(texts, "I"), quoted(texts), texts)


def _booleans(texts: pa.Array) -> pa.Array:
    words = pc.if_else(pc.equal(texts, "t"), pa.scalar("true", TEXT), pa.scalar("false", TEXT))
    return pc.if_else(pc.is_valid(texts), words, pa.scalar(None, TEXT))


def _truth(value: Any) -> str:
    return "t" if value else "f"


def _base64(texts: pa.Array) -> pa.Array:
    found = [None if t is None else base64.b64encode(bytes.fromhex(t[2:])).decode() for t in texts.to_pylist()]
    return joined('"', pa.array(found, TEXT), '"')


def _hex(value: Any) -> str:
    return "\\x" + base64.b64decode(value).hex()


# -- decimal numbers ---------------------------------------------------------------------------------


def _unscaled(text: str) -> tuple[str, int]:
    """Return the digits of a number as bytes of Java's ``BigInteger``, and the number of its decimals."""
    number = Decimal(text)
    if not number.is_finite():
        raise LimitExceeded(
            f"the number {text} is not finite, but Kafka Connect's Decimal requires a finite number",
            "Set `sink.decimals: string`, or leave the column out with `columns` in the pipeline file.",
        )
    _, _, fraction = text.partition(".")
    whole = int(text.replace(".", ""))
    return base64.b64encode(whole.to_bytes((whole + (whole < 0)).bit_length() // 8 + 1, signed=True)).decode(), len(
        fraction
    )


def _spelled(value: str, scale: int) -> str:
    whole = int.from_bytes(base64.b64decode(value), signed=True)
    digits = str(abs(whole)).rjust(scale + 1, "0")
    sign = "-" if whole < 0 else ""
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else f"{sign}{digits}"


def _decimal(precision: int, scale: int) -> DebeziumType:
    def encode(texts: pa.Array) -> pa.Array:
        return pa.array([None if t is None else f'"{_unscaled(t)[0]}"' for t in texts.to_pylist()], TEXT)

    def decode(value: Any) -> str:
        return _spelled(value, max(scale, 0))

    parameters = (("scale", str(max(scale, 0))), ("connect.decimal.precision", str(precision)))
    return DebeziumType("bytes", "org.apache.kafka.connect.data.Decimal", encode, decode, parameters)


def _variables(texts: pa.Array) -> pa.Array:
    found = [None if t is None else _unscaled(t) for t in texts.to_pylist()]
    return pa.array([None if f is None else f'{{"scale":{f[1]},"value":"{f[0]}"}}' for f in found], TEXT)


def _variable(value: Any) -> str:
    return _spelled(value["value"], int(value["scale"]))


# -- dates and times ---------------------------------------------------------------------------------


def _counted(texts: pa.Array, kind: pa.DataType, scale: int, count: Callable[[str], int]) -> pa.Array:
    """Return dates or times as numbers, with Arrow if it can parse all of them, otherwise one by one.

    :param kind: type as which Arrow parses them.
    :param scale: divisor of its numbers.
    :param count: returns the number for a text.
    """
    try:
        numbers = texts.cast(kind).cast(pa.int64() if kind != pa.date32() else pa.int32())
    except pa.ArrowInvalid:
        return pa.array([None if text is None else str(count(text)) for text in texts.to_pylist()], TEXT)
    if scale > 1:
        micros = pc.fill_null(numbers, 0).to_numpy()
        numbers = pc.if_else(pc.is_valid(texts), pa.array(np.floor_divide(micros, scale)), pa.scalar(None, pa.int64()))
    return numbers.cast(TEXT)


def _dates(texts: pa.Array) -> pa.Array:
    return _counted(texts, pa.date32(), 1, lambda text: _infinity(text, _INT32) or _days(text))


def _date(value: Any) -> str:
    number = int(value)
    return _infinity_text(number, _INT32) or _civil(number)[0] + _civil(number)[1]


def _timestamps(scale: int) -> Callable[[pa.Array], pa.Array]:
    def count(text: str) -> int:
        return _infinity(text, _INT64) or _micros(text) // scale

    return lambda texts: _counted(texts, pa.timestamp("us"), scale, count)


def _timestamp(scale: int) -> Callable[[Any], str]:
    def decode(value: Any) -> str:
        number = int(value)
        if infinity := _infinity_text(number, _INT64):
            return infinity
        days, rest = divmod(number * scale, 86_400_000_000)
        date, era = _civil(days)
        return f"{date} {_clock(rest)}{era}"

    return decode


def _micros(text: str) -> int:
    """Return the microseconds since 1970 of a timestamp of any year."""
    match = _DATE.fullmatch(text)
    found = _days(text) * 86_400_000_000 + _of_day(match[4] or "00:00:00" if match else "")
    if not -_INT64 <= found <= _INT64:
        raise LimitExceeded(
            f"the timestamp {text} is out of range because its microseconds do not fit in 64 bits",
            "Change the value, or leave its column out with `columns` in the pipeline file.",
        )
    return found


def _times(scale: int) -> Callable[[pa.Array], pa.Array]:
    def count(text: str) -> int:
        return _of_day(text.removeprefix(_EPOCH)) // scale

    def encode(texts: pa.Array) -> pa.Array:
        return _counted(joined(_EPOCH, texts), pa.timestamp("us"), scale, count)

    return encode


def _time(scale: int) -> Callable[[Any], str]:
    return lambda value: _clock(int(value) * scale)


def _of_day(text: str) -> int:
    """Return the microseconds of a time of day; 24:00 is the last one."""
    match = _TIME.fullmatch(text)
    assert match is not None, text
    hours, minutes, seconds = (int(match[n]) for n in (1, 2, 3))
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + int((match[4] or "").ljust(6, "0"))


def _clock(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _infinity(text: str, last: int) -> int | None:
    return {"infinity": last, "-infinity": -last - 1}.get(text)


def _infinity_text(number: int, last: int) -> str | None:
    return {last: "infinity", -last - 1: "-infinity"}.get(number)


def _days(text: str) -> int:
    """Return the days since 1970 of a date or timestamp of any year.

    After Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", ``days_from_civil``.
    """
    match = _DATE.fullmatch(text)
    assert match is not None, text
    year, month, day = (int(match[n]) for n in (1, 2, 3))
    if match[5]:
        year = 1 - year
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _civil(days: int) -> tuple[str, str]:
    """Return the date of a day since 1970, and the era suffix; after the same source, ``civil_from_days``."""
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year += era * 400 + (month <= 2)
    day = of_year - (153 * shifted + 2) // 5 + 1
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}", "" if year > 0 else " BC"


def _zoned(digits: int) -> Callable[[pa.Array], pa.Array]:
    """Return an encoder for timestamps as ISO 8601 in UTC, with as many digits of the second as the type has."""

    def encode(texts: pa.Array) -> pa.Array:
        if digits in _UNITS:
            with suppress(pa.ArrowInvalid):  # Arrow cannot parse infinities and some years
                return _near(texts, _UNITS[digits])
        if pc.any(pc.match_substring_regex(texts, _FAR)).as_py():
            texts = pa.array([None if text is None else _iso_year(text) for text in texts.to_pylist()], TEXT)
        iso = pc.replace_substring(texts, " ", "T", max_replacements=1)
        if digits:
            iso = pc.replace_substring_regex(iso, r":(\d\d)\+00$", r":\1.+00")
            iso = pc.replace_substring_regex(iso, r"\.(\d*)\+00$", rf".\1{'0' * digits}+00")
            iso = pc.replace_substring_regex(iso, rf"\.(\d{{{digits}}})0*\+00$", r".\1+00")
        return quoted(pc.replace_substring_regex(iso, r"\+00$", "Z"))

    return encode


def _near(texts: pa.Array, unit: str) -> pa.Array:
    """Return timestamps in UTC as ISO 8601.

    :raises ArrowInvalid: when Arrow cannot parse one.
    """
    spelled = texts.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit)).cast(TEXT)
    return joined('"', pc.binary_replace_slice(spelled, 10, 11, "T"), 'Z"')


def _iso_year(text: str) -> str:
    """Return a timestamp with a year of ISO 8601: 0 precedes the year 1, and years of more than four digits have a
    sign.
    """
    year, hyphen, rest = text.removesuffix(" BC").partition("-")
    if not hyphen or not year:
        return text
    number = 1 - int(year) if text.endswith(" BC") else int(year)
    sign = "-" if number < 0 else "+" if number > _LAST_UNSIGNED else ""
    return f"{sign}{abs(number):04}-{rest}"


def _zoned_text(value: Any) -> str:
    match = _ISO.fullmatch(str(value))
    if match is None:
        return str(value)
    year, day, clock, fraction = int(match[1]), match[2], match[3], (match[4] or "").rstrip("0")
    date = f"{year if year > 0 else 1 - year:04}-{day}"
    return f"{date} {clock}{'.' * bool(fraction)}{fraction}+00{'' if year > 0 else ' BC'}"


_STRING = DebeziumType("string", None, quoted, str)
_VARIABLE = DebeziumType("struct", "io.debezium.data.VariableScaleDecimal", _variables, _variable)
_TIMES = {
    ("timestamp without time zone", True): DebeziumType(
        "int64", "io.debezium.time.Timestamp", _timestamps(1000), _timestamp(1000)
    ),
    ("timestamp without time zone", False): DebeziumType(
        "int64", "io.debezium.time.MicroTimestamp", _timestamps(1), _timestamp(1)
    ),
    ("time without time zone", True): DebeziumType("int32", "io.debezium.time.Time", _times(1000), _time(1000)),
    ("time without time zone", False): DebeziumType("int64", "io.debezium.time.MicroTime", _times(1), _time(1)),
}
_KINDS = {
    "boolean": DebeziumType("boolean", None, _booleans, _truth),
    "smallint": DebeziumType("int16", None, _as_is, str),
    "integer": DebeziumType("int32", None, _as_is, str),
    "bigint": DebeziumType("int64", None, _as_is, str),
    "oid": DebeziumType("int64", None, _as_is, str),
    "real": DebeziumType("float", None, _floats, str),
    "double precision": DebeziumType("double", None, _floats, str),
    "bytea": DebeziumType("bytes", None, _base64, _hex),
    "date": DebeziumType("int32", "io.debezium.time.Date", _dates, _date),
    "json": DebeziumType("string", "io.debezium.data.Json", quoted, str),
    "jsonb": DebeziumType("string", "io.debezium.data.Json", quoted, str),
    "uuid": DebeziumType("string", "io.debezium.data.Uuid", quoted, str),
    "xml": DebeziumType("string", "io.debezium.data.Xml", quoted, str),
}
