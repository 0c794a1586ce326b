"""Starts Spark's JVM with timeouts, redirects its output to a file, and ends it with this process.

PySpark itself would wait forever for a JVM that fails with an exception before it reports its address, because threads
of such a JVM keep it alive. Also, the output of Spark at its start, and of its Python workers at their end, would mix
with the output of the command.
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
from airflow_cdc_provider.engine.core.signals import deferred, on_interrupt

LOGS = 20
"""Number of logs that are kept."""
SILENCE_SECONDS = 300.0
"""Seconds that a starting JVM may be silent; it may have to download packages before it answers."""
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
    """Start a JVM for Spark sessions of this process, unless one exists or ``spark-submit`` has started one.

    :param options: Spark's configuration.
    :param name: prefix of the name of its log.
    :raises SparkUnusable: if the JVM ends or does not answer in time; has the end of its output.
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
    """End the JVM if this process has started one, so that it does not outlive the process."""
    if _process is not None:
        _end(_process)


def log_path() -> Path | None:
    """Return the file with the output of the JVM and its Python workers; ``None`` if there is no file."""
    return _output


def log_tail(lines: int = 15) -> str:
    """Return the end of the output of the JVM and its Python workers."""
    if _output is None:
        return ""
    with contextlib.suppress(OSError), _output.open("rb") as file:
        file.seek(max(0, _output.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
    return ""


def launch_command(options: Mapping[str, str]) -> list[str]:
    """Return the command that starts the JVM; all users of the machine can see it.

    :param options: Spark's configuration; options with names like secrets are excluded, and are set on the session
        instead.
    """
    command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
    for key, value in options.items():
        if not _PRIVATE.search(key):
            command += ["--conf", f"{key}={value}"]
    return command + shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))


def _launched(options: Mapping[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the JVM, and connect PySpark to it as to an existing one."""
    command = launch_command(options)
    with tempfile.TemporaryDirectory(prefix="airflow-cdc-jvm-") as directory:
        address_file = Path(directory) / "connection"
        process = None
        try:
            with deferred():  # otherwise a signal might interrupt after the start and before the assignment
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # the JVM ends when this is closed
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(address_file)},
                    preexec_fn=_ignore_signals,
                )
            _await_answer(process, address_file)
            with address_file.open("rb") as info:
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
    on_interrupt(partial(_let_end, process))
    return process


def _ignore_signals() -> None:
    """Ignore signals to the process group, because the driver first finishes its unit and then ends the JVM."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _await_answer(process: subprocess.Popen[bytes], address_file: Path) -> None:
    """Wait until the JVM has reported its address.

    :raises SparkUnusable: if it ends, fails or is silent for too long.
    """
    said, heard = "", time.monotonic()
    while not address_file.is_file():
        if process.poll() is not None:
            raise _unusable(f"has ended with exit code {process.returncode} before it answered")
        if log_tail() != said:
            said, heard = log_tail(), time.monotonic()
        silence = time.monotonic() - heard
        if _DIES in said and silence > _DYING_SECONDS:
            raise _unusable("could not start")
        if silence > SILENCE_SECONDS:
            raise _unusable(f"has not answered, and has written nothing for {SILENCE_SECONDS:g} seconds")
        time.sleep(_POLL_SECONDS)


def _unusable(what: str) -> SparkUnusable:
    words = log_tail()
    cause = next((line for line in words.splitlines() if _DIES in line), words.rpartition("\n")[2])
    return SparkUnusable(
        f"Spark's JVM {what}{f': {cause.strip()}' if cause else ''}",
        "Check that Java 17 or newer is installed, that there is free space in the directory for temporary files"
        f" ({tempfile.gettempdir()}, or TMPDIR), and that spark.conf of the pipeline file is correct."
        + (f" Its whole output is in {_output}." if _output is not None else ""),
    )


def _let_end(process: subprocess.Popen[bytes]) -> None:
    """Let a JVM end in an orderly way, without waiting for it; calls that wait for its answer fail."""
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
    """Open a new log that only this user can read; if that fails, the JVM writes to this process's standard error."""
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
    """Return the folder for logs in the user's state home (``XDG_STATE_HOME``), or else a temporary folder."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(home) / "airflow-cdc" / "logs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="airflow-cdc-logs-"))
