"""What a store tells about the upkeep of a view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from airflow_cdc_provider.engine.views.definition import View


@dataclass(frozen=True)
class ViewExplanation:
    """The upkeep of a view in a store.

    :param select: the SELECT that runs for affected anchors.
    :param mirrored: whether the store has the tables that the view reads; otherwise the rest is unknown.
    :param rows_per_change: by alias, the estimated number of rows of the view for one row of the table; ``None``
        without statistics.
    :param indexes: the statements that create missing indexes.
    """

    view: View
    select: str
    mirrored: bool
    rows_per_change: Mapping[str, float | None]
    indexes: tuple[str, ...] = ()
