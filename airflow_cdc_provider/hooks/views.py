"""The views of a pipeline that readers see, and whether they have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.views.version import ViewVersion

ViewMarks = Mapping[str, Sequence[Sequence[Any]]]
"""For each view, values that change whenever it moves: of each sink its version, its units, and where its queue begins.
"""


def views_of(pipeline: Pipeline) -> list[str]:
    """Return the names of the views in a pipeline file, which need not be resolved."""
    return list(dict.fromkeys(view.label for sink in pipeline.sinks for view in getattr(sink, "views", ())))


def visible_views(branch: Pipeline) -> list[ViewVersion]:
    """Return the views that readers see.

    :param branch: a pipeline with one sink.
    :raises CdcError: if the sink cannot be reached.
    """
    from airflow_cdc_provider.engine.runs.commit_records import sink_of
    from airflow_cdc_provider.engine.sinks.contract import KeepsViews

    if not views_of(branch):
        return []
    sink = sink_of(branch)
    return [version for version in sink.view_versions() if version.in_place] if isinstance(sink, KeepsViews) else []


def read_view_marks(pipeline: Pipeline) -> ViewMarks:
    """Return the marks of a pipeline's views.

    :raises CdcError: if a sink cannot be reached.
    """
    marks: dict[str, list[list[Any]]] = {}
    for branch in pipeline.branches:
        for version in visible_views(branch):
            behind = None if version.behind is None else format_lsn(version.behind)
            marks.setdefault(version.view.label, []).append([version.number, version.units, behind])
    return marks
