"""The Python of Spark's processes: this one, whose modules of PySpark are the installed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from airflow_cdc_provider.engine.interpreter import is_this_python, write_interpreter
from airflow_cdc_provider.engine.session import spark_session
from tests.conftest import Databases
from tests.pipelines import PipelineUnderTest

ZIP = str(Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip")
FOUND = "import pyspark, sys; print(pyspark.__file__, sys.executable, *sys.argv[1:], sep='|')"


def run(interpreter: str, path: str | None, *arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": path}
    command = [interpreter, "-c", FOUND, *arguments]
    return subprocess.check_output(command, env=environment, text=True).strip().split("|")


@pytest.mark.parametrize(
    "path", [None, "", ZIP, f"{ZIP}:/nowhere", f"/nowhere:{ZIP}", f"{ZIP}:{ZIP}", f"/a b:{ZIP}:/nowhere:{ZIP}"]
)
def test_modules_come_from_the_installed_pyspark(tmp_path: Path, path: str | None) -> None:
    script = write_interpreter(tmp_path)
    assert run(script, path, "a b", "$HOME") == [pyspark.__file__, sys.executable, "a b", "$HOME"]


def test_others_stay_on_the_path(tmp_path: Path) -> None:
    other = tmp_path / "it's another" / "pyspark.zip"
    (other / "pyspark").mkdir(parents=True)
    (other / "pyspark" / "__init__.py").touch()
    script = write_interpreter(tmp_path)
    assert run(script, f"{ZIP}:{other}")[0] == str(other / "pyspark" / "__init__.py")
    assert run(sys.executable, f"{ZIP}:{other}")[0].startswith(ZIP), "which Spark's path leads to otherwise"


def test_it_is_known_as_this_python(tmp_path: Path) -> None:
    script = write_interpreter(tmp_path)
    assert is_this_python(script)
    assert is_this_python(sys.executable)
    other = tmp_path / "other"
    other.write_text(Path(script).read_text().replace(sys.executable, "/usr/bin/python3"))
    assert not is_this_python(str(other))
    assert not is_this_python("/bin/sh")
    assert not is_this_python("python3")


@pytest.mark.spark
def test_tasks_have_it(databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: int) -> tuple[str, str]:
        import pyspark

        return pyspark.__file__, sys.executable

    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"]).pipeline
    with spark_session(pipeline, "stream") as spark:
        context = spark.sparkContext
        assert is_this_python(context.pythonExec)
        assert context.pythonExec != sys.executable
        assert context.parallelize([0], 1).map(found).collect() == [(pyspark.__file__, sys.executable)]
    assert "PYSPARK_PYTHON" not in os.environ
