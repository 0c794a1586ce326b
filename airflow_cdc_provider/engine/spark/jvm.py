"""Spark's JVM that this process starts: within bounds, its output in a file of its own, and ended with the process.

PySpark would wait for ever for a JVM that has met an exception before it could say where it listens, as threads of its
own keep such a JVM alive. And all that Spark says at its start, and that its Python workers say at its end, would come
between what a command has to say itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

from pyspark import SparkConf, SparkContext
from pyspark.find_spark_home import _find_spark_home
from pyspark.serializers import UTF8Deserializer, read_int

from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.core.signals import deferred, when_broken_off

LOGS = 20
"""So many logs are kept."""
SILENCE_SECONDS = 300.0
"""For so long a JVM that starts may say nothing: packages may have to be downloaded before it answers."""
_DYING_SECONDS = 2.0
_END_SECONDS = 10.0
_POLL_SECONDS = 0.05
_DIES = 'Exception in thread "main"'
_TAIL_BYTES = 16384
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"

_PRIVATE = re.compile(
    r"secret|password|passphrase|token|credential|jaas|[.]sas[.]|(access|account|private|encryption)[.]?key",
    re.IGNORECASE,
)
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_output: Path | None = None


def start_jvm(options: Mapping[str, str], name: str) -> None:
    """Start a JVM for Spark sessions of this process, unless there is one, or ``spark-submit`` has started it.

    :param options: Spark's configuration.
    :param name: with which the name of its log begins.
    :raises SparkUnusable: when it ends, or does not answer in time; with its last words.
    """
    global _process, _output
    with _lock:
        if SparkContext._gateway is not None or _PORT in os.environ:
            return
        file, _output = _open_log(name)
        try:
            _process = _launched(options, file)
        finally:
            if file is not None:
                file.close()


def end_jvm() -> None:
    """End the JVM, if this process has started one: nothing is left running then."""
    if _process is not None:
        _end(_process)


def log_path() -> Path | None:
    """Return the file to which the JVM and the Python workers that it starts write; ``None`` without one."""
    return _output


def last_words(lines: int = 15) -> str:
    """Return the end of what the JVM and its Python workers have written."""
    if _output is None:
        return ""
    with contextlib.suppress(OSError), _output.open("rb") as file:
        file.seek(max(0, _output.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
    return ""


def launch_command(options: Mapping[str, str]) -> list[str]:
    """Return the command that starts the JVM, which everybody on the machine can see.

    :param options: Spark's configuration; what is named like a secret is left to whoever makes the session.
    """
    command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
    for key, value in options.items():
        if not _PRIVATE.search(key):
            command += ["--conf", f"{key}={value}"]
    return command + shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))


def _launched(options: Mapping[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the JVM, and connect PySpark to it as to one that runs already."""
    command = launch_command(options)
    with tempfile.TemporaryDirectory(prefix="airflow-cdc-jvm-") as directory:
        told = Path(directory) / "connection"
        process = None
        try:
            with deferred():  # else it might be started, and not known here
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # at whose end it ends
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told)},
                    preexec_fn=_ignore_signals,
                )
            _await_answer(process, told)
            with told.open("rb") as info:
                port, secret = str(read_int(info)), str(UTF8Deserializer().loads(info))  # type: ignore[no-untyped-call]
            os.environ |= {_PORT: port, _SECRET: secret}
            try:
                SparkContext._ensure_initialized(conf=SparkConf().setAll(list(options.items())))
            finally:
                del os.environ[_PORT], os.environ[_SECRET]
            SparkContext._gateway.proc = process  # type: ignore[union-attr]
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            raise
    atexit.register(_end, process)
    when_broken_off(partial(_let_end, process))
    return process


def _ignore_signals() -> None:
    """Leave signals to a whole process group to the driver, which ends its unit first, and the JVM with itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _await_answer(process: subprocess.Popen[bytes], told: Path) -> None:
    """Wait until the JVM has said where it listens.

    :raises SparkUnusable: when it never will.
    """
    said, heard = "", time.monotonic()
    while not told.is_file():
        if process.poll() is not None:
            raise _unusable(f"has ended with exit code {process.returncode} before it answered")
        if last_words() != said:
            said, heard = last_words(), time.monotonic()
        silence = time.monotonic() - heard
        if _DIES in said and silence > _DYING_SECONDS:
            raise _unusable("could not start")
        if silence > SILENCE_SECONDS:
            raise _unusable(f"has not answered, and said nothing for {SILENCE_SECONDS:g} seconds")
        time.sleep(_POLL_SECONDS)


def _unusable(what: str) -> SparkUnusable:
    words = last_words()
    cause = next((line for line in words.splitlines() if _DIES in line), words.rpartition("\n")[2])
    return SparkUnusable(
        f"Spark's JVM {what}{f': {cause.strip()}' if cause else ''}",
        "Check that Java 17 or newer is installed, that there is room in the directory for temporary files"
        f" ({tempfile.gettempdir()}, or TMPDIR), and spark.conf of the pipeline file."
        + (f" {_output} has all that it said." if _output is not None else ""),
    )


def _let_end(process: subprocess.Popen[bytes]) -> None:
    """Let a JVM end in an orderly way, without an answer to whoever waits for one."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    _let_end(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    process.kill()
    process.wait()


# -- the log -------------------------------------------------------------------------------------------


def _open_log(name: str) -> tuple[IO[bytes] | None, Path | None]:
    """Open a new log that only this user can read; without one the JVM writes to this process's standard error."""
    try:
        folder = _log_folder()
        logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in logs[: 1 - LOGS]:
            old.unlink(missing_ok=True)
        path = folder / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as e:
        _log.warning("Spark's output cannot be written to a file: %s", e)
        return None, None
    _log.info("Spark's output goes to %s", path)
    return os.fdopen(descriptor, "ab"), path


def _log_folder() -> Path:
    """Return the folder for logs below the user's state home (``XDG_STATE_HOME``), else one for temporary files."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(home) / "airflow-cdc" / "logs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="airflow-cdc-logs-"))
