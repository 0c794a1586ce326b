"""Task instances as operators see them, without Airflow's processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def task_instance(max_tries: int = 0, try_number: int = 1) -> Any:
    """Return a task instance of the Dag ``dag``."""
    return SimpleNamespace(
        dag_id="dag", run_id="run", task_id="task", map_index=-1, max_tries=max_tries, try_number=try_number
    )
