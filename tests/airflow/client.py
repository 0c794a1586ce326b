"""Operations of tests on an Airflow through its REST API, in addition to triggering and watching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from local_servers.airflow_client import AirflowClient


class Client(AirflowClient):
    """The client of the tests' Airflow; tests wait for states with ``await_condition``."""

    def visit(self, address: str) -> httpx.Response:
        """Request an address of Airflow without following redirections."""
        return self._http.get(address)

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Delete a run that has ended."""
        self.call("DELETE", f"/dags/{dag_id}/dagRuns/{run_id}")

    def mark_run(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run as success, failed or queued."""
        self.call("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", json={"state": state})

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task instance as success, failed or skipped, which ends it if it runs or is deferred."""
        self.call("PATCH", self._task(dag_id, run_id, task_id, map_index), json={"new_state": state})

    def clear(
        self, dag_id: str, run_id: str, tasks: Iterable[str | tuple[str, int]] | None = None, downstream: bool = False
    ) -> None:
        """Clear tasks of a run, whatever their states; all of them unless some are named."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "only_failed": False,
            "include_downstream": downstream,
            **({} if tasks is None else {"task_ids": list(tasks)}),
        }
        self.call("POST", f"/dags/{dag_id}/clearTaskInstances", json=body)

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> dict[str, Any]:
        """Return a task instance with all of its fields, such as state, try_number, pid and trigger."""
        found: dict[str, Any] = self.call("GET", self._task(dag_id, run_id, task_id, map_index))
        return found

    def state(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str | None:
        """Return the state of a task instance, or ``None`` before it is scheduled."""
        state: str | None = self.task(dag_id, run_id, task_id, map_index)["state"]
        return state

    def states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Return the states of a run's task instances; mapped ones have names like ``snapshot[0]``."""
        return {
            task["task_id"] + (f"[{task['map_index']}]" if task["map_index"] >= 0 else ""): task["state"]
            for task in self.task_states(dag_id, run_id)
        }

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """Return a value that a task left behind."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.call("GET", path, params={"map_index": map_index, "deserialize": True})["value"]

    def backfill(self, dag_id: str, from_date: str, to_date: str, **options: Any) -> int:
        """Create a backfill and return its id, see ``BackfillPostBody`` for options."""
        body: Mapping[str, Any] = {"dag_id": dag_id, "from_date": from_date, "to_date": to_date, **options}
        return int(self.call("POST", "/backfills", json=body)["id"])

    def change_backfill(self, backfill: int, action: str) -> None:
        """Send ``pause``, ``unpause`` or ``cancel``."""
        self.call("PUT", f"/backfills/{backfill}/{action}")

    def backfill_over(self, backfill: int) -> bool:
        """Return whether all runs of a backfill have ended."""
        return self.call("GET", f"/backfills/{backfill}")["completed_at"] is not None

    def runs(self, dag_id: str) -> dict[str, str]:
        """Return the states of a Dag's runs by their ids."""
        return {run["dag_run_id"]: run["state"] for run in self.pages(f"/dags/{dag_id}/dagRuns", "dag_runs")}

    def _task(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        return path if map_index < 0 else f"{path}/{map_index}"
