"""The Spark session of a job, from ``spark-submit`` or from the pipeline file.

Executors that do not share this process's Python path get the engine as a zip,
as ``--py-files`` would bring it, and are asked whether they have the libraries
that the engine needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from zipimport import zipimporter

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import airflow_cdc_provider
from airflow_cdc_provider.engine.core.errors import SparkLost, SparkUnusable, hidden_on_executors
from airflow_cdc_provider.engine.spark.jvm import start_jvm
from airflow_cdc_provider.engine.spark.local_spark import local_address, local_sockets
from airflow_cdc_provider.engine.spark.python_interpreter import VARIABLE, is_this_python, python_for_spark
from airflow_cdc_provider.engine.spark.settings import END_WITHOUT_MEMORY, SparkStart, runs_locally

DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Saves tens of milliseconds a batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # As much as a piece of the log: a task holds one at a time.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),
    # A second attempt beside the first would only be refused by the sink.
    "spark.speculation": "false",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.driver.defaultJavaOptions": END_WITHOUT_MEMORY,
    "spark.executor.defaultJavaOptions": END_WITHOUT_MEMORY,
}
"""What every Spark of the engine is started with, unless the pipeline file says otherwise; see :func:`defaults_on`."""

_session: ContextVar[SparkSession | None] = ContextVar("session", default=None)
_LIBRARIES = ("adbc_driver_postgresql", "numpy", "pandas", "psycopg", "psycopg2", "pyarrow", "fsspec", "yaml")


@contextmanager
def spark_session(start: SparkStart, command: str) -> Iterator[SparkSession]:
    """Start a session (or join the one of ``spark-submit``), and stop it at the end; within a session, use that.

    :param start: see :attr:`.Pipeline.spark_start`.
    :param command: for the application's name.
    :raises SparkUnusable: when it does not start, or its executors lack a library.
    """
    outer = _session.get()
    if outer is not None:
        yield outer
        return
    local = runs_locally(start.master)
    with python_chosen(local, local_address(start.conf) if local else {}):
        spark = _started(start, command)
        try:
            with tempfile.TemporaryDirectory(prefix="airflow-cdc-engine-") as directory:
                # Before a job no task is spent on what this process sees as well.
                check_executors(spark, thoroughly=command == "preflight")
                _ship_engine(spark.sparkContext, Path(directory))
                token = _session.set(spark)
                try:
                    yield spark
                finally:
                    _session.reset(token)
        finally:
            with contextlib.suppress(*(() if _answers(spark) else (Py4JError, OSError))):
                spark.stop()


class _Choice:
    """Who needs the Python that this process has chosen, and what its environment had before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before: dict[str, str | None] = {}

    def take(self, here: bool, further: Mapping[str, str]) -> None:
        """Name the Python in the environment, if nobody has, and what is wanted there with it."""
        with self._lock:
            if not self._holders:
                chosen = {**further, **(_choose(here) if "PYSPARK_PYTHON" not in os.environ else {})}
                self._before = {name: os.environ.get(name) for name in chosen}
                os.environ.update(chosen)
            self._holders += 1

    def release(self) -> None:
        """Leave the environment as it was, when nobody needs the choice any more."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for name, value in reversed(self._before.items()):
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._before = {}


_choice = _Choice()


@contextmanager
def python_chosen(here: bool, further: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Let Spark start this Python, unless another is chosen, and leave this process's environment as it was.

    Threads may do so at once: the last to leave restores the environment.

    :param here: whether Spark runs on this machine, if this process starts its JVM.
    :param further: variables that Spark is to have too.
    """
    _choice.take(here, further)
    try:
        yield
    finally:
        _choice.release()


def _choose(here: bool) -> dict[str, str]:
    # A JVM that runs already has the environment of its start, in which the Python may not be named.
    gateway = SparkContext._gateway
    told = not _submitted() if gateway is None else gateway.jvm.System.getenv(VARIABLE) == sys.executable
    return python_for_spark() if here and told else {"PYSPARK_PYTHON": sys.executable}


def defaults_on(master: str) -> dict[str, str]:
    """:data:`DEFAULTS`, and what a Spark on this machine has beyond them."""
    return {**DEFAULTS, **hidden_on_executors(), **(local_sockets() if runs_locally(master) else {})}


def _submitted() -> bool:
    """Whether ``spark-submit`` has started this process, and its JVM before it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _started(start: SparkStart, command: str) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        master = SparkConf().get("spark.master") if _submitted() else None
        options = {"spark.app.name": f"airflow-cdc {start.name} {command}"}
        options |= defaults_on(master or start.master)
        if not _submitted():
            options |= {"spark.master": start.master, "spark.log.level": "ERROR"}
            options |= start.conf
        start_jvm(options, f"{start.name}-{command}")
        builder = SparkSession.builder
        for name, value in options.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()
    except SparkUnusable:
        raise
    except Exception as e:
        raise SparkUnusable(
            f"Spark does not start on {start.master}: {str(e).splitlines()[0]}",
            # A socket's path has 108 bytes; by default it lies in Java's directory for temporary files.
            "Name a directory with a short path by spark.python.unix.domain.socket.dir in spark.conf."
            if "path too long" in str(e)
            else "Check that Java 17 or newer is installed, and spark.master and spark.conf of the pipeline file.",
        ) from e
    finally:
        if threading.current_thread() is threading.main_thread():
            # Spark installs a handler of its own, which would break off the unit at hand.
            signal.signal(signal.SIGINT, interrupt)


@contextmanager
def outliving(spark: SparkSession, stopping: Callable[[], bool]) -> Iterator[None]:
    """Do work with a session, and tell errors by their cause when they come from the end of its JVM.

    :param stopping: whether the work has been asked to end. Whoever asks all processes of a job ends the JVM, too,
        which may answer for a moment yet.
    :raises SparkLost: when the JVM has ended.
    """
    try:
        yield
    except Exception as e:
        ending = stopping() and isinstance(e, Py4JError | PySparkException | OSError)
        if _answers(spark) and not ending:
            raise
        raise SparkLost(
            "Spark's JVM has ended in the middle of the work",
            "If its last words in the log are of memory, raise spark.driver.memory, or lower stream.max_batch_bytes: a"
            " batch of the log passes through it. Then start again: what has been committed stays.",
        ) from e


def _answers(spark: SparkSession) -> bool:
    """Whether the JVM of a session is alive."""
    try:
        spark.sparkContext._jvm.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return False
    return True


def _ship_engine(context: SparkContext, directory: Path) -> None:
    """Let executors, and the Python processes that Spark starts beside the driver, import the engine."""
    came_in_zip = isinstance(airflow_cdc_provider.__loader__, zipimporter)  # by --py-files, so Spark has shipped it
    if not came_in_zip and not str(context.master).startswith("local"):
        context.addPyFile(str(engine_zip(directory)))
    # Spark 4.2 makes the process of a streaming source look for shipped files in a folder that it never fills.
    sources = Path(SparkFiles.getRootDirectory()) / "streaming_job"
    if not sources.exists():
        sources.symlink_to(".", target_is_directory=True)


def engine_zip(directory: Path) -> Path:
    """Write the engine, without the Airflow shells, to ``airflow_cdc_provider.zip`` in a directory."""
    package = Path(airflow_cdc_provider.__file__).parent
    path = directory / "airflow_cdc_provider.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in [package / "__init__.py", *sorted((package / "engine").rglob("*.py"))]:
            archive.write(source, Path(package.name) / source.relative_to(package))
    return path


def check_executors(spark: SparkSession, thoroughly: bool = True) -> None:
    """Have executors look for what the engine needs.

    :param thoroughly: by a task of Spark, also where executors are of this machine and this Python.
    :raises SparkUnusable: naming what is missing.
    """
    context = spark.sparkContext
    check = _import_check(_LIBRARIES)
    if not thoroughly and str(context.master).startswith("local") and is_this_python(context.pythonExec):
        missing = set(check(0))
    else:
        slots = max(1, min(8, context.defaultParallelism))
        missing = set(context.parallelize(range(slots), slots).flatMap(check).collect())
    if missing:
        python = sys.executable if is_this_python(context.pythonExec) else context.pythonExec
        raise SparkUnusable(
            f"Spark's executors on {context.master} lack: {', '.join(sorted(missing))}",
            f"Install them into the executors' Python ({python} by default, see PYSPARK_PYTHON),"
            " or ship an environment with spark.archives.",
        )


def _import_check(libraries: tuple[str, ...]) -> Callable[[int], list[str]]:
    """A task that looks for ``libraries``: to import them would cost each session a second.

    A function within a function is shipped by its code, not by its name: to import this module, executors would need
    what they are asked for.
    """

    def missing(_: int) -> list[str]:
        from importlib.util import find_spec

        return [name for name in libraries if find_spec(name) is None]

    return missing
