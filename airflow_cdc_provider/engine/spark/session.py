"""The Spark session of a job, from ``spark-submit`` or from the pipeline file.

Executors that do not share this process's Python path receive the engine as a zip, as with ``--py-files``. A check
makes sure that executors have the libraries that the engine needs.
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
    # Saves tens of milliseconds per batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # The size of a piece of the log; a task has one piece at a time.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),
    # A second concurrent attempt would only be refused by the sink.
    "spark.speculation": "false",
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.driver.defaultJavaOptions": END_WITHOUT_MEMORY,
    "spark.executor.defaultJavaOptions": END_WITHOUT_MEMORY,
}
"""The defaults of every Spark of the engine; the pipeline file overrides them. See :func:`defaults_on`."""

_session: ContextVar[SparkSession | None] = ContextVar("session", default=None)
_LIBRARIES = ("adbc_driver_postgresql", "numpy", "pandas", "psycopg", "psycopg2", "pyarrow", "fsspec", "yaml")


@contextmanager
def spark_session(start: SparkStart, command: str) -> Iterator[SparkSession]:
    """Start a session, or use the one of ``spark-submit``, and stop it at the end; nested calls share the session.

    :param start: see :attr:`.Pipeline.spark_start`.
    :param command: the command, for the application's name.
    :raises SparkUnusable: if it does not start, or if its executors lack a library.
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
                # Before a job, no Spark task is used for checks that this process can do itself.
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


def has_session() -> bool:
    """Return whether :func:`spark_session` has started a session around the caller."""
    return _session.get() is not None


class _Choice:
    """A count of the users of the Python that this process has chosen, and the previous environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before: dict[str, str | None] = {}

    def take(self, here: bool, further: Mapping[str, str]) -> None:
        """Set the Python and further variables in the environment, for the first user only."""
        with self._lock:
            if not self._holders:
                chosen = {**further, **(_choose(here) if "PYSPARK_PYTHON" not in os.environ else {})}
                self._before = {name: os.environ.get(name) for name in chosen}
                os.environ.update(chosen)
            self._holders += 1

    def release(self) -> None:
        """Restore the environment after the last user."""
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
    """Let Spark start this Python, unless another is configured, and restore this process's environment afterwards.

    Several threads may do so concurrently: the last one restores the environment.

    :param here: whether Spark runs on this machine, if this process starts its JVM.
    :param further: further variables for Spark.
    """
    _choice.take(here, further)
    try:
        yield
    finally:
        _choice.release()


def _choose(here: bool) -> dict[str, str]:
    # A JVM that is already running has the environment of its start, which may not name the Python.
    gateway = SparkContext._gateway
    informed = not _submitted() if gateway is None else gateway.jvm.System.getenv(VARIABLE) == sys.executable
    return python_for_spark() if here and informed else {"PYSPARK_PYTHON": sys.executable}


def defaults_on(master: str) -> dict[str, str]:
    """Return :data:`DEFAULTS` with the additions for a Spark on this machine."""
    return {**DEFAULTS, **hidden_on_executors(), **(local_sockets() if runs_locally(master) else {})}


def _submitted() -> bool:
    """Return whether ``spark-submit`` has started this process, after its JVM."""
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
            # A socket's path has at most 108 bytes; by default it is in Java's directory for temporary files.
            "Set spark.python.unix.domain.socket.dir in spark.conf to a directory with a short path."
            if "path too long" in str(e)
            else "Check that Java 17 or newer is installed, and spark.master and spark.conf of the pipeline file.",
        ) from e
    finally:
        if threading.current_thread() is threading.main_thread():
            # Spark installs its own handler, which would interrupt the current unit.
            signal.signal(signal.SIGINT, interrupt)


@contextmanager
def reporting_jvm_end(spark: SparkSession, stopping: Callable[[], bool]) -> Iterator[None]:
    """Work with a session during the block, and convert errors that are caused by the end of its JVM.

    :param stopping: returns whether the work has been asked to end. A signal to all processes of a job also ends the
        JVM, which may still answer for a moment.
    :raises SparkLost: if the JVM has ended.
    """
    try:
        yield
    except Exception as e:
        ending = stopping() and isinstance(e, Py4JError | PySparkException | OSError)
        if _answers(spark) and not ending:
            raise
        raise SparkLost(
            "Spark's JVM has ended during the work",
            "If the end of its log mentions memory, raise spark.driver.memory or lower stream.max_batch_bytes, because"
            " a batch of the log passes through the JVM. Then start again; committed data remains.",
        ) from e


def _answers(spark: SparkSession) -> bool:
    """Return whether the JVM of a session is alive."""
    try:
        spark.sparkContext._jvm.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return False
    return True


def _ship_engine(context: SparkContext, directory: Path) -> None:
    """Let executors, and the Python processes that Spark starts for the driver, import the engine."""
    came_in_zip = isinstance(airflow_cdc_provider.__loader__, zipimporter)  # by --py-files, so Spark has shipped it
    if not came_in_zip and not str(context.master).startswith("local"):
        context.addPyFile(str(engine_zip(directory)))
    # In Spark 4.2 the process of a streaming source looks for shipped files in a folder that remains empty.
    sources = Path(SparkFiles.getRootDirectory()) / "streaming_job"
    if not sources.exists():
        sources.symlink_to(".", target_is_directory=True)


def engine_zip(directory: Path) -> Path:
    """Write the engine, without the code for Airflow, to ``airflow_cdc_provider.zip`` in a directory."""
    package = Path(airflow_cdc_provider.__file__).parent
    path = directory / "airflow_cdc_provider.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in [package / "__init__.py", *sorted((package / "engine").rglob("*.py"))]:
            archive.write(source, Path(package.name) / source.relative_to(package))
    return path


def check_executors(spark: SparkSession, thoroughly: bool = True) -> None:
    """Check that executors have the libraries that the engine needs.

    :param thoroughly: whether to use a Spark task even if executors use this machine and this Python.
    :raises SparkUnusable: if libraries are missing; names them.
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
    """Return a task that looks for ``libraries`` without importing them, which would take each session a second.

    An inner function is shipped by its code, not by its name. Otherwise executors would have to import this module, and
    would need the libraries for that.
    """

    def missing(_: int) -> list[str]:
        from importlib.util import find_spec

        return [name for name in libraries if find_spec(name) is None]

    return missing
