"""The whole path on a real Spark cluster: a standalone master and two workers as processes of this machine.

What ``local[2]`` cannot show is tested here: executors are processes of their own, they find the engine only in what
the driver ships, and nothing that lies on the driver's disk is theirs. Their Python has all libraries but not this
package, and refuses to open files below the driver's directory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import threading
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark
import pytest

from airflow_cdc_provider.demo.servers import await_condition, end_guard, find_free_port, start_guard
from airflow_cdc_provider.engine import job
from airflow_cdc_provider.engine.session import engine_zip
from tests.conftest import Databases
from tests.pipelines import SPARK_CONF, PipelineUnderTest, execute

# A cluster is eight Python processes and four JVMs; a busy machine takes minutes.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PACKAGE = "airflow_cdc_provider"
SPARK_HOME = Path(pyspark.__file__).parent
SECONDS = 240.0
DRIVER_ONLY = "TEST_DRIVER_DIRECTORY"

# Runs when an executor's Python starts. The driver's own Python processes, which may read there, lack the variable.
SITE_CUSTOMIZE = f"""
import os, sys

closed = os.environ.get({DRIVER_ONLY!r})

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(closed):
        raise PermissionError(f"an executor opens a file of the driver: {{arguments[0]}}")

if closed:
    sys.addaudithook(refuse)
"""

TABLES = """
CREATE TABLE public.orders (id bigint PRIMARY KEY, customer int NOT NULL, note text);
CREATE TABLE public.lines (order_id bigint, line int, price numeric NOT NULL, PRIMARY KEY (order_id, line));
INSERT INTO public.orders SELECT n, n % 100, md5(n::text) FROM generate_series(1, 4000) n;
INSERT INTO public.lines SELECT n, l, n * 1.5 FROM generate_series(1, 4000) n, generate_series(1, 2) l;
"""
WRITES = """
INSERT INTO public.orders SELECT max(id) + 1, 1, NULL FROM public.orders;
INSERT INTO public.lines SELECT max(id), 1, 0.50 FROM public.orders;
UPDATE public.orders SET note = clock_timestamp()::text WHERE id % 97 = 0;
UPDATE public.lines SET line = line + 10 WHERE order_id % 501 = 0 AND line < 100;
DELETE FROM public.lines WHERE order_id = (SELECT min(order_id) FROM public.lines);
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    :param workers: the directory of each worker.
    :param driver: the directory that is the driver's alone.
    """

    master: str
    workers: tuple[Path, ...]
    driver: Path

    def executors(self) -> list[int]:
        """For each worker the number of executors that it has started."""
        return [len(list(worker.glob("app-*/*/stderr"))) for worker in self.workers]

    def kill_an_executor(self) -> None:
        """Kill one that has Python workers, and so has had work."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = any(Path(process.cwd()).is_relative_to(worker) for worker in self.workers)
                if ours and "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()) and process.children():
                    process.kill()
                    return
        raise AssertionError("no executor is at work")


def make_python(directory: Path, *without: str) -> Path:
    """A Python with all our libraries, but neither this package nor the modules ``without``."""
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
    found = subprocess.run([python, "-c", f"import {PACKAGE}"], cwd="/", capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in found.stderr, "the executors' Python has the engine without being given it"
    return python


@contextmanager
def spark_process(name: str, directory: Path, *arguments: str, **environment: str) -> Iterator[None]:
    """A master or worker of a standalone cluster."""
    directory.mkdir()
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_", "PYTHON"))
    }
    settings = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
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
    """How many workers the master knows, by its web interface, which answers any path with a page while it starts."""
    with (
        suppress(OSError, json.JSONDecodeError),
        urllib.request.urlopen(f"http://127.0.0.1:{web}/json/", timeout=5) as answer,
    ):
        return int(json.load(answer)["aliveworkers"])
    return 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers of one core each."""
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
            stack.enter_context(spark_process("worker.Worker", worker, *size, master, **{DRIVER_ONLY: str(driver)}))
        assert await_condition(lambda: alive_workers(web) == len(workers), 60, 0.2), "the workers did not register"
        yield Cluster(master, workers, driver)


@pytest.fixture
def pipeline(
    cluster: Cluster, databases: Databases, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PipelineUnderTest]:
    """A pipeline on the cluster, whose driver has a directory for all its files."""
    directory = cluster.driver / f"test{len(list(cluster.driver.iterdir()))}"
    temporary = directory / "tmp"
    temporary.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("PYTHONPATH", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    execute(databases.source, *TABLES.strip().splitlines())
    conf = {**SPARK_CONF, "spark.driver.host": "127.0.0.1"}
    pipeline = PipelineUnderTest(
        directory,
        databases,
        ["public.orders", "public.lines"],
        snapshot={"chunk_rows": 1500},
        spark={"master": cluster.master, "conf": conf},
    )
    yield pipeline
    pipeline.end_commands()


@contextmanager
def writing(dsn: str) -> Iterator[None]:
    """Change the source in the background."""
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.1):
            execute(dsn, *WRITES.strip().splitlines())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_executors_get_the_engine_from_the_driver(
    cluster: Cluster, pipeline: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(make_python(tmp_path / "python")))
    before = cluster.executors()
    pipeline.provision()
    command = pipeline.start("run")
    with writing(pipeline.databases.source):
        command.until(lambda: len(pipeline.finished_chunks()) > 1, "a part of the snapshot", SECONDS)
    outcome = command.wait(SECONDS)
    assert outcome.code == 0, outcome.stderr[-4000:]
    verified = pipeline.json("verify")
    assert verified["equal"]
    assert [table["source_rows"] > 4000 for table in verified["tables"]] == [True, True]
    assert all(count == started + 2 for count, started in zip(cluster.executors(), before, strict=True))


def test_executors_that_are_killed(cluster: Cluster, pipeline: PipelineUnderTest) -> None:
    """Their tasks are done again by others, and what they had staged or committed counts once."""
    pipeline.provision()
    with writing(pipeline.databases.source):
        snapshot = pipeline.start("snapshot")
        snapshot.until(lambda: len(pipeline.finished_chunks()) > 1, "a part of the snapshot", SECONDS)
        cluster.kill_an_executor()
        assert len(pipeline.finished_chunks()) < len(pipeline.record.chunks)
        outcome = snapshot.wait(SECONDS)
        assert outcome.code == 0, outcome.stderr[-4000:]
        stream = pipeline.start("stream")
        begun = pipeline.marker()
        stream.until(lambda: pipeline.record.applied >= begun, "changes", SECONDS)
        cluster.kill_an_executor()
    end = pipeline.marker()
    stream.until(lambda: pipeline.record.applied >= end, "the end", SECONDS)
    stream.terminate()
    assert stream.wait(SECONDS).code == 0, stream.output()
    pipeline.assert_verified()


def test_a_driver_gets_the_engine_from_spark_submit(
    cluster: Cluster, pipeline: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(make_python(tmp_path / "python")))
    application = shutil.copy(job.__file__, pipeline.directory / "application.py")
    conf = [f"--conf={name}={value}" for name, value in pipeline.document["spark"]["conf"].items()]
    command: list[str | Path] = [SPARK_HOME / "bin" / "spark-submit", "--master", cluster.master, *conf]
    command += ["--py-files", engine_zip(pipeline.directory), application, "run", "--pipeline", pipeline.file]
    done = subprocess.run(
        command,
        cwd=pipeline.directory,
        env={**os.environ, "SPARK_HOME": str(SPARK_HOME)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pipeline.assert_verified()


@pytest.mark.parametrize("library", ["adbc_driver_postgresql", "yaml"])
def test_a_library_that_executors_lack_is_named(
    pipeline: PipelineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(make_python(tmp_path / "python", library)))
    error = pipeline.json("preflight", code=1)["error"]
    assert error["kind"] == "SparkUnusable"
    assert error["message"].endswith(f"lack: {library}")
    assert "PYSPARK_PYTHON" in error["solution"]
