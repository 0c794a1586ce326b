"""A Spark job of the engine: spark-submit in client mode, from start to the last process.

The submission itself is that of the Spark provider. Added is what it lacks: an
unknown connection is an error, ``spark-submit`` is found where pyspark was
installed, secrets go through the environment whatever the master, and a kill
ends all processes within the five seconds that Airflow grants.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from airflow.providers.apache.spark.hooks.spark_submit import (
    ALLOWED_SPARK_BINARIES,
    DEFAULT_SPARK_BINARY,
    SparkSubmitHook,
)
from airflow.sdk.exceptions import AirflowException

import airflow_cdc_provider
from airflow_cdc_provider.engine.errors import SparkUnusable
from airflow_cdc_provider.hooks.cdc import find_connection
from airflow_cdc_provider.hooks.process_group import ProcessGroup, ending_with_supervisor

PACKAGE = Path(airflow_cdc_provider.__file__).parent
ENGINE_JOB = PACKAGE / "engine" / "job.py"

# Airflow sends SIGKILL five seconds after it asked a task to end; these leave a second for the rest.
DRIVER_SECONDS = 2.5
GROUP_SECONDS = 1.0

# Configuration and connections of Airflow, which the job has no use for and must not be able to leak.
_AIRFLOW_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "__AIRFLOW", "_AIRFLOW")


class SparkJobHook(SparkSubmitHook):
    """One run of an application by spark-submit.

    :param conn_id: a Spark connection; its master wins over any other.
    :param name: the application's name.
    :param application_args: the application's command line.
    :param conf: Spark configuration.
    :param py_files: archive of modules for driver and executors.
    :param environment: variables of the driver.
    """

    def __init__(
        self,
        conn_id: str,
        *,
        name: str,
        application_args: Sequence[str],
        conf: Mapping[str, str],
        py_files: Path,
        environment: Mapping[str, str],
    ) -> None:
        connection = find_connection(conn_id, "spark_conn_id")
        binary, home = find_spark_submit(connection.extra_dejson.get("spark-binary") or DEFAULT_SPARK_BINARY)
        super().__init__(
            conf=dict(conf),
            conn_id=conn_id,
            py_files=str(py_files),
            name=name,
            application_args=list(application_args),
            spark_binary=binary,
            deploy_mode="client",
        )
        if connection.extra_dejson.get("deploy-mode") == "cluster":
            self.log.warning("The connection %s asks for cluster mode; the driver runs here, in client mode.", conn_id)
        self.environment = self._driver_environment(environment, home)
        self.result: dict[str, Any] = {}
        """The last JSON object that the job printed."""
        self._application = ""
        self._killing: threading.Thread | None = None
        self._group: ProcessGroup | None = None

    def run(self, application: str) -> int:
        """Run the application to its end and return its exit code; no process of it is left.

        :raises AirflowException: when the run was killed, whatever the exit code.
        """
        with ending_with_supervisor(), ProcessGroup() as group:
            self._group = group
            try:
                self._application = application
                self._check_not_killed()
                # The provider's env_vars would stand on the command line with YARN and Kubernetes.
                # Standard input of a task is its channel to Airflow, which no other process may read.
                self.submit(application, process_group=group.id, env=self.environment, stdin=subprocess.DEVNULL)
            except AirflowException:
                if self._submit_sp is None or not self._submit_sp.returncode:
                    raise
            finally:
                self._group = None
                if self._killing is not None:
                    self._killing.join()
        self._check_not_killed()
        return int(self._submit_sp.returncode) if self._submit_sp is not None else 0

    def kill(self) -> None:
        """End the run: SIGTERM to the driver, which ends after its current unit, then to all, then SIGKILL.

        Returns at once. It is called in a signal handler on the thread that reads
        the job's output, and a job whose output nobody reads cannot end in peace.
        """
        if self._killing is None:
            self._killing = threading.Thread(target=self._end, name="spark-job-kill", daemon=True)
            self._killing.start()

    @property
    def output_tail(self) -> str:
        """The last lines of the job's output, secrets masked."""
        return self._submit_log_tail.strip()

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._remember_result(itr))

    def _remember_result(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):
                    self.result = json.loads(line)
            yield line

    def _end(self) -> None:
        group = self._group
        if group is None:
            return
        self.log.info("Ending the Spark job.")
        # The driver alone at first: without the JVM it could not finish anything. A request to stop that is left
        # in the pipeline's state would end the jobs beside this one, and the next try, too.
        asked = False
        for process in group.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[1:2] == [self._application]:
                    process.terminate()
                    asked = True
        if not (asked and group.await_end(DRIVER_SECONDS)):
            group.end(GROUP_SECONDS)

    def _check_not_killed(self) -> None:
        if self._killing is not None:
            raise AirflowException("The Spark job was ended because the task was asked to end.")

    def _driver_environment(self, environment: Mapping[str, str], home: Path | None) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith(_AIRFLOW_PREFIXES)}
        given |= environment
        if home is not None:
            given["SPARK_HOME"] = str(home)
        if "PYSPARK_PYTHON" not in given and "PYSPARK_DRIVER_PYTHON" not in given:
            given["PYSPARK_DRIVER_PYTHON"] = sys.executable
            if self._connection["master"].startswith("local"):
                given["PYSPARK_PYTHON"] = sys.executable
        return given


def find_spark_submit(name: str = DEFAULT_SPARK_BINARY) -> tuple[str, Path | None]:
    """The path of spark-submit, and the Spark home that it needs to be told.

    :param name: one of the names that the Spark provider allows; on PATH, or that of the installed pyspark.
    :raises SparkUnusable: when there is none.
    """
    if name not in ALLOWED_SPARK_BINARIES:
        raise SparkUnusable(
            f"the Spark connection names {name!r} as its spark-binary",
            f"Name one of {', '.join(ALLOWED_SPARK_BINARIES)} there.",
        )
    found = shutil.which(name)
    if found is not None:
        return found, None
    package = importlib.util.find_spec("pyspark")
    if name == DEFAULT_SPARK_BINARY and package is not None and package.origin is not None:
        home = Path(package.origin).parent
        if (home / "bin" / name).is_file():
            return str(home / "bin" / name), home
    raise SparkUnusable(
        f"{name} is not on PATH and the installed pyspark does not have it",
        "Install pyspark where Airflow's workers run, or put Spark's bin directory on their PATH.",
    )


@contextmanager
def packed_engine() -> Iterator[Path]:
    """A zip of the engine for ``--py-files``, without the parts that need Airflow."""
    directory = Path(tempfile.mkdtemp(prefix="airflow-cdc-"))
    try:
        archive = directory / "airflow_cdc_engine.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for source in (PACKAGE / "__init__.py", *sorted((PACKAGE / "engine").rglob("*.py"))):
                file.write(source, source.relative_to(PACKAGE.parent))
        yield archive
    finally:
        shutil.rmtree(directory, ignore_errors=True)
