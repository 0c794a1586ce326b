"""Runs of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from local_servers.airflow_client import TaskState

NEW: Mapping[str, Any] = {
    "pipeline": "shop",
    "state": "new",
    "consistent": False,
    "applied_lsn": None,
    "lag_bytes": None,
    "lag_seconds": None,
    "slot": None,
    "tables": [],
    "jobs": [],
    "last_error": None,
}


def task(task_id: str, state: str | None, map_index: int = -1, try_number: int = 1) -> TaskState:
    return TaskState(task_id=task_id, map_index=map_index, state=state, try_number=try_number)
