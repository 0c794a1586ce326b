"""Airflow's assets for the tables and views of a pipeline, so that other Dags run when one of them has changed.

A stream task ends with an event for each table that it changed, and for each view that has moved. Events are a hint,
not a log: Airflow may pass several events to one run. A consumer should rely on ``applied_lsn`` of the last event: the
target, or the view, has everything that the source committed before that LSN.

A task with an asset as its outlet adds an event whenever it succeeds. Therefore the outlet of a stream task is an
alias, to which only assets that have changed are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.hooks.views import ViewMarks

if TYPE_CHECKING:
    from airflow.sdk import Context

CHANGED_TABLES = AssetAlias("airflow-cdc", group="airflow-cdc")
"""An alias for all tables and views of all pipelines, because those that a stream changes are known when it ends."""


def table_asset(pipeline: str, table: str) -> Asset:
    """Return the asset of a table's copy, for the ``schedule`` of a Dag that reads it.

    :param pipeline: the pipeline's name.
    :param table: the source table, ``schema.table``.
    """
    return Asset(
        name=f"{pipeline}/{table}", uri=f"postgres-cdc://{pipeline}/{quote(table, safe='.')}", group="airflow-cdc"
    )


def announce_changes(context: Context, pipeline: str, result: Mapping[str, Any]) -> None:
    """Add an event for each table that a stream changed.

    :param context: the context of a task that has :data:`CHANGED_TABLES` among its outlets.
    :param pipeline: the pipeline's name.
    :param result: the result of ``stream``.
    """
    for table, changes in result["tables"].items():
        extra = {"pipeline": pipeline, "applied_lsn": result["applied_lsn"], "changes": changes}
        context["outlet_events"][CHANGED_TABLES].add(table_asset(pipeline, table), extra=extra)


def view_asset(pipeline: str, view: str) -> Asset:
    """Return the asset of a view, for the ``schedule`` of a Dag that reads it.

    :param pipeline: the pipeline's name.
    :param view: the view as in the pipeline file, ``schema.name``.
    """
    return Asset(
        name=f"{pipeline}/views/{view}",
        uri=f"postgres-cdc://{pipeline}/views/{quote(view, safe='.')}",
        group="airflow-cdc",
    )


def announce_views(context: Context, pipeline: str, before: ViewMarks, after: ViewMarks, applied: str) -> None:
    """Add an event for each view that has moved.

    :param context: the context of a task that has :data:`CHANGED_TABLES` among its outlets.
    :param pipeline: the pipeline's name.
    :param before, after: the marks of the views when the work began and ended.
    :param applied: the applied LSN of the mirror.
    """
    for view, marks in after.items():
        if marks != before.get(view):
            behind = [mark[-1] for mark in marks if mark[-1] is not None]
            extra = {"pipeline": pipeline, "applied_lsn": min(behind, key=parse_lsn, default=applied)}
            context["outlet_events"][CHANGED_TABLES].add(view_asset(pipeline, view), extra=extra)
