"""The state of a pipeline's views, for ``status``, metrics and Airflow's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.views.recorded import RecordedViews
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion


def views_in_file(branch: Pipeline) -> tuple[ViewSettings, ...]:
    """Return the views of the sink of a branch, as the pipeline file describes them."""
    found: tuple[ViewSettings, ...] = getattr(branch.sink, "views", ())
    return found


def view_states(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the states of the views of all sinks as JSON values, see :func:`branch_view_states`.

    :returns: with several sinks, each has the address of its ``sink``.
    """
    several = len(pipeline.sinks) > 1
    return [
        state | ({"sink": branch.sink.place} if several else {})
        for branch in pipeline.branches
        for state in branch_view_states(branch)
    ]


def branch_view_states(branch: Pipeline) -> list[dict[str, Any]]:
    """Return the state of each view in the sink of a branch as JSON values.

    ``state`` is ``waiting`` until the mirror is consistent, then ``building``, ``up-to-date``, ``queued`` while
    affected rows wait, ``rebuilding`` while a former version is visible, and ``removed`` for a view that the file no
    longer has. ``as_of`` is the position up to which readers see all changes.
    """
    settings, sink = views_in_file(branch), sink_of(branch)
    if not isinstance(sink, KeepsViews):
        return []
    recorded = sink.recorded_views()
    versions: dict[str, list[ViewVersion]] = {each.label: [] for each in settings}
    for version in recorded.versions if recorded is not None else ():
        versions.setdefault(version.view.label, []).append(version)
    by_label = {each.label: each for each in settings}
    return [_state(label, found, by_label.get(label), recorded) for label, found in versions.items()]


def _state(
    label: str, versions: Sequence[ViewVersion], settings: ViewSettings | None, recorded: RecordedViews | None
) -> dict[str, Any]:
    newest = versions[-1] if versions else None
    visible = next((version for version in versions if version.in_place), None)
    shown = visible or newest
    limits = settings or (newest.settings if newest is not None else None)
    as_of = None
    if visible is not None and recorded is not None:
        as_of = format_lsn(recorded.applied if visible.behind is None else visible.behind)
    units = shown.units if shown is not None else 0
    return {
        "view": label,
        "state": _condition(newest, visible),
        "tables": sorted(shown.view.columns) if shown is not None else [],
        "built_percent": _built_percent(newest),
        "as_of": as_of,
        "behind": visible is not None and visible.behind is not None,
        "queued": recorded.queued.get(shown.number, 0) if recorded is not None and shown is not None else 0,
        "units": units,
        "anchors": shown.anchors if shown is not None else 0,
        "seconds": round(shown.seconds, 3) if shown is not None else 0.0,
        "anchors_per_unit": round(shown.anchors / units, 1) if shown is not None and units else None,
        "milliseconds_per_unit": round(1000 * shown.seconds / units, 1) if shown is not None and units else None,
        "max_rows": limits.max_rows if limits is not None else None,
        "refresh": limits.refresh if limits is not None else None,
    }


def _condition(newest: ViewVersion | None, visible: ViewVersion | None) -> str:
    if newest is None:
        return "waiting"
    if newest is not visible:
        if visible is not None:
            return "rebuilding"
        return "building" if newest.relation else "waiting"
    if not newest.kept:
        return "removed"
    return "up-to-date" if newest.behind is None else "queued"


def _built_percent(newest: ViewVersion | None) -> float:
    if newest is None or not newest.anchors_built:
        return 100.0 if newest is not None and newest.complete else 0.0
    if newest.complete:
        return 100.0
    # The number of rows is an estimate, which may be too small.
    return round(min(99.9, 100 * newest.anchors_built / max(newest.anchors_expected, newest.anchors_built)), 1)
