"""Submits a Spark job of the engine, so that it outlives the task that submits it.

The command is that of the Spark provider, with these additions: an unknown connection is an error, ``spark-submit`` is
also found in an installed pyspark, secrets are passed by the environment for every master, a standalone cluster can run
the driver (:mod:`.deployment`), and a keeper process watches the job (:mod:`.keeper`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from airflow.providers.apache.spark.hooks.spark_submit import (
    ALLOWED_SPARK_BINARIES,
    DEFAULT_SPARK_BINARY,
    SparkSubmitHook,
)
from airflow.sdk import conf as airflow_conf

import airflow_cdc_provider
from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.spark.local_spark import local_address
from airflow_cdc_provider.engine.spark.python_interpreter import python_for_spark
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.submission import STATE_VARIABLE, VARIABLE, Submission, write
from airflow_cdc_provider.hooks.cdc import LoadedPipeline
from airflow_cdc_provider.hooks.connections import find_connection
from airflow_cdc_provider.hooks.deployment import LAUNCHER, Deployment
from airflow_cdc_provider.hooks.keeper import Assignment, start_keeper

PACKAGE = Path(airflow_cdc_provider.__file__).parent
ENGINE_JOB = PACKAGE / "engine" / "job.py"

# All output of the job is kept, and Spark's own messages would hide it.
_QUIET = {"spark.log.level": "WARN"}
# A value up to this length may be a word such as "true" of an option whose name only looks like a secret's. Such words
# are not masked, because they may occur in every line.
_WORD = 5

# Configuration and connections of Airflow, which the job does not need and must not be able to leak.
_AIRFLOW_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "__AIRFLOW", "_AIRFLOW")


class SparkJobHook(SparkSubmitHook):
    """A job of a pipeline on the Spark of a connection.

    :param conn_id: a Spark connection; its master overrides any other.
    :param loaded: the pipeline.
    :param name: the application's name.
    :param conf: Spark configuration that overrides that of the pipeline.
    :raises SparkUnusable: if settings of the connection cannot be used.
    """

    def __init__(self, conn_id: str, *, loaded: LoadedPipeline, name: str, conf: Mapping[str, str]) -> None:
        connection = find_connection(conn_id, "spark_conn_id")
        binary, self._home = find_spark_submit(connection.extra_dejson.get("spark-binary") or DEFAULT_SPARK_BINARY)
        try:
            super().__init__(
                conf={**loaded.pipeline.spark_conf, **conf},
                conn_id=conn_id,
                name=name,
                spark_binary=binary,
                deploy_mode=connection.extra_dejson.get("deploy-mode") or "client",
            )
        except NameError as e:  # the Spark provider uses the other one without checking that it is installed
            raise SparkUnusable(
                "Airflow's Spark provider submits to Kubernetes only if the provider for Kubernetes is installed",
                "Install apache-airflow-providers-cncf-kubernetes where Airflow's workers run.",
            ) from e
        master = self._connection["master"]
        self._deployment = Deployment(master, self._connection["deploy_mode"])
        chosen = {**_QUIET, **loaded.pipeline.spark_conf_on(master), **conf}
        self._secrets = self._deployment.secrets(chosen)
        shown = {name: value for name, value in chosen.items() if name not in self._secrets}
        self._conf = shown | dict(self._deployment.conf)
        self._loaded = loaded

    def start(self, submission: Submission) -> None:
        """Write the submission to the state, and start its job without waiting for it."""
        pipeline, cluster = self._loaded.pipeline, self._deployment.cluster
        state = State(pipeline.state)
        directory = Path(tempfile.mkdtemp(prefix="airflow-cdc-"))
        log = log_folder() / pipeline.name / f"{submission.id}-{submission.part}.log"
        try:
            write(state, replace(submission, log=str(log), cluster=cluster))
            given = self._given_environment()
            assignment = Assignment(
                state=pipeline.state,
                submission=submission.id,
                command=self._command(submission, state, directory),
                environment=self._deployment.environment(given, self._loaded.environment),
                application=str(ENGINE_JOB),
                cluster=cluster,
                directory=str(directory),
                log=str(log),
                secrets=[
                    *pipeline.source.secrets,
                    *(secret for sink in pipeline.sinks for secret in sink.secrets),
                    *(value for value in self._secrets.values() if len(value) > _WORD),
                ],
            )
            start_keeper(assignment, given)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _command(self, submission: Submission, state: State, directory: Path) -> list[str]:
        """Return spark-submit with its arguments, and put the files that these name where the driver finds them."""
        engine = pack_engine(directory)
        if self._deployment.standalone:
            jar, script = put_engine(state, engine)
            self._java_class = LAUNCHER
            self._application_args = self._deployment.launched(self._name, script, submission.command)
            return list(self._build_spark_submit_command(jar))
        if self._deployment.cluster:
            self._env_vars = {VARIABLE: submission.id, STATE_VARIABLE: state.url}
        if self._secrets:
            self._properties_file = str(write_properties(directory, self._secrets))
        self._py_files = str(engine)
        self._application_args = submission.command
        binary, *arguments = self._build_spark_submit_command(str(ENGINE_JOB))
        defaults = ["--load-spark-defaults"] if self._secrets else []  # a properties file would replace the defaults
        return [binary, *defaults, *arguments]

    def _given_environment(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith(_AIRFLOW_PREFIXES)}
        if self._deployment.manager == "local":
            given |= local_address(self._conf)
        if self._home is not None:
            given["SPARK_HOME"] = str(self._home)
        chosen = "PYSPARK_PYTHON" in given or "PYSPARK_DRIVER_PYTHON" in given
        if not chosen and not self._deployment.cluster:
            if self._deployment.manager == "local":
                given |= python_for_spark()
            given["PYSPARK_DRIVER_PYTHON"] = given.get("PYSPARK_PYTHON", sys.executable)
        return given


def log_folder() -> Path:
    """Return the folder for the output of jobs, below Airflow's own logs."""
    return Path(airflow_conf.get("logging", "base_log_folder")) / "airflow_cdc_jobs"


def find_spark_submit(name: str = DEFAULT_SPARK_BINARY) -> tuple[str, Path | None]:
    """Return the path of spark-submit, and the Spark home if it must be set.

    :param name: a name that the Spark provider allows; it is searched on PATH and in the installed pyspark.
    :raises SparkUnusable: if it is not found.
    """
    if name not in ALLOWED_SPARK_BINARIES:
        raise SparkUnusable(
            f"the Spark connection has the spark-binary {name!r}",
            f"Set it to one of {', '.join(ALLOWED_SPARK_BINARIES)}.",
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


def pack_engine(directory: Path) -> Path:
    """Write a zip of the engine for ``--py-files``, without the parts that need Airflow, and return its path."""
    archive = directory / "airflow_cdc_engine.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for source in (PACKAGE / "__init__.py", *sorted((PACKAGE / "engine").rglob("*.py"))):
            # Without the time of installation, so that the same engine always results in the same zip.
            entry = zipfile.ZipInfo(str(source.relative_to(PACKAGE.parent)))
            file.writestr(entry, source.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive


def write_properties(directory: Path, values: Mapping[str, str]) -> Path:
    """Write configuration to a file that only this user can read, and return its path."""
    path = directory / "secret.properties"
    path.touch(0o600)
    # A JSON string has the same escapes as Java's properties, except for leading spaces.
    lines = (f"{name}={json.dumps(value)[1:-1]}".replace(" ", "\\ ") for name, value in values.items())
    path.write_text("\n".join(lines))
    return path


def put_engine(state: State, archive: Path) -> tuple[str, str]:
    """Put the packed engine and the driver's script into the state, under different names for each version.

    :returns: their URLs.
    """
    content = archive.read_bytes()
    name = f"engine/{hashlib.sha256(content).hexdigest()[:12]}"
    return state.put(f"{name}.jar", content), state.put(f"{name}.py", ENGINE_JOB.read_bytes())
