"""The components of a Postgres type that determine which values it stores; the same for source and target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_MODIFIER = re.compile(r"\([^()]*\)")
Sort = Literal["base", "array", "enum", "composite", "range"]
SORTS: Mapping[str, Sort] = {"a": "array", "e": "enum", "c": "composite", "r": "range", "m": "range"}


@dataclass(frozen=True)
class TypeShape:
    """The components of a type; a domain has the shape of its base type.

    :param name: its name as Postgres writes it, without a modifier; a type that users created has no schema in it.
    :param modifier: its modifier in parentheses, such as ``(10,2)``; empty without.
    :param own: whether users or an extension created it.
    :param labels: the labels of an enum.
    :param elements: an array's element, a composite's attributes, or a range's bounds.
    """

    name: str
    sort: Sort = "base"
    modifier: str = ""
    own: bool = False
    labels: tuple[str, ...] = ()
    elements: tuple[TypeShape, ...] = ()

    @classmethod
    def builtin(cls, text: str) -> TypeShape:
        """Return the shape of a type that comes with Postgres.

        :param text: the type as ``format_type`` writes it.
        """
        if text.endswith("[]"):
            return cls(_MODIFIER.sub("", text), "array", elements=(cls.builtin(text[:-2]),))
        found = _MODIFIER.search(text)
        return cls(_MODIFIER.sub("", text), modifier=found[0] if found else "")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TypeShape:
        """Read a shape from JSON values."""
        elements = tuple(map(cls.from_dict, values["elements"]))
        return cls(**{**values, "labels": tuple(values["labels"]), "elements": elements})

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers in the modifier of a type that comes with Postgres."""
        return tuple(int(number) for number in self.modifier[1:-1].split(",") if number)
