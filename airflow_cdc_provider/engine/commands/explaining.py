"""``explain``: shows what keeps a view equal to its SELECT, and what a change costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.findings import Checks, Finding, require
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.sink_checks import targets_of
from airflow_cdc_provider.engine.runs.view_states import views_in_file
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.views.definition import Alias, View
from airflow_cdc_provider.engine.views.explanation import ViewExplanation
from airflow_cdc_provider.engine.views.settings import ViewSettings


def explain(pipeline: Pipeline, view: str) -> dict[str, Any]:
    """Explain a view of the pipeline file, changing nothing.

    :param view: its label.
    :raises ConfigError: if the file has no such view, or if it cannot be maintained.
    """
    branch, settings = _find(pipeline, view)
    sink = sink_of(branch)
    if not isinstance(sink, KeepsViews):
        raise ConfigError(f"the sink {branch.sink.place} keeps no views", "Move the view to a sink that does.")
    return {**_described(_explained(pipeline, branch, sink, settings), settings), "sink": branch.sink.place}


def _explained(pipeline: Pipeline, branch: Pipeline, sink: KeepsViews, settings: ViewSettings) -> ViewExplanation:
    record = sink_of(branch).record()
    if record is None:
        targets, findings = _targets_of_file(pipeline, branch)
        if targets is None:
            require(findings)
            raise ConfigError(
                "the columns of the source are not known before the pipeline is provisioned",
                "Run `airflow-cdc provision` first.",
            )
        return sink.explain_view(settings, targets)
    try:
        return sink.explain_view(settings, record.targets)
    except ConfigError:
        # The file may have gained tables that are not copied yet.
        known = {target.table.label for target in record.targets}
        added = [each for each in _targets_of_file(pipeline, branch)[0] or () if each.table.label not in known]
        if not added:
            raise
        return sink.explain_view(settings, [*record.targets, *added])


def _find(pipeline: Pipeline, label: str) -> tuple[Pipeline, ViewSettings]:
    """Return a view, and the branch of its sink."""
    found = {each.label: (branch, each) for branch in pipeline.branches for each in views_in_file(branch)}
    if label not in found:
        raise ConfigError(
            f"the pipeline file has no view {label}",
            f"Name one of its views: {', '.join(found)}." if found else "Add views to a sink with `views`.",
        )
    return found[label]


def _targets_of_file(pipeline: Pipeline, branch: Pipeline) -> tuple[Sequence[Target] | None, Sequence[Finding]]:
    """Return the targets of the tables that the file names, ``None`` if they are not known, and findings about them."""
    checks = Checks(convert_driver_errors)
    with source_of(pipeline).checking(checks) as found:
        return None if found.tables is None else targets_of(branch, found.tables), checks.findings


def _described(explanation: ViewExplanation, settings: ViewSettings) -> dict[str, Any]:
    view = explanation.view
    return {
        "view": view.label,
        "root": view.root.name,
        "anchor": [each.column for each in view.anchor],
        "grouped": view.grouped,
        "tables": [_table(view, alias, explanation) for alias in view.aliases],
        "mirrored": explanation.mirrored,
        "missing_indexes": list(explanation.indexes),
        "indexes": settings.indexes,
        "refresh": settings.refresh,
        "max_rows": settings.max_rows,
        "select": explanation.select,
    }


def _table(view: View, alias: Alias, explanation: ViewExplanation) -> dict[str, Any]:
    rows = explanation.rows_per_change[alias.name]
    return {
        "alias": alias.name,
        "table": alias.label,
        "join": alias.join,
        "condition": alias.condition,
        "columns": list(alias.columns),
        "path": [each.name for each in view.path(alias)],
        "rows_per_change": None if rows is None else round(rows, 1),
    }
