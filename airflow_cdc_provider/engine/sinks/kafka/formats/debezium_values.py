"""How Debezium writes values of Postgres in JSON, and how they are read back to the very texts.

These are the encodings of its Postgres connector with adaptive time precision. What it would write with loss (an
``interval`` as microseconds, a ``timetz`` in UTC) or as a structure of its own (arrays, points, ranges) is text as
Postgres writes it instead.
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
_UNITS = {0: "s", 3: "ms", 6: "us"}  # of Arrow, by digits of the second
_MILLIS = 3  # digits of the second up to which Debezium counts milliseconds


@dataclass(frozen=True)
class Kind:
    """How the values of a column are written.

    :param type: Kafka Connect's name of the type.
    :param name: of its logical type, if it has one.
    :param parameters: of the logical type.
    :param encode: makes JSON of texts, vectorised; null stays null.
    :param decode: makes the text of a JSON value, whose numbers are given as they are spelled.
    """

    type: str
    name: str | None
    encode: Callable[[pa.Array], pa.Array]
    decode: Callable[[Any], str]
    parameters: tuple[tuple[str, str], ...] = ()


def kind_of(column: Column, decimals: Decimals) -> Kind:
    """The kind of a column; a domain has that of the type that it is made of."""
    name = column.type if column.builtin else (column.beneath or "").partition(" COLLATE ")[0]
    return _kind(name, decimals)


@cache
def _kind(name: str, decimals: Decimals) -> Kind:
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
        return Kind("string", "io.debezium.time.ZonedTimestamp", _zoned(digits), _zoned_text)
    return _KINDS.get(base, _STRING)


# -- numbers and texts -------------------------------------------------------------------------------


def _as_is(texts: pa.Array) -> pa.Array:
    return texts


def _floats(texts: pa.Array) -> pa.Array:
    """Numbers as they are spelled; NaN and infinities, which JSON lacks, as texts."""
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
    """The digits of a number as bytes, as Java's ``BigInteger`` has them, and how many of them are decimals."""
    number = Decimal(text)
    if not number.is_finite():
        raise LimitExceeded(
            f"the number {text} is not finite, which Kafka Connect's Decimal has to be",
            "Set `sink.decimals: string`, or leave the column out by `columns` in the pipeline file.",
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


def _decimal(precision: int, scale: int) -> Kind:
    def encode(texts: pa.Array) -> pa.Array:
        return pa.array([None if t is None else f'"{_unscaled(t)[0]}"' for t in texts.to_pylist()], TEXT)

    def decode(value: Any) -> str:
        return _spelled(value, max(scale, 0))

    parameters = (("scale", str(max(scale, 0))), ("connect.decimal.precision", str(precision)))
    return Kind("bytes", "org.apache.kafka.connect.data.Decimal", encode, decode, parameters)


def _variables(texts: pa.Array) -> pa.Array:
    found = [None if t is None else _unscaled(t) for t in texts.to_pylist()]
    return pa.array([None if f is None else f'{{"scale":{f[1]},"value":"{f[0]}"}}' for f in found], TEXT)


def _variable(value: Any) -> str:
    return _spelled(value["value"], int(value["scale"]))


# -- dates and times ---------------------------------------------------------------------------------


def _counted(texts: pa.Array, kind: pa.DataType, scale: int, count: Callable[[str], int]) -> pa.Array:
    """Dates or times as numbers: by Arrow where it reads them, one by one where it does not.

    :param kind: to which Arrow reads them.
    :param scale: by which its numbers are divided.
    :param count: for a text.
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
    """Microseconds since 1970 of a timestamp of any year."""
    match = _DATE.fullmatch(text)
    found = _days(text) * 86_400_000_000 + _of_day(match[4] or "00:00:00" if match else "")
    if not -_INT64 <= found <= _INT64:
        raise LimitExceeded(
            f"the timestamp {text} is beyond what a number of 64 bits counts in microseconds",
            "Change the value, or leave its column out by `columns` in the pipeline file.",
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
    """Microseconds of a time of day, of which 24:00 is the last."""
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
    """Days since 1970 of a date, or of a timestamp's, of any year.

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
    """The date of a day since 1970, and what follows the time before Christ; ``civil_from_days``, likewise."""
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year += era * 400 + (month <= 2)
    day = of_year - (153 * shifted + 2) // 5 + 1
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}", "" if year > 0 else " BC"


def _zoned(digits: int) -> Callable[[pa.Array], pa.Array]:
    """As ISO 8601 has them, in UTC, with all digits of the second that the type has."""

    def encode(texts: pa.Array) -> pa.Array:
        if digits in _UNITS:
            with suppress(pa.ArrowInvalid):  # of infinities, and of years that Arrow does not read
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
    """Timestamps in UTC as ISO 8601 has them.

    :raises ArrowInvalid: when Arrow does not read one.
    """
    spelled = texts.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit)).cast(TEXT)
    return joined('"', pc.binary_replace_slice(spelled, 10, 11, "T"), 'Z"')


def _iso_year(text: str) -> str:
    """A timestamp whose year is one of ISO 8601: before the year 1 comes 0, and more than four digits have a sign."""
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


_STRING = Kind("string", None, quoted, str)
_VARIABLE = Kind("struct", "io.debezium.data.VariableScaleDecimal", _variables, _variable)
_TIMES = {
    ("timestamp without time zone", True): Kind(
        "int64", "io.debezium.time.Timestamp", _timestamps(1000), _timestamp(1000)
    ),
    ("timestamp without time zone", False): Kind(
        "int64", "io.debezium.time.MicroTimestamp", _timestamps(1), _timestamp(1)
    ),
    ("time without time zone", True): Kind("int32", "io.debezium.time.Time", _times(1000), _time(1000)),
    ("time without time zone", False): Kind("int64", "io.debezium.time.MicroTime", _times(1), _time(1)),
}
_KINDS = {
    "boolean": Kind("boolean", None, _booleans, _truth),
    "smallint": Kind("int16", None, _as_is, str),
    "integer": Kind("int32", None, _as_is, str),
    "bigint": Kind("int64", None, _as_is, str),
    "oid": Kind("int64", None, _as_is, str),
    "real": Kind("float", None, _floats, str),
    "double precision": Kind("double", None, _floats, str),
    "bytea": Kind("bytes", None, _base64, _hex),
    "date": Kind("int32", "io.debezium.time.Date", _dates, _date),
    "json": Kind("string", "io.debezium.data.Json", quoted, str),
    "jsonb": Kind("string", "io.debezium.data.Json", quoted, str),
    "uuid": Kind("string", "io.debezium.data.Uuid", quoted, str),
    "xml": Kind("string", "io.debezium.data.Xml", quoted, str),
}
