"""The result of the comparison of a view with its SELECT."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from airflow_cdc_provider.engine.comparison.compare import Difference


@dataclass(frozen=True)
class ViewResult:
    """The result of the comparison of a view with its SELECT, both from one snapshot of the sink.

    :param view: the view's label.
    :param rows: number of rows of the view.
    :param queued: number of queued anchors, which were left out.
    :param unbuilt: number of anchors whose rows have not been built yet, which were left out.
    :param differences: the first differences, by anchor.
    :param difference_count: number of all anchors that differ, named or not.
    """

    view: str
    rows: int = 0
    queued: int = 0
    unbuilt: int = 0
    differences: tuple[Difference, ...] = ()
    difference_count: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the view's object in the ``--json`` output of ``verify``."""
        return {
            "view": self.view,
            "rows": self.rows,
            "equal": not self.difference_count,
            "queued": self.queued,
            "unbuilt": self.unbuilt,
            "differences": [asdict(difference) for difference in self.differences],
            "difference_count": self.difference_count,
        }
