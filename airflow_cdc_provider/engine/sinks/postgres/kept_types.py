"""Decides whether a target column returns exactly the text that its source column writes. Pure decisions.

Input functions of Postgres round, cut and pad silently, so a type that accepts a text need not keep it.
"""

from __future__ import annotations

from airflow_cdc_provider.engine.core.type_shape import TypeShape

_UNBOUNDED = ("text", "character varying")
_BITS = ("bit", '"bit"', "bit varying")
_CLOCKS = (
    *("timestamp without time zone", "timestamp with time zone"),
    *("time without time zone", "time with time zone"),
)
_FRACTION = 6  # digits of a second that are kept without a modifier
_DIGITS = {"smallint": 5, "integer": 10, "bigint": 19, "oid": 10}
# Whole numbers in these types' texts; `real` uses an exponent from a million on, `double precision` from 10^15.
_WIDER = {
    "smallint": ("integer", "bigint", "real", "double precision"),
    "integer": ("bigint", "double precision"),
    "oid": ("bigint",),
    "jsonb": ("json",),
}
# Characters of the longest text.
_LONGEST = {"boolean": 1, "smallint": 6, "integer": 11, "bigint": 20, "oid": 10, "uuid": 36, "name": 63}


def keeps(source: TypeShape, target: TypeShape) -> bool:
    """Return whether the text of every value of one type is also its text in the other type."""
    if target.name in _UNBOUNDED and not (target.own or target.modifier):
        return True
    if source.sort == "array" and target.sort == "array":
        ours, theirs = source.elements[0], target.elements[0]
        # Elements of `box`, and perhaps those of extensions, have a different delimiter.
        apart = "box" in (ours.name, theirs.name) or (ours.own and ours.sort == "base")
        return keeps(ours, theirs) and (not apart or ours.name == theirs.name)
    if source.sort == "enum" and target.name in _UNBOUNDED and not target.own:
        return max(map(len, source.labels), default=0) <= target.numbers[0]
    if source.own != target.own or source.sort != target.sort:
        return False
    if source.sort == "enum":
        return set(source.labels) <= set(target.labels)
    if source.sort == "composite":
        return len(source.elements) == len(target.elements) and all(map(keeps, source.elements, target.elements))
    if source.sort == "range":
        return source.name == target.name and source.elements == target.elements
    if source.own:  # of an extension, whose schema may differ
        return source.name == target.name and target.modifier in ("", source.modifier)
    return _keeps_builtin(source, target)


def _keeps_builtin(source: TypeShape, target: TypeShape) -> bool:
    if source.name in _CLOCKS and source.name == target.name:
        return _precision(source) <= _precision(target)
    if source.name.startswith("interval") and target.name.startswith("interval"):
        return target.name in ("interval", source.name) and _precision(source) <= _precision(target)
    if target.name == "numeric":
        return _keeps_number(source, target.numbers)
    if target.name in _UNBOUNDED:
        longest = _longest(source)
        return longest is not None and longest <= target.numbers[0]
    if source.name in _BITS and target.name == "bit varying":
        return not target.numbers or (bool(source.numbers) and source.numbers[0] <= target.numbers[0])
    if target.name == "bpchar" and not target.modifier:  # without a length nothing is padded or cut
        return source.name in ("character", "bpchar")
    if source.name == target.name:
        return source.modifier == target.modifier
    return target.name in _WIDER.get(source.name, ())


def _keeps_number(source: TypeShape, target: tuple[int, ...]) -> bool:
    """Return whether a ``numeric`` with the given precision and scale keeps the values of a type."""
    if source.name in _DIGITS:
        return not target or (target[1] == 0 and _DIGITS[source.name] <= target[0])
    if source.name != "numeric":
        return False
    # Another scale would add trailing zeros, or round.
    return not target or (bool(source.numbers) and source.numbers[1] == target[1] and source.numbers[0] <= target[0])


def _longest(source: TypeShape) -> int | None:
    """Return the maximum number of characters of a value, if it is known."""
    if source.name in ("character varying", "character", *_BITS):
        return source.numbers[0] if source.numbers else None
    return _LONGEST.get(source.name)


def _precision(shape: TypeShape) -> int:
    return shape.numbers[0] if shape.numbers else _FRACTION
