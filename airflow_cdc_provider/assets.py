"""Airflow's assets for the tables of a pipeline, so that other Dags run when a table has changed.

A stream task ends with an event for each table that it changed. Events are a hint, not a log: Airflow may pass several
events to one run. A consumer should rely on ``applied_lsn`` of the last event: the target has everything that the
source committed before that LSN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias

if TYPE_CHECKING:
    from airflow.sdk import Context

CHANGED_TABLES = AssetAlias("airflow-cdc", group="airflow-cdc")
"""An alias for all tables of all pipelines, because the tables that a stream changes are known only when it ends."""


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
