"""The Python of Spark's processes is the current one, with the installed modules of PySpark."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark import SparkConf, SparkContext

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.spark import python_interpreter
from airflow_cdc_provider.engine.spark.python_interpreter import SCRIPT, is_this_python, python_for_spark
from airflow_cdc_provider.engine.spark.session import python_chosen, spark_session
from tests.conftest import Databases
from tests.support.class_archive import JVM_CONF
from tests.support.pipelines import PipelineUnderTest

ZIP = str(Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip")
# Where an import would find it; to import it takes a second.
FOUND = (
    "import sys; from importlib.util import find_spec;"
    " print(find_spec('pyspark').origin, sys.executable, *sys.argv[1:], sep='|')"
)


def run(path: str | None, *arguments: str, python: str | None = None) -> list[str]:
    """Return the PySpark that a process finds when Spark starts it, its Python, and its other settings."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | python_for_spark()
    environment |= {} if path is None else {"PYTHONPATH": path}
    command = [python or environment["PYSPARK_PYTHON"], "-c", FOUND, *arguments]
    return subprocess.check_output(command, env=environment, text=True).strip().split("|")


@pytest.mark.parametrize(
    "path", [None, "", ZIP, f"{ZIP}:/nowhere", f"/nowhere:{ZIP}", f"{ZIP}:{ZIP}", f"/a b/*:{ZIP}:/nowhere:{ZIP}"]
)
def test_modules_come_from_the_installed_pyspark(path: str | None) -> None:
    assert run(path, "a b", "$HOME", "c:d") == [pyspark.__file__, sys.executable, "a b", "$HOME", "c:d"]


def test_a_zip_that_is_named_by_a_link_is_left_out(tmp_path: Path) -> None:
    link = tmp_path / "spark.zip"
    link.symlink_to(ZIP)
    assert run(str(link))[0] == pyspark.__file__


@pytest.mark.lengthy
def test_others_stay_on_the_path(tmp_path: Path) -> None:
    other = tmp_path / "it's another" / "pyspark.zip"
    (other / "pyspark").mkdir(parents=True)
    (other / "pyspark" / "__init__.py").touch()
    assert run(f"{ZIP}:{other}")[0] == str(other / "pyspark" / "__init__.py")
    assert run(f"{ZIP}:{other}", python=sys.executable)[0].startswith(ZIP), "which Spark's path leads to otherwise"


def test_it_is_known_as_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_this_python(sys.executable)
    assert not is_this_python("/bin/sh")
    monkeypatch.setenv("AIRFLOW_CDC_PYTHON", "/another/python")
    assert not is_this_python(str(SCRIPT))
    monkeypatch.setenv("AIRFLOW_CDC_PYTHON", sys.executable)
    assert is_this_python(str(SCRIPT))


def test_a_script_that_cannot_be_executed_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / SCRIPT.name
    shutil.copy(SCRIPT, copy)
    copy.chmod(0o600)
    monkeypatch.setattr(python_interpreter, "SCRIPT", copy)
    assert python_for_spark() == {"PYSPARK_PYTHON": sys.executable}


def test_threads_that_choose_it_at_once_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(_: int) -> None:
        for _ in range(50):
            with python_chosen(here=True):
                assert os.environ.items() >= chosen.items()

    for name in ("PYSPARK_PYTHON", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    before, chosen = dict(os.environ), python_for_spark()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(choose, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert dict(os.environ) == before


def test_a_python_that_is_named_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/another/python")
    before = dict(os.environ)
    with python_chosen(here=True):
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@pytest.mark.spark
def test_tasks_have_it(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: int) -> tuple[str, str]:
        import pyspark

        return pyspark.__file__, sys.executable

    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"]).pipeline
    for _ in range(2):  # sessions of one JVM
        with spark_session(pipeline.spark_start, "stream") as spark:
            context = spark.sparkContext
            assert context.pythonExec == str(SCRIPT)
            assert context.statusTracker().getJobIdsForGroup(None) == [], "no task looks for what this process sees"
            assert context.parallelize([0], 1).map(found).collect() == [(pyspark.__file__, sys.executable)]
        assert not {"PYSPARK_PYTHON", "AIRFLOW_CDC_PYTHON"} & set(os.environ), "commands that are started later choose"


@pytest.mark.thorough
@pytest.mark.spark
def test_a_source_whose_process_comes_up_late(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark waits for it for ten seconds, and ends the query that needs it."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO public.t VALUES (1)")
    late, once = tmp_path / "python", tmp_path / "once"
    late.write_text(
        f"""#!/bin/sh
        case "$*" in *python_streaming_source_runner*) mkdir {shlex.quote(str(once))} && sleep 12;; esac
        exec {shlex.quote(sys.executable)} "$@"
        """
    )
    late.chmod(0o700)
    monkeypatch.setenv("PYSPARK_PYTHON", str(late))
    outcome = pipeline.run("stream", "--until", "caught-up")
    assert once.exists()
    assert "did not come up within ten seconds" in outcome.stderr
    pipeline.assert_equal()


@pytest.mark.parametrize(("end", "late"), [("Python worker failed to connect back.", True), ("Another error", False)])
def test_a_query_that_fails_is_awaited_until_its_error_is_there(end: str, late: bool) -> None:
    """Spark reports the failure first, and says a moment later that the query is no longer active and why."""
    said = ["Initializing sources", "Terminated with exception: …", "Terminated with exception: …"]

    class Query:
        @property
        def isActive(self) -> bool:
            return len(said) > 1

        @property
        def status(self) -> dict[str, str]:
            return {"message": said.pop(0)}

        def exception(self) -> str:
            assert not self.isActive
            return end

    run = SimpleNamespace(stopping=False, check=lambda: None, wait=lambda seconds: None)
    job: Any = SimpleNamespace(_run=run)
    query: Any = Query()
    assert StreamJob._comes_late(job, query) == late


def executable_of_tasks(pipeline: Path) -> list[str]:
    """Return the Python of tasks of a session whose JVM was started by PySpark itself."""
    SparkContext._ensure_initialized(conf=SparkConf().setAll(list(JVM_CONF.items())))
    with spark_session(Pipeline.load(pipeline).spark_start, "stream") as spark:
        return spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()


@pytest.mark.spark
def test_a_jvm_that_was_started_without_it_starts_this_python(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has that JVM: this one keeps its own."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    file = PipelineUnderTest(tmp_path, databases, ["public.t"]).file
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(executable_of_tasks, file).result() == [sys.executable]
