"""A version of a view in the commit record: its definition, and how far its rows are built."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings


@dataclass(frozen=True)
class ViewVersion:
    """A version of a view.

    A new definition is built as another version, in a separate table, and then takes the place of the former one.

    :param number: number of the version, unique in the pipeline.
    :param settings: the view as the pipeline file described it when the version began.
    :param view: the parsed definition.
    :param relation: name of the table of its rows; empty until that is created.
    :param queue: name of the table of anchors that wait to be recomputed; empty like ``relation``.
    :param built: texts of the anchor up to which it is built; ``None`` until the first range is built.
    :param complete: whether all ranges are built.
    :param kept: whether it moves with the mirror; false for a version that waits for its successor.
    :param behind: the position up to which the view has all changes; ``None`` if it has all that the mirror has.
    :param anchors_built: number of root rows whose anchors are built.
    :param anchors_expected: estimate of the number of root rows when the build began.
    :param units: number of units that wrote rows of the view, or queued anchors.
    :param anchors: number of anchors that these units affected.
    :param seconds: time that they took.
    """

    number: int
    settings: ViewSettings
    view: View
    relation: str = ""
    queue: str = ""
    built: tuple[str, ...] | None = None
    complete: bool = False
    kept: bool = True
    behind: LogPosition | None = None
    anchors_built: int = 0
    anchors_expected: int = 0
    units: int = 0
    anchors: int = 0
    seconds: float = 0.0

    @property
    def in_place(self) -> bool:
        """Return whether its table has the view's name, so that readers see it."""
        return self.relation == self.view.name

    @property
    def moves(self) -> bool:
        """Return whether changes of the mirror have to be applied to it: some of its rows are built."""
        return self.kept and (self.complete or self.built is not None)
