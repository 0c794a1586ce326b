"""Airflow's assets for the tables and views of a pipeline, so that other Dags run when one of them has changed.

A stream task ends with an event for each table that it changed, and for each view that has moved. An asset that is
watched has events also while the stream runs. Events are a hint, not a log: Airflow may pass several events to one run.
A consumer should rely on :func:`applied_lsn` of the last event: the target, or the view, has everything that the source
committed before that LSN.

A task with an asset as its outlet adds an event whenever it succeeds. Therefore the outlet of a stream task is an
alias, to which only assets that have changed are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias, AssetWatcher

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.hooks.views import ViewMarks
from airflow_cdc_provider.triggers.changes import ChangesTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

CHANGED_TABLES = AssetAlias("airflow-cdc", group="airflow-cdc")
"""An alias for all tables and views of all pipelines, because those that a stream changes are known when it ends."""


def table_asset(pipeline: str, table: str, *, watch: str | None = None, interval: float = 60.0) -> Asset:
    """Return the asset of a table's copy, for the ``schedule`` of a Dag that reads it.

    :param pipeline: the pipeline's name.
    :param table: the source table, ``schema.table``.
    :param watch: absolute path of the pipeline file on the triggerer, for events also while a stream runs. Give it in
        every Dag that names the asset, because Airflow keeps the watchers of the Dag that it has parsed last.
    :param interval: minimum number of seconds between two such events.
    """
    return Asset(
        name=f"{pipeline}/{table}",
        uri=f"postgres-cdc://{pipeline}/{quote(table, safe='.')}",
        group="airflow-cdc",
        watchers=_watchers(watch, interval, table=table),
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


def view_asset(pipeline: str, view: str, *, watch: str | None = None, interval: float = 60.0) -> Asset:
    """Return the asset of a view, for the ``schedule`` of a Dag that reads it.

    :param pipeline: the pipeline's name.
    :param view: the view as in the pipeline file, ``schema.name``.
    :param watch, interval: as for :func:`table_asset`.
    """
    return Asset(
        name=f"{pipeline}/views/{view}",
        uri=f"postgres-cdc://{pipeline}/views/{quote(view, safe='.')}",
        group="airflow-cdc",
        watchers=_watchers(watch, interval, view=view),
    )


def applied_lsn(event: Any) -> str:
    """Return the LSN before which everything that the source committed is in the table or the view.

    :param event: an event of its asset, of a stream task or of a watcher, for example ``inlet_events[ASSET][-1]``.
    """
    extra = event.extra
    return str(extra.get("payload", extra)["applied_lsn"])


def _watchers(watch: str | None, interval: float, **of: str) -> list[AssetWatcher]:
    if watch is None:
        return []
    return [AssetWatcher(name="changes", trigger=ChangesTrigger(pipeline=watch, interval=interval, **of))]


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
