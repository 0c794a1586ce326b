"""Reads JSON values back as the types that they were written from, and reports values of another type."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def as_shape(kind: type[T], values: Mapping[str, Any]) -> T:
    """Read a dataclass from its fields as JSON values; unknown keys, as a later version may write, are ignored.

    :raises ValueError: if a field is missing or has another type; names the field.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    found = {name: as_type(value, hints[name], name) for name, value in values.items() if name in hints}
    try:
        return kind(**found)
    except TypeError as e:  # a field that is missing
        raise ValueError(str(e)) from None


def as_type(value: Any, hint: Any, place: str) -> Any:
    """Check a JSON value against a type, and read the dataclasses in it.

    :param hint: a plain type, a dataclass, a ``list``, ``tuple`` or ``dict`` of these, a union, or ``Any``.
    :param place: the path of the value, for messages.
    :raises ValueError: if the value has another type; names ``place``.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for each in arguments:
            with contextlib.suppress(ValueError):
                return as_type(value, each, place)
    if origin is list and isinstance(value, list):
        return [as_type(each, arguments[0], place) for each in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(as_type(each, of, place) for each, of in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict):
        return {name: as_type(each, arguments[1], f"{place}.{name}") for name, each in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return as_shape(typing.cast(type[Any], hint), value)
    if origin is None and isinstance(value, bool) == (hint is bool):
        if hint is float and isinstance(value, int | float):
            return float(value)
        if hint is not float and isinstance(value, hint):
            return value
    raise ValueError(f"{place} is of another type")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
