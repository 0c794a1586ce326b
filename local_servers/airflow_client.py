"""A client of Airflow's public REST API, which triggers and watches Dags as a user would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import httpx

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.waiting import await_condition

FINAL_STATES = ("success", "failed")
HEALTHY_PARTS = ("metadatabase", "scheduler", "dag_processor", "triggerer")

PARSE_SECONDS = 120.0
PAGE = 100


class AirflowFailed(CdcError):
    """Airflow did not start, or refused a request."""


class TaskState(TypedDict):
    """One task instance of a run; ``map_index`` is -1 unless the task is mapped."""

    task_id: str
    map_index: int
    state: str | None
    try_number: int


class AirflowClient:
    """Calls an Airflow without login, in which every user is an administrator.

    :param base_url: the URL of the API server, including its path if it has one.
    """

    def __init__(self, base_url: str) -> None:
        # Loopback is never behind a proxy, whatever the environment variables contain.
        self._http = httpx.Client(base_url=base_url, timeout=120, trust_env=False)

    @property
    def healthy(self) -> bool:
        """Return whether the API server answers, also to tasks, and reports all other components as alive."""
        try:
            answer = self._http.get("/api/v2/monitor/health")
            parts = answer.json() if answer.is_success else {}
            if not parts or any(parts[part]["status"] != "healthy" for part in HEALTHY_PARTS):
                return False
            # Airflow builds the API for tasks at the first request to it, and answers no request meanwhile. On a busy
            # machine this takes longer than a task waits; the task then tries again.
            return not self._http.get("/execution/health").is_server_error
        except httpx.TransportError:
            return False

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Send a request to the REST API, and return the response whatever its status."""
        if "Authorization" not in self._http.headers:
            token = self._http.get("/auth/token").raise_for_status().json()["access_token"]
            self._http.headers["Authorization"] = f"Bearer {token}"
        return self._http.request(method, f"/api/v2{path}", **arguments)

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        """Send a request to the REST API that must succeed, and return its answer, or ``None`` if that is empty."""
        answer = self.request(method, path, **arguments)
        if not answer.is_success:
            raise AirflowFailed(
                f"Airflow answered {method} {path} with {answer.status_code}: {answer.text}",
                "Check the log of the API server.",
            )
        return answer.json() if answer.content else None

    def await_dag(self, dag_id: str) -> None:
        """Wait until the Dag processor has parsed a Dag."""
        if not await_condition(lambda: self.request("GET", f"/dags/{dag_id}").is_success, PARSE_SECONDS, 0.5):
            problems = [
                f"{error['filename']}:\n{error['stack_trace']}"
                for error in self.pages("/importErrors", "import_errors")
            ]
            raise AirflowFailed(
                f"The Dag {dag_id} does not exist. {'Import errors: ' if problems else ''}{''.join(problems)}",
                "Fix the import errors, or the name of the Dag.",
            )

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Unpause and trigger a Dag, once it has been parsed, and return the id of the run."""
        self.await_dag(dag_id)
        self.pause(dag_id, False)
        run = self.call("POST", f"/dags/{dag_id}/dagRuns", json={"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pause or unpause a Dag."""
        self.call("PATCH", f"/dags/{dag_id}", json={"is_paused": paused})

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the run's state: queued, running, success or failed."""
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_states(self, dag_id: str, run_id: str) -> list[TaskState]:
        """Return the run's task instances."""
        return [
            TaskState(
                task_id=task["task_id"],
                map_index=task["map_index"],
                state=task["state"],
                try_number=task["try_number"],
            )
            for task in self.pages(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", "task_instances")
        ]

    def logs(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, try_number: int = 1) -> str:
        """Return the log of one try of a task, with one line per event."""
        answer = self.call(
            "GET",
            f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}",
            params={"map_index": map_index, "full_content": True},
            headers={"Accept": "application/json"},
        )
        return "\n".join(_log_line(event) for event in answer["content"])

    def failures(self, dag_id: str, run_id: str) -> str:
        """Return the logs of the tasks that failed in a run."""
        return "\n\n".join(
            f"--- {task['task_id']}[{task['map_index']}], try {task['try_number']}\n"
            + self.logs(dag_id, run_id, task["task_id"], task["map_index"], task["try_number"])
            for task in self.task_states(dag_id, run_id)
            if task["state"] == "failed"
        )

    def wait(self, dag_id: str, run_id: str, seconds: float = 600.0) -> str:
        """Wait until the run has ended, and return its final state."""
        if not await_condition(lambda: self.run_state(dag_id, run_id) in FINAL_STATES, seconds, interval=1.0):
            states = ", ".join(
                f"{task['task_id']}[{task['map_index']}] {task['state']}" for task in self.task_states(dag_id, run_id)
            )
            raise AirflowFailed(
                f"Run {run_id} of Dag {dag_id} has not ended after {seconds:.0f} seconds: {states}.",
                f"Check the run at {self._http.base_url} or the logs of its tasks.",
            )
        return self.run_state(dag_id, run_id)

    def pages(self, path: str, key: str) -> Iterator[dict[str, Any]]:
        """Yield all items of a list that is returned in pages."""
        offset = 0
        while True:
            page = self.call("GET", path, params={"limit": PAGE, "offset": offset})
            yield from page[key]
            offset += PAGE
            if offset >= page["total_entries"]:
                return


def _log_line(event: Any) -> str:
    """Return one event of a task's log, with its exception if there is one."""
    if not isinstance(event, dict):
        return str(event)
    line = " ".join(str(event[key]) for key in ("timestamp", "level", "event") if event.get(key))
    causes = [f"{cause['exc_type']}: {cause['exc_value']}" for cause in event.get("error_detail") or []]
    return "\n    ".join([line, *causes])
