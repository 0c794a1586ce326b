"""A real Airflow in a directory of its own: the four processes of a deployment, on loopback.

API server, scheduler with the LocalExecutor, Dag processor and triggerer run as
separate processes on a SQLite metadata database, configured by environment
alone. Dags are triggered and watched through the public REST API, as a user
would.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

import httpx
import psutil

from airflow_cdc_provider.demo.servers import await_condition, end_guard, find_free_port, start_guard
from airflow_cdc_provider.engine.errors import CdcError

# The API server first: the others ask it for everything. Logs are read from disk, so nobody needs to serve them.
COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
HEALTHY_PARTS = ("metadatabase", "scheduler", "dag_processor", "triggerer")
FINAL_STATES = ("success", "failed")

START_SECONDS = 240.0
PARSE_SECONDS = 120.0
STOP_SIGNALS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0))
PAGE = 100


class AirflowFailed(CdcError):
    """The demo's Airflow did not start, or did not do what it was asked."""


class TaskState(TypedDict):
    """One task instance of a run; ``map_index`` is -1 unless the task is mapped."""

    task_id: str
    map_index: int
    state: str | None
    try_number: int


class AirflowStack:
    """One Airflow; start it with ``start`` or as a context manager.

    :param home: AIRFLOW_HOME, new or left by an earlier stack; it is not deleted.
    :param dags: the folder of Dags.
    :param env: environment above ours, for instance ``AIRFLOW_CONN_*``.
    """

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str] | None = None) -> None:
        self.home = home.resolve()
        self.dags = dags.resolve()
        self.port = find_free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._environment = self._compose_environment(env or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        # Loopback is never behind a proxy, whatever the environment says.
        self._client = httpx.Client(base_url=self.base_url, timeout=30, trust_env=False)

    def start(self) -> None:
        """Migrate the database, start the processes, wait until all are healthy."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._migrate()
        atexit.register(self.stop)
        try:
            for name, arguments in COMPONENTS.items():
                self._processes[name] = self._spawn(name, *arguments)
            groups = (-process.pid for process in self._processes.values())
            self._guard = start_guard(*groups, signals=("INT", "TERM", "KILL"))
            if not await_condition(self._healthy, START_SECONDS, interval=0.5):
                raise AirflowFailed(
                    f"Airflow was not healthy after {START_SECONDS:.0f} seconds.\n{self._log_tails()}",
                    f"Look into the logs in {self.home}; a busy machine may need more time.",
                )
            self._client.headers["Authorization"] = f"Bearer {self._token()}"
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Interrupt the processes, which then wait for tasks; terminate them with their tasks; kill what is left."""
        alive = self._family()
        for number, seconds in STOP_SIGNALS:
            self._signal_groups(number)
            _, alive = psutil.wait_procs(alive, timeout=seconds)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes.values():
            process.wait()
        end_guard(self._guard)
        self._guard = None
        self._processes.clear()
        atexit.unregister(self.stop)

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Trigger a Dag, once it has been parsed; the id of the run."""
        self._await_dag(dag_id)
        run = self._call("POST", f"/dags/{dag_id}/dagRuns", json={"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """The run's state: queued, running, success or failed."""
        return str(self._call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_states(self, dag_id: str, run_id: str) -> list[TaskState]:
        """The run's task instances."""
        return [
            TaskState(
                task_id=task["task_id"],
                map_index=task["map_index"],
                state=task["state"],
                try_number=task["try_number"],
            )
            for task in self._pages(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", "task_instances")
        ]

    def logs(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, try_number: int = 1) -> str:
        """The log of one try of a task, a line an event."""
        answer = self._call(
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
        if not await_condition(lambda: self._over(dag_id, run_id), seconds, interval=0.5):
            states = ", ".join(
                f"{task['task_id']}[{task['map_index']}] {task['state']}" for task in self.task_states(dag_id, run_id)
            )
            raise AirflowFailed(
                f"Run {run_id} of Dag {dag_id} has not ended after {seconds:.0f} seconds: {states}.",
                f"Look into the run at {self.base_url} or into the logs in {self.home}.",
            )
        return self.run_state(dag_id, run_id)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _compose_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Our environment without another Airflow's settings, with those of this one."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("AIRFLOW_") or name.startswith("AIRFLOW_CDC_")
        }
        search = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
        direct = ",".join(filter(None, [inherited.get("NO_PROXY"), "127.0.0.1", "localhost"]))
        return {
            **inherited,
            # Dags start spark-submit and airflow-cdc by name.
            "PATH": search,
            "NO_PROXY": direct,
            "no_proxy": direct,
            "SCARF_ANALYTICS": "false",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.base_url}/execution/",
            "AIRFLOW__CORE__FERNET_KEY": "",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home / 'airflow.db'}",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__BASE_URL": self.base_url,
            "AIRFLOW__API__WORKERS": "1",
            # The processes must share them; by default each would draw its own.
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "10",
            "AIRFLOW__DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            **env,
        }

    def _migrate(self) -> None:
        """Create the metadata database, or bring it up to date."""
        done = subprocess.run(
            [sys.executable, "-m", "airflow", "db", "migrate"],
            env=self._environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise AirflowFailed(
                f"'airflow db migrate' failed with exit code {done.returncode}:\n{_tail(done.stdout)}",
                f"Check that {self.home} is writable and holds no database of another version.",
            )

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log_file(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "airflow", *arguments],
                env=self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt at the terminal is for us; we stop the processes in our own order.
                start_new_session=True,
            )

    def _healthy(self) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise AirflowFailed(
                    f"Airflow's {name} exited with code {process.returncode}:\n{self._log_tail(name)}",
                    f"Correct what the log names; all of it is in {self._log_file(name)}.",
                )
        try:
            answer = self._client.get("/api/v2/monitor/health")
        except httpx.TransportError:
            return False
        return answer.is_success and all(answer.json()[part]["status"] == "healthy" for part in HEALTHY_PARTS)

    def _token(self) -> str:
        answer = self._client.get("/auth/token")
        answer.raise_for_status()
        return str(answer.json()["access_token"])

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """One request to the REST API."""
        answer = self._client.request(method, f"/api/v2{path}", **arguments)
        if not answer.is_success:
            raise AirflowFailed(
                f"Airflow answered {method} {path} with {answer.status_code}: {answer.text}",
                f"Look into {self._log_file('api-server')}.",
            )
        content: dict[str, Any] = answer.json()
        return content

    def _pages(self, path: str, key: str) -> Iterator[dict[str, Any]]:
        offset = 0
        while True:
            page = self._call("GET", path, params={"limit": PAGE, "offset": offset})
            yield from page[key]
            offset += PAGE
            if offset >= page["total_entries"]:
                return

    def _await_dag(self, dag_id: str) -> None:
        """Wait until the Dag processor has parsed the Dag."""

        def parsed() -> bool:
            return self._client.get(f"/api/v2/dags/{dag_id}").is_success

        if not await_condition(parsed, PARSE_SECONDS, interval=0.5):
            problems = [f"{error['filename']}:\n{error['stack_trace']}" for error in self._import_errors()]
            raise AirflowFailed(
                f"There is no Dag {dag_id} in {self.dags}. {'Import errors: ' if problems else ''}{''.join(problems)}",
                "Correct the import errors, or the name of the Dag.",
            )

    def _import_errors(self) -> Iterator[dict[str, Any]]:
        return self._pages("/importErrors", "import_errors")

    def _over(self, dag_id: str, run_id: str) -> bool:
        return self.run_state(dag_id, run_id) in FINAL_STATES

    def _family(self) -> list[psutil.Process]:
        """All processes of the stack; tasks run in sessions of their own, out of reach of a group's signal."""
        family: list[psutil.Process] = []
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                family += [*parent.children(recursive=True), parent]
        return family

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _log_file(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        return _tail(self._log_file(name).read_text(errors="replace"))

    def _log_tails(self) -> str:
        return "\n".join(f"--- {name}\n{self._log_tail(name)}" for name in self._processes)


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _log_line(event: Any) -> str:
    """One event of a task's log, with the exception that it carries."""
    if not isinstance(event, dict):
        return str(event)
    line = " ".join(str(event[key]) for key in ("timestamp", "level", "event") if event.get(key))
    causes = [f"{cause['exc_type']}: {cause['exc_value']}" for cause in event.get("error_detail") or []]
    return "\n    ".join([line, *causes])
