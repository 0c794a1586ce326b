"""Converts Postgres's texts to typed Arrow arrays, and back to exactly the same texts, whole arrays at a time.

The conversion is lossless: a column gets a type only if all its texts can be restored unchanged, because a comparison
of source and sink relies on that. Values that such a type cannot store are refused by name: infinite dates, years
before 1 or after 9999, and NaN in a ``numeric`` with a precision. All other types of Postgres remain text, as on the
wire. The texts are those of a session with ``datestyle`` ISO, ``TimeZone`` UTC, ``extra_float_digits`` 3 and
``bytea_output`` hex.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.core.table import Column

TEXT = pa.large_string()

_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "date": pa.date32(),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
    "bytea": pa.large_binary(),
}
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
_DIGITS = 38  # of a 128-bit decimal
# The texts that a type accepts, if Postgres has further ones.
_TAKEN = {
    pa.date32(): r"^\d{4}-\d\d-\d\d$",
    pa.timestamp("us"): r"^\d{4}-\d\d-\d\d [0-9:.]+$",
    pa.timestamp("us", "UTC"): r"^\d{4}-\d\d-\d\d [0-9:.]+\+00$",
}
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_NIBBLES = np.zeros(256, dtype=np.uint8)
_NIBBLES[_HEX] = np.arange(16)


def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type that stores all, or nearly all, values of a column without loss, or text if there is none.

    A domain has the type of its base type.
    """
    name = column.type
    if not column.builtin:
        name = (column.beneath or "").partition(" COLLATE ")[0]
    numeric = _NUMERIC.fullmatch(name)
    if numeric is not None:
        precision, scale = map(int, numeric.groups())
        return pa.decimal128(precision, scale) if scale <= precision <= _DIGITS else TEXT
    return _TYPES.get(re.sub(r"\(\d+\)", "", name), TEXT)


def to_typed(texts: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """Convert texts of Postgres to typed values.

    :param texts: strings, null for NULL.
    :param kind: a type that :func:`arrow_type` returned.
    :param name: the column's name with its table, for messages.
    :raises LimitExceeded: if the type cannot store a value.
    """
    if pa.types.is_boolean(kind):
        return pc.equal(texts, "t")
    if pa.types.is_large_binary(kind):
        return _from_hex(texts)
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid as e:
        pattern = _TAKEN.get(kind, r"^-?[0-9.]+$")
        others = texts.filter(pc.invert(pc.match_substring_regex(texts, pattern)))
        if not len(others):
            raise
        raise LimitExceeded(
            f"the value {others[0].as_py()} of {name} cannot be stored as {kind}: dates and times range from the year 1"
            " to 9999, and a decimal number is finite",
            "No part of the change was applied, and a retry does not help. Change the value, or exclude its column with"
            " `columns` in the pipeline file.",
        ) from e


def to_texts(values: pa.Array) -> pa.Array:
    """Return the texts that Postgres writes for values of a type of :func:`arrow_type`; nulls remain null."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, pa.scalar("t", TEXT), pa.scalar("f", TEXT))
    if pa.types.is_decimal(kind):
        return _from_decimal(values)
    if pa.types.is_floating(kind):
        return _from_float(values)
    if pa.types.is_timestamp(kind):
        texts = values.cast(pa.timestamp("us")).cast(TEXT)  # always with six digits of the second
        texts = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
        return texts if kind.tz is None else _joined(texts, "+00")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _to_hex(values)
    return values.cast(TEXT)


def _joined(*parts: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*(pa.scalar(p, TEXT) if isinstance(p, str) else p for p in (*parts, "")))


def _from_decimal(values: pa.Array) -> pa.Array:
    """Write decimals with all digits of the scale; Arrow would write small numbers with an exponent."""
    kind = values.type
    whole = pa.Array.from_buffers(
        pa.decimal128(kind.precision, 0), len(values), values.buffers(), offset=values.offset
    ).cast(TEXT)
    if not kind.scale:
        return whole
    negative = pc.starts_with(whole, "-")
    digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), kind.scale + 1, "0")
    sign = pc.if_else(negative, pa.scalar("-", TEXT), pa.scalar("", TEXT))
    return _joined(
        sign, pc.utf8_slice_codeunits(digits, 0, -kind.scale), ".", pc.utf8_slice_codeunits(digits, -kind.scale)
    )


def _from_float(values: pa.Array) -> pa.Array:
    """Write floats with the fewest digits that read back as the same number, in the notation of Postgres.

    Arrow finds the same digits, and uses the same notation for fractions that are neither small nor large.
    """
    numbers = pc.fill_null(values, 0.5).to_numpy(zero_copy_only=False)
    magnitude = np.abs(numbers)
    double = pa.types.is_float64(values.type)
    whole = (magnitude < (1e15 if double else 1e6)) & (magnitude >= 1) & (numbers == np.trunc(numbers))
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(TEXT)
    texts = pc.if_else(pa.array(whole), integers, values.cast(TEXT))
    far = ~whole & (numbers != 0) & ~((magnitude >= 1e-4) & (magnitude < (1e10 if double else 1e6)))
    if not far.any():
        return texts
    return pc.replace_with_mask(texts, pa.array(far), pa.array([_spelled(number) for number in numbers[far]], TEXT))


def _spelled(number: np.floating) -> str:
    """Write a number as Postgres does.

    Postgres never uses digits that lie exactly between two numbers, but the next ones that need no rule for ties.
    """
    if not np.isfinite(number):
        return "NaN" if np.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    sign = "-" if number < 0 else ""
    number = abs(number)
    digits, exponent = _shortest(number)
    fixed_below = 15 if number.dtype == np.float64 else 6
    if -4 <= exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    if 0 <= exponent < fixed_below:
        whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
        return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"


def _shortest(number: np.floating) -> tuple[str, int]:
    """Return the digits of a positive number, and the exponent of the first digit."""
    mantissa, _, exponent = np.format_float_scientific(number, unique=True, trim="-").partition("e")
    digits = mantissa.replace(".", "")
    # Only in this range can few digits denote the middle between two numbers: 5**k divides a mantissa only for small k.
    tie = (2.0**52, 1e41) if number.dtype == np.float64 else (2.0**22, 1e20)
    if not tie[0] <= number <= tie[1]:
        return digits, int(exponent)
    lower, upper = (_middle(number, np.nextafter(number, number.dtype.type(end))) for end in (0, np.inf))
    exact = Fraction(int(number)) if number == int(number) else Fraction(float(number))
    for length in range(len(digits), 18):
        unit = Fraction(10) ** (int(exponent) - length + 1)
        near = round(exact / unit)
        inside = [n for n in (near - 1, near, near + 1) if lower < n * unit < upper]
        if inside:
            best = str(min(inside, key=lambda n: abs(n * unit - exact)))
            return best.rstrip("0"), int(exponent) + len(best) - length
    raise AssertionError(f"17 digits always suffice, but not for {number}")


def _middle(one: np.floating, other: np.floating) -> Fraction:
    return (Fraction(float(one)) + Fraction(float(other))) / 2


def _from_hex(texts: pa.Array) -> pa.Array:
    digits = pc.utf8_slice_codeunits(texts.cast(TEXT), 2)
    nibbles = _NIBBLES[_content(digits)]
    content = (nibbles[0::2] << 4 | nibbles[1::2]).astype(np.uint8)
    return _rebuilt(digits, content, lambda offsets: offsets // 2, pa.large_binary())


def _to_hex(values: pa.Array) -> pa.Array:
    values = values.cast(pa.large_binary())
    content = _content(values)
    digits = np.empty(2 * len(content), dtype=np.uint8)
    digits[0::2], digits[1::2] = _HEX[content >> 4], _HEX[content & 15]
    return _joined("\\x", _rebuilt(values, digits, lambda offsets: offsets * 2, TEXT))


def _offsets(values: pa.Array) -> NDArray[np.int64]:
    if not len(values):
        return np.zeros(1, dtype=np.int64)
    return np.frombuffer(values.buffers()[1], dtype=np.int64)[values.offset : values.offset + len(values) + 1]


def _content(values: pa.Array) -> NDArray[np.uint8]:
    """Return the concatenated bytes of all values of a large array."""
    offsets, buffer = _offsets(values), values.buffers()[2]
    if buffer is None:
        return np.zeros(0, dtype=np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]


def _rebuilt(
    values: pa.Array,
    content: NDArray[np.uint8],
    scale: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    kind: pa.DataType,
) -> pa.Array:
    """Return an array that has other bytes in place of those of ``values``."""
    offsets = _offsets(values)
    moved = np.ascontiguousarray(scale(offsets - offsets[0]))
    validity = None
    if values.null_count:
        validity = pa.array(pc.is_valid(values).to_numpy(zero_copy_only=False)).buffers()[1]  # without an offset
    buffers = [validity, pa.py_buffer(moved), pa.py_buffer(np.ascontiguousarray(content))]
    return pa.Array.from_buffers(kind, len(values), buffers, null_count=values.null_count)
