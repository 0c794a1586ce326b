"""Converts values of messages to the types of the columns in the pipeline file, exactly or not at all.

Spark's ``from_json`` rounds decimals to a column's scale, turns ``1e400`` into infinity, reads 200 for a ``TINYINT`` as
-56, truncates the nanoseconds of a timestamp, takes the date of a timestamp, and reads a number as seconds since
1970. Columns of such types are therefore read as texts. Each text is then converted, or reported as *bad*.

``from_json`` also turns a number with a fraction or an exponent into a ``double`` before it becomes a text. So the JSON
is rewritten first: such numbers become strings with a mark by which they are recognized, see :func:`marked`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import cast

from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_cdc_provider.engine.sources.kafka.settings import Lenient, Unit

_LITERAL = r"-?\d++(?:\.\d++(?:[eE][+-]?\d++)?|[eE][+-]?\d++)"
# The text before such a number, with strings as a whole; each match begins where the previous one ended.
_UP_TO_LITERAL = rf'\G((?:[^"\d-]++|"(?:[^"\\]++|\\.)*+"|-?\d++(?![\d.eE]))*+)({_LITERAL})'
# Possessive quantifiers, because otherwise Java would nest a call for each character.
_PAIRED = r"(?s)^(?:[^\\]|\\[^u]|\\u(?![dD][89a-fA-F])....|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+$"
_NUMBER = r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?$"
_NOT_FINITE = r'^"?(?:NaN|[+-]?(?:Infinity|INF|Inf))"?$'
_POWER = r"^[+-]?(\d*)\.?(\d*)[eE]([+-]?\d+)$"
_DATE = r"^[+-]?\d{4,}-\d\d?-\d\d?$"
_TIME = r"^[+-]?\d{4,}-\d\d?-\d\d?(?:[ T]\d\d?(?::\d\d?){0,2}(?:\.\d{0,6}0*)?%s)?$"
_ZONE = r"(?: ?[A-Za-z+-][\w:+/-]*)?"
_WHOLE = r"^-?\d{1,19}$"
_PER_SECOND = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000}
_FIRST_DAY, _LAST_DAY, _DAY = -719_162, 2_932_896, 86_400  # of the years 1 to 9999, from 1970
# Number of significant digits that every float keeps, and number that distinguishes each float from all others.
_DIGITS: dict[type[t.DataType], tuple[int, int]] = {t.FloatType: (6, 9), t.DoubleType: (15, 17)}
_AS_TEXT = (t.FloatType, t.DoubleType, t.DecimalType, t.DateType, t.TimestampType, t.TimestampNTZType)


@dataclass(frozen=True)
class Values:
    """The way values are read and checked.

    :param lenient: changes of values to accept.
    :param units: by column, the unit of numbers for dates or times.
    :param mark: the prefix of numbers with a fraction; it is random, so that no message contains it.
    """

    lenient: frozenset[Lenient]
    units: Mapping[str, Unit]
    mark: str = field(default_factory=lambda: f"n{secrets.token_hex(8)}:")

    def schema(self, row: t.StructType) -> t.StructType:
        """Return the type as which ``from_json`` reads a row."""
        return t.StructType([t.StructField(each.name, _read_as(each.dataType)) for each in row])

    def value(self, read: Column, each: t.StructField) -> Column:
        """Return the value of a column; any value if :meth:`bad` is true."""
        return self._value(read, each.dataType, self.units.get(each.name))

    def bad(self, read: Column, each: t.StructField) -> Column | None:
        """Return whether a value does not fit its column; ``None`` if ``from_json`` has reported that already."""
        return self._bad(read, each.dataType, self.units.get(each.name))

    def _value(self, read: Column, kind: t.DataType, unit: Unit | None = None) -> Column:
        if isinstance(kind, t.StringType):
            return f.when(f.contains(read, f.lit(self.mark)), self._unmarked(read)).otherwise(read)
        if isinstance(kind, _AS_TEXT):
            return _converted(self._plain(read), kind, unit)
        if isinstance(kind, t.ByteType):
            return read.try_cast(kind)
        if isinstance(kind, t.ArrayType) and self._changes(kind):
            return f.transform(read, lambda item: self._value(item, kind.elementType))
        if isinstance(kind, t.MapType) and self._changes(kind):
            return f.transform_values(read, lambda _, item: self._value(item, kind.valueType))
        if isinstance(kind, t.StructType) and self._changes(kind):
            inner = [self._value(read[each.name], each.dataType).alias(each.name) for each in kind]
            return f.when(read.isNotNull(), f.struct(*inner))
        return read

    def _changes(self, kind: t.DataType) -> bool:
        """Return whether values differ from those of ``from_json``."""
        if isinstance(kind, t.ArrayType):
            return self._changes(kind.elementType)
        if isinstance(kind, t.MapType):
            return self._changes(kind.valueType)
        if isinstance(kind, t.StructType):
            return any(self._changes(each.dataType) for each in kind)
        return isinstance(kind, (*_AS_TEXT, t.StringType, t.ByteType))

    def _plain(self, read: Column) -> Column:
        """Return a text without the mark of a number."""
        return f.when(read.startswith(self.mark), f.substring(read, len(self.mark) + 1, 1 << 30)).otherwise(read)

    def _unmarked(self, read: Column) -> Column:
        """Return a text that is a marked number, or JSON that contains some, without the marks."""
        inside = f.regexp_replace(read, rf'"{self.mark}([^"]*)"', "$1")
        return f.when(read.startswith(self.mark), f.substring(read, len(self.mark) + 1, 1 << 30)).otherwise(inside)

    def _bad(self, read: Column, kind: t.DataType, unit: Unit | None = None) -> Column | None:
        if isinstance(kind, t.ByteType):
            return ~read.between(-128, 127)
        if isinstance(kind, _AS_TEXT):
            return read.isNotNull() & f.coalesce(self._test(kind, unit)(self._plain(read)), f.lit(True))
        if isinstance(kind, t.ArrayType):
            return _any(read, lambda item: self._bad(item, kind.elementType))
        if isinstance(kind, t.MapType):
            return _any(f.map_values(read), lambda item: self._bad(item, kind.valueType))
        if isinstance(kind, t.StructType):
            inner = [bad for each in kind if (bad := self._bad(read[each.name], each.dataType)) is not None]
            return reduce(or_, inner) if inner else None
        return None

    def _test(self, kind: t.DataType, unit: Unit | None) -> Callable[[Column], Column]:
        if unit is not None:
            return lambda text: _not_counted(text, unit)
        if isinstance(kind, t.DecimalType):
            return lambda text: _not_decimal(text, kind, "decimals" in self.lenient)
        if isinstance(kind, t.FloatType | t.DoubleType):
            return lambda text: _not_float(text, kind, "floats" in self.lenient)
        if "times" in self.lenient:
            return lambda text: text.rlike(_WHOLE) | _none(text, kind)
        shape = _DATE if isinstance(kind, t.DateType) else _TIME % (_ZONE if isinstance(kind, t.TimestampType) else "")
        return lambda text: ~text.rlike(shape) | _none(text, kind)


def marked(text: Column, values: Values) -> Column:
    """Return JSON in which numbers with a fraction or an exponent are strings that begin with the mark."""
    return f.regexp_replace(text, _UP_TO_LITERAL, f'$1"{values.mark}$2"')


def paired(text: Column) -> Column:
    """Return whether JSON escapes surrogates only in pairs; fast for texts with few escaped surrogates."""
    none = ~(f.contains(text, f.lit("\\ud")) | f.contains(text, f.lit("\\uD")))
    return none | text.rlike(_PAIRED)


def counts_in(kind: t.DataType) -> tuple[Unit, ...]:
    """Return the units in which a number may represent a value of a type."""
    if isinstance(kind, t.DateType):
        return ("days",)
    return ("seconds", "milliseconds", "microseconds") if isinstance(kind, t.TimestampType | t.TimestampNTZType) else ()


def _read_as(kind: t.DataType) -> t.DataType:
    if isinstance(kind, t.ByteType):
        return t.ShortType()
    if isinstance(kind, _AS_TEXT):
        return t.StringType()
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(_read_as(kind.elementType), kind.containsNull)
    if isinstance(kind, t.MapType):
        return t.MapType(kind.keyType, _read_as(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, t.StructType):
        return t.StructType([t.StructField(each.name, _read_as(each.dataType), each.nullable) for each in kind])
    return kind


def _converted(text: Column, kind: t.DataType, unit: Unit | None) -> Column:
    if unit == "days":
        return f.date_add(f.lit("1970-01-01").cast("date"), text.try_cast("int"))
    if unit is not None:
        micros = f.try_multiply(text.try_cast("bigint"), f.lit(1_000_000 // _PER_SECOND[unit]))
        return f.timestamp_micros(micros).cast(kind)
    if isinstance(kind, t.FloatType | t.DoubleType):
        return f.btrim(text, f.lit('"')).try_cast(kind)
    return text.try_cast(kind)


def _none(text: Column, kind: t.DataType) -> Column:
    return text.try_cast(kind).isNull()


def _any(items: Column, bad: Callable[[Column], Column | None]) -> Column | None:
    """Return whether some item is bad; ``None`` if no item can be."""
    if bad(items) is None:
        return None
    return f.coalesce(f.exists(items, lambda item: f.coalesce(cast(Column, bad(item)), f.lit(False))), f.lit(False))


def _not_counted(text: Column, unit: Unit) -> Column:
    number = text.try_cast("bigint")
    factor = 1 if unit == "days" else _DAY * _PER_SECOND[unit]
    inside = number.between(_FIRST_DAY * factor, (_LAST_DAY + 1) * factor - 1)
    return ~text.rlike(_WHOLE) | number.isNull() | ~inside


def _not_decimal(text: Column, kind: t.DecimalType, lenient: bool) -> Column:
    none = ~text.rlike(_NUMBER) | _none(text, kind)
    if lenient:
        return none
    # 12e-3 has as many decimals as its fraction and its exponent give it, without trailing zeros.
    whole, fraction, power = (f.regexp_extract(text, _POWER, group) for group in (1, 2, 3))
    digits = f.concat(whole, fraction)
    kept = f.rtrim(digits, f.lit("0"))
    decimals = f.length(fraction) - power.try_cast("int") - (f.length(digits) - f.length(kept))
    rounded = f.when(text.rlike("[eE]"), (kept != "") & (decimals > kind.scale)).otherwise(
        ~text.rlike(rf"^[+-]?\d*\.?\d{{0,{kind.scale}}}0*$")
    )
    return none | f.coalesce(rounded, f.lit(True))


def _not_float(text: Column, kind: t.DataType, lenient: bool) -> Column:
    """Return whether a float does not keep a number.

    A float keeps a number if it is the number that its digits identify among all floats. Many programs write as many
    digits as distinguish any two floats, whatever the float is. Of whole numbers, all digits count.
    """
    if lenient:
        return ~(text.rlike(_NUMBER) | text.rlike(_NOT_FINITE))
    least, most = _DIGITS[type(kind)]
    number = text.try_cast(kind)
    infinite = f.abs(number) == f.lit("Infinity").cast(kind)
    digits, kept = _significant(text), _significant(number.cast("string"))
    count = f.length(digits)
    same = (count <= least) | (digits == kept) | ((count == most) & text.rlike("[.eE]"))
    if isinstance(kind, t.FloatType):
        same = same | (number.cast("double") == text.try_cast("double"))
    vanished = (number == 0) & (digits != "")
    finite = text.rlike(_NUMBER) & ~infinite & ~vanished & ((f.length(text) <= least) | same)
    return ~(finite | text.rlike(_NOT_FINITE))


def _significant(text: Column) -> Column:
    """Return the significant digits of a number, without leading and trailing zeros."""
    return f.btrim(f.regexp_replace(text, r"[eE].*$|[^\d]", ""), f.lit("0"))
