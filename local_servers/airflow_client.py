"""A client of Airflow's public REST API: Dags are triggered and watched through it, as a user would."""

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
    """The demo's Airflow did not start, or did not do what it was asked."""


class TaskState(TypedDict):
    """One task instance of a run; ``map_index`` is -1 unless the task is mapped."""

    task_id: str
    map_index: int
    state: str | None
    try_number: int


class AirflowClient:
    """Calls an Airflow without login, that is one where everybody is an administrator.

    :param base_url: the address of the API server, with the path if it has one.
    """

    def __init__(self, base_url: str) -> None:
        # Loopback is never behind a proxy, whatever the environment says.
        self._http = httpx.Client(base_url=base_url, timeout=120, trust_env=False)

    @property
    def healthy(self) -> bool:
        """Whether the API server answers, also to tasks, and finds all others alive."""
        try:
            answer = self._http.get("/api/v2/monitor/health")
            parts = answer.json() if answer.is_success else {}
            if not parts or any(parts[part]["status"] != "healthy" for part in HEALTHY_PARTS):
                return False
            # Airflow makes the API of its tasks at the first request to it, and answers nobody meanwhile: on a busy
            # machine for longer than a task waits, which is then tried again.
            return not self._http.get("/execution/health").is_server_error
        except httpx.TransportError:
            return False

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """One request to the REST API, whatever the answer."""
        if "Authorization" not in self._http.headers:
            token = self._http.get("/auth/token").raise_for_status().json()["access_token"]
            self._http.headers["Authorization"] = f"Bearer {token}"
        return self._http.request(method, f"/api/v2{path}", **arguments)

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        """One request to the REST API, which must succeed; what it answers, nothing if that is empty."""
        answer = self.request(method, path, **arguments)
        if not answer.is_success:
            raise AirflowFailed(
                f"Airflow answered {method} {path} with {answer.status_code}: {answer.text}",
                "Look into the log of the API server.",
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
                f"There is no Dag {dag_id}. {'Import errors: ' if problems else ''}{''.join(problems)}",
                "Correct the import errors, or the name of the Dag.",
            )

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Trigger a Dag, once it has been parsed, and unpause it; the id of the run."""
        self.await_dag(dag_id)
        self.pause(dag_id, False)
        run = self.call("POST", f"/dags/{dag_id}/dagRuns", json={"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pause a Dag, or unpause it."""
        self.call("PATCH", f"/dags/{dag_id}", json={"is_paused": paused})

    def run_state(self, dag_id: str, run_id: str) -> str:
        """The run's state: queued, running, success or failed."""
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_states(self, dag_id: str, run_id: str) -> list[TaskState]:
        """The run's task instances."""
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
        """The log of one try of a task, a line an event."""
        answer = self.call(
            "GET",
            f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}",
            params={"map_index": map_index, "full_content": True},
            headers={"Accept": "application/json"},
        )
        return "\n".join(_log_line(event) for event in answer["content"])

    def failures(self, dag_id: str, run_id: str) -> str:
        """The logs of the tasks that failed in a run."""
        return "\n\n".join(
            f"--- {task['task_id']}[{task['map_index']}], try {task['try_number']}\n"
            + self.logs(dag_id, run_id, task["task_id"], task["map_index"], task["try_number"])
            for task in self.task_states(dag_id, run_id)
            if task["state"] == "failed"
        )

    def wait(self, dag_id: str, run_id: str, seconds: float = 600.0) -> str:
        """Wait until the run has ended; its final state."""
        if not await_condition(lambda: self.run_state(dag_id, run_id) in FINAL_STATES, seconds, interval=0.5):
            states = ", ".join(
                f"{task['task_id']}[{task['map_index']}] {task['state']}" for task in self.task_states(dag_id, run_id)
            )
            raise AirflowFailed(
                f"Run {run_id} of Dag {dag_id} has not ended after {seconds:.0f} seconds: {states}.",
                f"Look into the run at {self._http.base_url} or into the logs of its tasks.",
            )
        return self.run_state(dag_id, run_id)

    def pages(self, path: str, key: str) -> Iterator[dict[str, Any]]:
        """All items of a list, which is answered in pages."""
        offset = 0
        while True:
            page = self.call("GET", path, params={"limit": PAGE, "offset": offset})
            yield from page[key]
            offset += PAGE
            if offset >= page["total_entries"]:
                return


def _log_line(event: Any) -> str:
    """One event of a task's log, with the exception that it carries."""
    if not isinstance(event, dict):
        return str(event)
    line = " ".join(str(event[key]) for key in ("timestamp", "level", "event") if event.get(key))
    causes = [f"{cause['exc_type']}: {cause['exc_value']}" for cause in event.get("error_detail") or []]
    return "\n    ".join([line, *causes])
