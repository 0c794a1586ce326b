"""A chunk: a range of a table's keys, or a set of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import values_hidden

_TITLE_WIDTH = 60


@dataclass(frozen=True)
class Chunk:
    """A range of a table's key: ``lower`` is included, ``upper`` is not.

    :param table: the table's label.
    :param index: position among the table's chunks, in the order of the key.
    :param lower: texts of the key columns, ``None`` for minus infinity.
    :param upper: texts of the key columns, ``None`` for plus infinity.
    """

    table: str
    index: int
    lower: tuple[str, ...] | None
    upper: tuple[str, ...] | None

    @property
    def whole(self) -> bool:
        """Return whether the chunk covers all rows of its table."""
        return self.lower is None and self.upper is None

    @property
    def title(self) -> str:
        """Return a title for humans, for example ``shop.orders[3] 1000 .. 2000``."""
        if self.whole:
            return f"{self.table}[{self.index}] all rows"
        bounds = " .. ".join(self.shown_bounds).strip()
        return f"{self.table}[{self.index}]" + (f" {bounds}" if any(self.shown_bounds) else "")

    @property
    def shown_bounds(self) -> tuple[str, str]:
        """Return the bounds for humans, shortened.

        A bound is empty if it is infinite, and both are empty if values of rows are hidden.
        """
        if values_hidden():
            return "", ""
        return _shown(self.lower), _shown(self.upper)

    def to_dict(self) -> dict[str, Any]:
        """Return the chunk as JSON values; :meth:`from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Chunk:
        """Read a chunk from the values that :meth:`to_dict` returned."""
        bounds = {side: None if values[side] is None else tuple(values[side]) for side in ("lower", "upper")}
        return cls(values["table"], values["index"], **bounds)


def _shown(bound: tuple[str, ...] | None) -> str:
    if bound is None:
        return ""
    text = bound[0] if len(bound) == 1 else f"({', '.join(bound)})"
    return text if len(text) <= _TITLE_WIDTH else text[: _TITLE_WIDTH - 1] + "…"
