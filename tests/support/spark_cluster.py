"""A Spark cluster for tests: a standalone master and two workers as local processes."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.process import end_guard, find_free_port, start_guard
from tests.support.class_archive import JVM_OPTIONS

PACKAGE = "airflow_cdc_provider"
SPARK_HOME = Path(pyspark.__file__).parent
DRIVER_ONLY = "TEST_DRIVER_DIRECTORY"
PASSWORD = "TEST_PASSWORD"
"""Variable that is ``here`` on workers, and therefore in drivers in cluster mode."""

# Runs when a Python starts below a worker. A driver in client mode, which may read there, lacks the variable.
SITE_CUSTOMIZE = f"""
import os, sys

closed = os.environ.get({DRIVER_ONLY!r})

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(closed):
        raise PermissionError(f"a file of the driver is opened: {{arguments[0]}}")

if closed:
    sys.addaudithook(refuse)
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    :param workers: directory of each worker.
    :param driver: directory that no process below a worker may read.
    """

    master: str
    workers: tuple[Path, ...]
    driver: Path

    def executors(self) -> list[int]:
        """Return the number of executors that each worker has started."""
        return [len(list(worker.glob("app-*/*/stderr"))) for worker in self.workers]

    def kill_an_executor(self) -> None:
        """Kill an executor that has Python workers, which shows that it has run tasks."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = any(Path(process.cwd()).is_relative_to(worker) for worker in self.workers)
                if ours and "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()) and process.children():
                    process.kill()
                    return
        raise AssertionError("no executor is at work")


def make_python(directory: Path, *without: str) -> Path:
    """Create a Python with all our libraries, except for this package and the modules ``without``."""
    venv.create(directory, symlinks=True)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    libraries = directory / "libraries"
    libraries.mkdir()
    for path in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in path.iterdir():
            if PACKAGE not in entry.name and entry.name not in without:
                (libraries / entry.name).symlink_to(entry)
    (site_packages / "libraries.pth").write_text(f"{libraries}\n")
    (site_packages / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    python = directory / "bin" / "python"
    importing = [python, "-c", f"import {PACKAGE}"]
    found = subprocess.run(importing, cwd="/", env={}, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in found.stderr, "the executors' Python has the engine without being given it"
    return python


@contextmanager
def spark_process(name: str, directory: Path, *arguments: str, **environment: str) -> Iterator[None]:
    """Start a master or a worker of a standalone cluster."""
    directory.mkdir()
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "PYTHON"))
    }
    settings = {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
    }
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *arguments],
            cwd=directory,
            env={**inherited, **settings, "TMPDIR": str(directory), **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    guard = start_guard(process.pid, signals=("TERM", "KILL"))
    try:
        yield
    finally:
        end_guard(guard)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def alive_workers(web: int) -> int:
    """Return the number of workers known to the master, whose web interface answers with a page while it starts."""
    with (
        suppress(OSError, json.JSONDecodeError),
        urllib.request.urlopen(f"http://127.0.0.1:{web}/json/", timeout=5) as answer,
    ):
        return int(json.load(answer)["aliveworkers"])
    return 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a master and two workers with one core each."""
    root = tmp_path_factory.mktemp("cluster")
    workers, driver = tuple(root / f"worker{i}" for i in range(2)), root / "driver"
    driver.mkdir()
    port, web = find_free_port(), find_free_port()
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        start = ["--port", str(port), "--webui-port", str(web)]
        stack.enter_context(spark_process("master.Master", root / "master", *start))
        for worker in workers:
            size = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(worker)]
            given = {DRIVER_ONLY: str(driver), PASSWORD: "here"}
            stack.enter_context(spark_process("worker.Worker", worker, *size, master, **given))
        assert await_condition(lambda: alive_workers(web) == len(workers), 60, 0.2), "the workers did not register"
        yield Cluster(master, workers, driver)
