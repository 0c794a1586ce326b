"""Runs a real Airflow in its own directory on loopback: ``airflow standalone``, configured by environment variables
only.

Its processes (API server, scheduler with the LocalExecutor, Dag processor and triggerer) and all their descendants
inherit a mark in their environment. The mark finds processes that are no longer children, such as a Spark job that is
detached from the task that submitted it.
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
from typing import Self

import psutil

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.airflow_client import AirflowClient, AirflowFailed
from local_servers.process import end_guard, find_free_port, start_guard

COMPONENTS = ("scheduler", "dag-processor", "api-server", "triggerer")
MARK = "CDC_AIRFLOW_STACK"

START_SECONDS = 600.0
STOP_SECONDS = 5.0
KILL_SECONDS = 20.0


class AirflowStack:
    """One Airflow; start it with ``start`` or as a context manager.

    :param home: AIRFLOW_HOME, new or left over from an earlier stack; it is not deleted.
    :param dags: the folder of Dags.
    :param env: variables that override ours, for example ``AIRFLOW_CONN_*``.
    :param path: path of its pages in the URL, for example ``/air``.
    """

    def __init__(self, home: Path, dags: Path, env: Mapping[str, str] | None = None, path: str = "") -> None:
        self.home = home.resolve()
        self.dags = dags.resolve()
        self.port = find_free_port()
        self.base_url = f"http://127.0.0.1:{self.port}{path}"
        self.client = AirflowClient(self.base_url)
        self._environment = self._compose_environment(env or {})
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Airflow and wait until all its components are healthy."""
        self.home.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        try:
            standalone = self._spawn("standalone")
            self._guard = start_guard(-standalone.pid, mark=self._mark)
            if not await_condition(self._healthy, START_SECONDS, interval=0.5):
                raise AirflowFailed(
                    f"Airflow was not healthy after {START_SECONDS:.0f} seconds.\n{self.log_tail()}",
                    f"Check {self.log_file}; a busy machine may need more time.",
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Interrupt Airflow, which then ends its tasks, and kill leftover processes, including detached jobs."""
        for process in self._spawned:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        await_condition(lambda: not any(self.processes()), STOP_SECONDS)
        if not await_condition(self._killed, KILL_SECONDS):
            left = [process.pid for process in self.processes()]
            raise AirflowFailed(
                f"Processes {left} of Airflow cannot be killed.", "Find out what they wait for, for example with `ps`."
            )
        for spawned in self._spawned:
            spawned.wait()
        end_guard(self._guard)
        self._guard = None
        self._spawned.clear()
        atexit.unregister(self.stop)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield all living processes of this Airflow, including those of tasks and of detached jobs."""
        name, _, value = self._mark.partition("=")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def component(self, name: str) -> psutil.Process | None:
        """Return the main process of one of :data:`COMPONENTS`, or ``None`` if it is dead."""
        for spawned in self._spawned:
            with contextlib.suppress(psutil.Error):
                main = psutil.Process(spawned.pid)
                for process in (main, *main.children()):
                    if _is_component(process, name):
                        return process
        return None

    def restart(self, name: str) -> None:
        """Start one of :data:`COMPONENTS` that was killed; ``airflow standalone`` does not restart it."""
        self._spawn(name)

    @property
    def log_file(self) -> Path:
        """Return the path of the common log of all components."""
        return self.home / "airflow.log"

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of that log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _mark(self) -> str:
        return f"{MARK}={self.home}"

    def _compose_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return our environment without the settings of another Airflow, and with those of this one."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("AIRFLOW_") or name.startswith("AIRFLOW_CDC_")
        }
        search = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
        direct = ",".join(filter(None, [inherited.get("NO_PROXY"), "127.0.0.1", "localhost"]))
        return {
            **inherited,
            MARK: str(self.home),
            # Processes that change their title would overwrite their environment with it.
            "SPT_NOENV": "1",
            # Airflow starts its components by name; Dags start spark-submit and airflow-cdc by name.
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
            # The processes must share these secrets; by default each would generate its own.
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            # Logs are read from disk, but these servers cannot be disabled.
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(find_free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(find_free_port()),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "10",
            "AIRFLOW__DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            **env,
        }

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "airflow", *arguments],
                env=self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt at the terminal is meant for this process, which stops the others in order.
                start_new_session=True,
            )
        self._spawned.append(process)
        return process

    def _healthy(self) -> bool:
        main = psutil.Process(self._spawned[0].pid)
        if any(process.status() == psutil.STATUS_ZOMBIE for process in (main, *main.children())):
            raise AirflowFailed(
                f"A process of Airflow has ended:\n{self.log_tail()}",
                f"Fix the problem that the log shows; the whole log is in {self.log_file}.",
            )
        return self.client.healthy

    def _killed(self) -> bool:
        """Kill all living processes, and return whether there were none; a killed one may just have started another."""
        alive = list(self.processes())
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not alive


def _is_component(process: psutil.Process, name: str) -> bool:
    """Return whether a process is a component, by its command or by the title that the API server sets."""
    line = " ".join(process.cmdline()[:4])
    return process.status() != psutil.STATUS_ZOMBIE and name.replace("-", "_") in line.replace("-", "_")
