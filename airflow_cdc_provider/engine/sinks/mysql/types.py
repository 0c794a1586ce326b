"""Maps Postgres types to MySQL types, and converts values so that they come back as exactly the same text.

Each Postgres type has a :class:`MysqlColumnType`: a column type, the conversion of texts to loaded values, the accepted
texts, and the conversion of the server's values back. Nothing is rounded, cut or padded: values that a column type
cannot hold are refused by name. Types that MySQL lacks are stored as text, which is always exact.

* ``numeric`` beyond 65 digits or a scale of 30, and without a precision, is text; ``NaN`` in others is refused.
* ``real`` is stored as DOUBLE, because FLOAT is printed with six digits. ``NaN``, infinities and ``-0`` are refused.
* ``timestamptz`` is DATETIME(6) in UTC; TIMESTAMP would end in 2038. Infinite dates, and dates before Christ or after
  the year 9999, are refused. Postgres has no zero dates.
* Arrays are JSON; an array with explicit bounds is a JSON string of its literal. ``json`` and ``jsonb`` are LONGTEXT
  with the text that Postgres wrote, because JSON columns rewrite it.
* Text is LONGTEXT, in a key VARCHAR: an index has 3072 bytes, which the key's texts share. Longer texts are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.errors import UncapturableTable
from airflow_cdc_provider.engine.core.table import Column, Table

INDEX_BYTES = 3072
"""Maximum size of a row in an index of InnoDB."""

_TEXT_BYTES = 4
_DIGITS, _SCALE = 65, 30

Convert = Callable[[pa.Array], pa.Array]


def _same(texts: pa.Array) -> pa.Array:
    return texts


@dataclass(frozen=True)
class MysqlColumnType:
    """The storage of values of a type.

    :param sql: the column's type, without its collation.
    :param encode: converts Postgres texts to loaded values.
    :param decode: converts results of :attr:`read` to Postgres texts.
    :param takes: a regular expression that the texts must match; ``None`` accepts all.
    :param longest: maximum number of characters (bytes for ``bytea``) of a value; 0 for any number.
    :param plain: loaded values contain neither quotes nor other special characters.
    :param hexadecimal: loaded values are hexadecimal digits of bytes.
    :param read: SQL that makes a text of a column.
    :param canonical: two keys are equal if the results for their texts are equal.
    """

    sql: str
    encode: Convert = _same
    decode: Convert = _same
    takes: str | None = None
    longest: int = 0
    plain: bool = True
    hexadecimal: bool = False
    read: str = "{}"
    canonical: Callable[[str], Any] = str

    @property
    def text(self) -> bool:
        """Return whether the column has characters, and so a collation."""
        return self.sql.startswith(("LONGTEXT", "VARCHAR", "CHAR"))

    @property
    def exact(self) -> bool:
        """Return whether the column has exact numbers, which must never be compared with texts.

        The server would compare the two as floating point numbers, so that keys with many digits equal their neighbors.
        """
        return self.sql.startswith(("TINYINT", "SMALLINT", "INT", "BIGINT", "DECIMAL"))

    def definition(self, collation: str) -> str:
        """Return the column's type as SQL."""
        return f"{self.sql} CHARACTER SET utf8mb4 COLLATE {collation}" if self.text else self.sql


def _each(function: Callable[[str], str]) -> Convert:
    """Return a conversion that handles every distinct value once."""

    def convert(texts: pa.Array) -> pa.Array:
        encoded = texts.dictionary_encode()
        values = pa.array([function(text) for text in encoded.dictionary.to_pylist()], pa.large_string())
        return values.take(encoded.indices)

    return convert


def _bits(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(texts, "t"), "1", "0").cast(pa.large_string())


def _truth(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(texts, "1"), "t", "f").cast(pa.large_string())


def join_texts(*parts: pa.Array | str, between: str = "") -> pa.Array:
    """Return the concatenation of texts row by row; null if any is null."""
    kind = pa.large_string()
    columns = [pa.scalar(part, kind) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*columns, pa.scalar(between, kind))


def _digits_of(texts: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(texts, 2)


def _bytea_of(texts: pa.Array) -> pa.Array:
    return join_texts("\\x", texts)


def _shorten(texts: pa.Array) -> pa.Array:
    """Return texts without trailing zeros of a fraction, which is always present."""
    return pc.replace_substring_regex(texts, r"\.?0+$", "")


def _utc(texts: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(texts, 0, -3)


def _with_utc(texts: pa.Array) -> pa.Array:
    return join_texts(_shorten(texts), "+00")


def float_text(text: str, digits: int) -> str:
    """Return a number as written by Postgres.

    :param text: the shortest digits that identify the number, in any form.
    :param digits: number of integral digits from which an exponent is used: 15 for ``float8``, 6 for ``float4``.
    """
    sign, figures, power = Decimal(text).as_tuple()
    assert isinstance(power, int)
    shown = "".join(map(str, figures)).rstrip("0")
    power += len(figures) - len(shown)
    minus = "-" if sign else ""
    if not shown:
        return f"{minus}0"
    exponent = power + len(shown) - 1
    if not -4 <= exponent < digits:
        fraction = f".{shown[1:]}" if len(shown) > 1 else ""
        return f"{minus}{shown[0]}{fraction}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if power >= 0:
        return minus + shown + "0" * power
    if exponent >= 0:
        return f"{minus}{shown[: exponent + 1]}.{shown[exponent + 1 :]}"
    return f"{minus}0.{'0' * (-exponent - 1)}{shown}"


def _digits_of_double(value: float) -> str:
    """Return the shortest digits that identify a number, as found by Postgres.

    Python and MySQL also accept digits half way to the next number, because these are rounded to an even one; Postgres
    requires digits that are nearer. Such digits number at most 17 only in the range that is checked here.
    """
    if not 9e15 <= abs(value) < 1e41:
        return repr(value)
    middles = {int(value) + int(math.nextafter(value, there)) for there in (-math.inf, math.inf)}
    candidates = (repr(value), *(f"{value:.{digits}e}" for digits in range(17)))
    return next(text for text in candidates if float(text) == value and 2 * int(Decimal(text)) not in middles)


_NEEDS_QUOTES = re.compile(r'^$|[{}"\\\s]|^null$', re.IGNORECASE)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class ArrayText:
    """Converts arrays of one element type between Postgres literals and JSON.

    :param element: ``number``, ``boolean`` or ``text``.
    :param delimiter: delimiter of elements; ``box`` has a semicolon.
    """

    element: str
    delimiter: str = ","

    def to_json(self, literal: str) -> str:
        """Return a literal as a JSON array, or as a JSON string if an array could not be converted back."""
        with suppress(ValueError, IndexError):
            made = self._parse(literal)
            if self.from_json(made) == literal:
                return made
        return json.dumps(literal, ensure_ascii=False)

    def from_json(self, text: str) -> str:
        """Return the literal that was converted to this JSON."""
        value = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
        return value if isinstance(value, str) and not isinstance(value, _Number) else self._literal(value)

    def _parse(self, literal: str) -> str:
        """Return a literal as JSON, element by element; brackets and delimiters keep their positions."""
        made, at = [], 0
        while at < len(literal):
            character = literal[at]
            if character in "{}":
                made.append("[" if character == "{" else "]")
                at += 1
            elif character == self.delimiter:
                made.append(", ")
                at += 1
            elif character == '"':
                end = at + 1
                while literal[end] != '"':
                    end += 2 if literal[end] == "\\" else 1
                made.append(
                    json.dumps(re.sub(r"\\(.)", r"\1", literal[at + 1 : end], flags=re.DOTALL), ensure_ascii=False)
                )
                at = end + 1
            else:
                end = at
                while end < len(literal) and literal[end] not in "{}" + self.delimiter:
                    end += 1
                made.append(self._element(literal[at:end]))
                at = end
        return "".join(made)

    def _element(self, text: str) -> str:
        if text == "NULL":
            return "null"
        if self.element == "boolean" and text in "tf":
            return "true" if text == "t" else "false"
        if self.element == "number" and _NUMBER.fullmatch(text):
            return text
        return json.dumps(text, ensure_ascii=False)

    def _literal(self, value: Any) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, bool):
            return "t" if value else "f"
        if isinstance(value, list):
            return "{" + self.delimiter.join(map(self._literal, value)) + "}"
        text = str(value)
        if isinstance(value, _Number) or not (_NEEDS_QUOTES.search(text) or self.delimiter in text):
            return text
        return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


class _Number(str):
    """A number of JSON, as written."""


def json_of(values: dict[str, str | None]) -> str:
    """Return an object of texts in the format of ``jsonb``: shorter keys first."""
    ordered = dict(sorted(values.items(), key=lambda item: (len(item[0].encode()), item[0].encode())))
    return json.dumps(ordered, ensure_ascii=False)


_INTEGER = r"-?\d+"
_DAY = r"\d{4}-\d\d-\d\d"
_REAL = r"0|-?(0\.0*[1-9]\d*|[1-9]\d*(\.\d+)?)(e[+-]\d+)?"
_CLOCK = r"\d\d:\d\d:\d\d(\.\d+)?"

_KINDS = {
    "boolean": MysqlColumnType("TINYINT(1)", _bits, _truth, "[tf]"),
    "smallint": MysqlColumnType("SMALLINT", takes=_INTEGER, canonical=int),
    "integer": MysqlColumnType("INT", takes=_INTEGER, canonical=int),
    "bigint": MysqlColumnType("BIGINT", takes=_INTEGER, canonical=int),
    "oid": MysqlColumnType("INT UNSIGNED", takes=_INTEGER, canonical=int),
    "real": MysqlColumnType("DOUBLE", decode=_each(lambda text: float_text(text, 6)), takes=_REAL, canonical=float),
    "double precision": MysqlColumnType(
        "DOUBLE",
        decode=_each(lambda text: float_text(_digits_of_double(float(text)), 15)),
        takes=_REAL,
        canonical=float,
    ),
    "date": MysqlColumnType("DATE", takes=_DAY),
    "time without time zone": MysqlColumnType("TIME(6)", decode=_shorten, takes=_CLOCK),
    "timestamp without time zone": MysqlColumnType("DATETIME(6)", decode=_shorten, takes=f"{_DAY} {_CLOCK}"),
    "timestamp with time zone": MysqlColumnType("DATETIME(6)", _utc, _with_utc, rf"{_DAY} {_CLOCK}\+00"),
    "uuid": MysqlColumnType("CHAR(36)"),
    "bytea": MysqlColumnType("LONGBLOB", _digits_of, _bytea_of, hexadecimal=True, read="LOWER(HEX({}))"),
}
_BYTES_IN_KEY = {
    "TINYINT(1)": 1,
    "SMALLINT": 2,
    "INT": 4,
    "INT UNSIGNED": 4,
    "BIGINT": 8,
    "DOUBLE": 8,
    "DATE": 3,
    "TIME(6)": 6,
    "DATETIME(6)": 8,
    "CHAR(36)": 36 * _TEXT_BYTES,
}
_DECIMAL_BYTES = 32
_TEXT = MysqlColumnType("LONGTEXT", plain=False)
_NUMBERS = ("smallint", "integer", "bigint", "oid", "real", "double precision", "numeric")

# Types of the sink's own columns.
FLAG = MysqlColumnType("TINYINT(1)", takes="[01]")
COUNTER = MysqlColumnType("BIGINT", takes=_INTEGER)
POSITION = MysqlColumnType("BIGINT UNSIGNED", takes=_INTEGER)
LETTER = MysqlColumnType("CHAR(1)", plain=False)
MOMENT = MysqlColumnType("DATETIME(6)")
WORDS = _TEXT


def column_type(column: Column) -> MysqlColumnType:
    """Return the storage of a column that is not part of a key.

    A domain is stored like its base type; other types of users are stored as text.
    """
    name = (column.beneath or column.type).partition(" COLLATE ")[0]
    if name.endswith("[]"):
        element = re.sub(r"\(.*?\)", "", name.removesuffix("[]"))
        sort = "number" if element in _NUMBERS else "boolean" if element == "boolean" else "text"
        array = ArrayText(sort, ";" if element == "box" else ",")
        return MysqlColumnType("LONGTEXT", _each(array.to_json), _each(array.from_json), plain=False)
    numeric = re.fullmatch(r"numeric\((\d+),(-?\d+)\)", name)
    if numeric:
        digits, scale = int(numeric[1]), int(numeric[2])
        if digits <= _DIGITS and 0 <= scale <= min(digits, _SCALE):
            return MysqlColumnType(f"DECIMAL({digits},{scale})", takes=r"-?\d+(\.\d+)?", canonical=Decimal)
        return _TEXT
    return _KINDS.get(re.sub(r"\(\d+\)", "", name), _TEXT)


def column_types(table: Table) -> dict[str, MysqlColumnType]:
    """Return the storage of a table's columns; the unbounded columns of a key share the size of an index.

    :raises UncapturableTable: when the key does not fit.
    """
    kinds = {column.name: column_type(column) for column in table.columns}
    unbounded = [name for name in table.key if kinds[name].sql in ("LONGTEXT", "LONGBLOB")]
    bounded = (kinds[name].sql for name in table.key if name not in unbounded)
    room = INDEX_BYTES - sum(_BYTES_IN_KEY.get(sql, _DECIMAL_BYTES) for sql in bounded)
    share = room // max(1, len(unbounded))
    if share < _TEXT_BYTES * 8 or len(table.key) > 16:
        raise UncapturableTable(
            f"the key of {table.label} has {len(table.key)} columns, which do not fit into an index of MySQL",
            "Do not capture the table, or give it a key with fewer columns.",
        )
    for name in unbounded:
        old = kinds[name]
        size = share if old.hexadecimal else share // _TEXT_BYTES
        kind = f"VARBINARY({size})" if old.hexadecimal else f"VARCHAR({size})"
        kinds[name] = replace(old, sql=kind, longest=size)
    return kinds
