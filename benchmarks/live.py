"""Runs a pipeline that follows live writes, in separate processes as users start it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from benchmarks.lab import TABLE_DDL, checksum, create_database, execute
from benchmarks.processes import Meter
from benchmarks.report import WrongResult, check
from local_servers.postgres import PostgresServer

MAX_BATCH_BYTES = 16 << 20
CATCH_UP_SECONDS = 180.0

_NAME = "live"


@dataclass(frozen=True)
class Live:
    """A provisioned pipeline from one server's table to another's, without a snapshot.

    :param file: the pipeline file.
    """

    source: PostgresServer
    target: PostgresServer
    file: Path

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline of the file."""
        return Pipeline.load(self.file)

    @property
    def dsns(self) -> tuple[str, str]:
        """Return the URIs of the source and target databases."""
        return self.source.dsn(_NAME), self.target.dsn(_NAME)

    @contextmanager
    def stream(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``airflow-cdc stream`` in a process.

        :raises WrongResult: if it fails.
        """
        with started(self.file, "stream") as command:
            yield command
            self.check_running(command)
            command.terminate()
            check(0, command.wait(CATCH_UP_SECONDS), "exit code of the stream")

    def check_running(self, command: subprocess.Popen[bytes]) -> None:
        """Raise an error if the stream has ended."""
        check(None, command.poll(), "exit code of the stream before its end")

    def catch_up(self) -> None:
        """Wait until the stream has applied everything that was committed."""
        pipeline = self.pipeline
        with connected(pipeline.source.dsn) as connection:
            marker = emit_marker(connection, _NAME)
        found = await_condition(lambda: existing_record(pipeline).applied >= marker, CATCH_UP_SECONDS, 0.2)
        check(True, found, "the stream at the end of the log")

    def check_equal(self, what: str) -> None:
        """Compare both tables."""
        source, target = self.dsns
        check(checksum(source), checksum(target), f"{what}: rows and checksum")

    def meter(self, command: subprocess.Popen[bytes]) -> Meter:
        """Return a meter of the CPU time of the stream and both servers."""
        return Meter(command.pid, self.source, self.target)


@contextmanager
def started(file: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process, and kill all of its processes at the end.

    :param file: the pipeline file.
    :param name: name of the command.
    """
    script, log = Path(sys.executable).with_name("airflow-cdc"), file.with_name(f"{name}.log")
    with log.open("wb") as output:
        command = subprocess.Popen(
            [str(script), name, "--pipeline", str(file)], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield command
    except WrongResult:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        _end_session(command.pid)
        command.wait()


@contextmanager
def live(stream: Mapping[str, Any], settings: Mapping[str, str] | None = None) -> Iterator[Live]:
    """Start two servers, and provision a pipeline between them.

    :param stream: section ``stream`` of the pipeline file.
    :param settings: settings of the source's server.
    """
    directory = Path(tempfile.mkdtemp(prefix="cdc-live-"))
    directory.chmod(0o755)  # servers of root run as another user
    try:
        with (
            PostgresServer.create(directory / "source", settings=settings) as source,
            PostgresServer.create(directory / "target") as target,
        ):
            found = Live(source, target, directory / "pipeline.yaml")
            for server in (source, target):
                create_database(server, _NAME)
            execute(found.dsns[0], TABLE_DDL)
            document = {
                "pipeline": _NAME,
                "source": {"dsn": found.dsns[0], "tables": ["public.t"]},
                "sink": {"dsn": found.dsns[1]},
                "state": f"file://{directory / 'state'}",
                "snapshot": {"mode": "never"},
                "stream": dict(stream),
                "spark": {"conf": {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}},
            }
            found.file.write_text(yaml.safe_dump(document), encoding="utf-8")
            commands.provision(found.pipeline)
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _end_session(pid: int) -> None:
    """Kill all processes that a command has started; they leave its process group, but not its session."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == pid:
                process.kill()
