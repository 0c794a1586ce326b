"""A pipeline under test: its file, its commands as processes of their own, and its parts within the test's process.

Tests of the protocol need control over what happens when, which a command does not give. :func:`copy_chunk_of` and
:func:`apply_stream` therefore run the real parts (chunk task, slot reader, staging, commit) here, in an order that
the test chooses, and leave out nothing but Spark's scheduler. Crashes are the other way round: a command runs as
users run it, in its own session, so that a kill reaches the JVM and the Python workers too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import emit_marker, read_slot
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import ChunkTask, copy_chunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read
from tests.conftest import Databases
from tests.support.class_archive import JVM_CONF, JVM_OPTIONS
from tests.support.databases import execute, query_rows
from tests.support.engine_parts import apply_stream, copy_chunk_of
from tests.support.patience import SECONDS

COMMAND = Path(sys.executable).with_name("airflow-cdc")


# Spark's start dominates these tests, so it gets no web server, and its classes come from an archive.
SPARK_CONF = {
    "spark.ui.enabled": "false",
    **JVM_CONF,
    "spark.executor.extraJavaOptions": JVM_OPTIONS,
    "spark.sql.shuffle.partitions": "1",
    # To compile plans for a few rows takes a fifth of the time of Spark.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


# For streams that run long without being tested themselves: each batch, and so each heartbeat, takes a tenth of a
# second of a core.
UNHURRIED = {"trigger": "1 second", "heartbeat": "3 seconds"}


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one object that ``--json`` prints."""
        return json.loads(self.stdout)


class Command:
    """A command that runs in its own session and writes its output to files.

    :param program: with its arguments.
    :param failpoint: ``name:action`` that is armed in all its processes.
    :param variables: further variables of its environment.
    """

    def __init__(
        self,
        title: str,
        program: Sequence[str],
        directory: Path,
        failpoint: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_CDC")}
        environment |= variables or {}
        if failpoint is not None:
            environment["AIRFLOW_CDC_FAILPOINT"] = failpoint
        number = len(list(directory.glob("command*.out")))
        self._files = tuple(directory / f"command{number}.{kind}" for kind in ("out", "err"))
        self.title = title
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                program,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the command itself, the driver, has not ended."""
        return self.process.poll() is None

    def wait(self, seconds: float = SECONDS) -> Outcome:
        """Wait for the command's end; one that takes too long is killed, and fails the test."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{self.title} did not end within {seconds:g} seconds:\n{self.output()}")
        return self.outcome()

    def outcome(self) -> Outcome:
        """Exit code and output of the ended command."""
        assert self.process.returncode is not None
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in self._files)
        return Outcome(self.process.returncode, out, err)

    def output(self) -> str:
        """Return what it has printed so far, for messages."""
        return "\n".join(file.read_text(encoding="utf-8", errors="replace")[-4000:] for file in self._files)

    def processes(self) -> list[psutil.Process]:
        """All living processes of its session: Python workers leave the process group, but not the session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                # Orphans may stay zombies where no process collects them.
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def paused(self) -> int:
        """How many of its processes a failpoint has stopped."""
        count = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                count += process.status() == psutil.STATUS_STOPPED
        return count

    def kill(self) -> None:
        """Kill the driver, its JVM and all Python workers, as the end of the machine would."""

        def dead() -> bool:
            # Again and again, as one that is being killed may just have started another.
            family = self.processes()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not family

        assert await_condition(dead, SECONDS), f"{self.title} cannot be killed"
        self.process.wait()

    def terminate(self) -> None:
        """Ask the driver alone to end, as an orchestrator does."""
        self.process.send_signal(signal.SIGTERM)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait for a state that this running command brings about; fail with its output if it ends before."""
        if not await_condition(lambda: condition() or not self.running, seconds) or not condition():
            state = "runs" if self.running else f"ended with {self.process.returncode}"
            pytest.fail(f"{self.title} ({state}): {what} did not come:\n{self.output()}")


class PipelineUnderTest:
    """A pipeline file in a directory, and what a test does with it.

    :param directory: for the file, the state and the output of commands.
    :param databases: source and target.
    :param tables: entries of ``source.tables``.
    :param sections: further keys of the file, merged into the sections of the same name.
    """

    def __init__(self, directory: Path, databases: Databases, tables: Sequence[Any], **sections: Any) -> None:
        self.directory = directory
        self.databases = databases
        # Slots are shared by a server's databases, so the test's own database gives the name.
        self.name = databases.source.rpartition("/")[2]
        self.state = directory / "state"
        self.document: dict[str, Any] = {
            "pipeline": self.name,
            "source": {"dsn": databases.pipeline_source, "tables": list(tables)},
            "sink": {"dsn": databases.pipeline_target},
            "state": f"file://{self.state}",
            # A failure ends the command, so that the test can say what happens next.
            "stream": {"trigger": "200 ms", "heartbeat": "1 second", "restart": {"strategy": "none"}},
            # Commands start Spark although tests copy little, unless a test changes that.
            "spark": {"conf": SPARK_CONF, "min_bytes": 0},
        }
        self.file = directory / "pipeline.yaml"
        self.change(**sections)
        self._commands: list[Command] = []

    def change(self, **sections: Any) -> None:
        """Change keys of the file: mappings are merged, everything else replaced."""
        for name, value in sections.items():
            old = self.document.get(name)
            self.document[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        self.file.write_text(yaml.safe_dump(self.document), encoding="utf-8")

    @property
    def pipeline(self) -> Pipeline:
        """The file as the engine reads it."""
        return Pipeline.load(self.file)

    @property
    def record(self) -> Record:
        """The sink's commit record."""
        return existing_record(self.pipeline)

    # -- commands ----------------------------------------------------------------------------------

    def start(self, command: str, *options: str, failpoint: str | None = None) -> Command:
        """Start a command in the background."""
        arguments = [command, "--pipeline", str(self.file), *options]
        return self.start_program(" ".join(arguments), [str(COMMAND), *arguments], failpoint)

    def start_program(
        self, title: str, program: Sequence[str], failpoint: str | None, variables: Mapping[str, str] | None = None
    ) -> Command:
        """Start a program that is no command of ours in the background, see :class:`Command`."""
        started = Command(title, program, self.directory, failpoint, variables)
        self._commands.append(started)
        return started

    def run(self, command: str, *options: str, code: int = 0, failpoint: str | None = None) -> Outcome:
        """Run a command to its end and check its exit code."""
        outcome = self.start(command, *options, failpoint=failpoint).wait()
        assert outcome.code == code, f"{command} {options}: {outcome.stdout[-2000:]}\n{outcome.stderr[-4000:]}"
        return outcome

    def json(self, command: str, *options: str, code: int = 0) -> Any:
        """Run a command with ``--json``, and return its object."""
        return self.run(command, *options, "--json", code=code).json

    def end_commands(self) -> None:
        """Kill what a failed test has left running."""
        for command in self._commands:
            if command.running or command.processes():
                command.kill()

    # -- the two databases -------------------------------------------------------------------------

    def source(self, *statements: str) -> None:
        """Execute statements on the source, each a transaction."""
        execute(self.databases.source, *statements)

    def target(self, *statements: str) -> None:
        """Execute statements on the target, each a transaction."""
        execute(self.databases.target, *statements)

    def source_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Query the source."""
        return query_rows(self.databases.source, query)

    def target_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Query the target."""
        return query_rows(self.databases.target, query)

    def assert_equal(self, table: str = "public.t", order: str = "1") -> None:
        """Assert that the table's mirror has the same rows as the source, value by value."""
        query = f"SELECT * FROM {table} ORDER BY {order}"
        assert self.target_rows(query) == self.source_rows(query)

    def assert_verified(self) -> None:
        """``verify`` finds no difference."""
        result = commands.verify(self.pipeline)
        assert result["equal"], result

    # -- states ------------------------------------------------------------------------------------

    def finished_chunks(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        """Return for each finished chunk: time, epoch, snapshot, high watermark and number of rows."""
        found = self.target_rows(
            "SELECT source_table, chunk, finished_at, epoch, snapshot, high_lsn::text, row_count"
            f" FROM airflow_cdc.chunks WHERE pipeline = '{self.name}' AND finished_at IS NOT NULL"
        )
        return {(table, chunk): tuple(rest) for table, chunk, *rest in found}

    def marker(self) -> int:
        """Commit a marker at the source: everything committed before lies below the LSN that is returned."""
        with connected(self.databases.source, settings={"synchronous_commit": "local"}) as source:
            return emit_marker(source, "test")

    def confirmed(self) -> int:
        """Return the slot's ``confirmed_flush_lsn``."""
        with connected(self.databases.source) as source:
            state = read_slot(source, self.pipeline.source.slot)
        assert state is not None
        return state.confirmed_flush_lsn

    def await_applied(self, command: Command) -> None:
        """Wait until the stream that ``command`` runs has applied all that is committed now."""
        marker = self.marker()
        command.until(lambda: self.record.applied >= marker, "the stream at the marker")

    def await_beat(self, command: Command, part: str) -> None:
        """Wait until the part of a run that ``command`` starts lets its heart beat."""
        file = self.state / "jobs" / f"{part}.json"
        command.until(
            lambda: file.exists() and json.loads(file.read_text())["owner"]["pid"] == command.process.pid,
            f"the heartbeat of {part}",
        )

    # -- parts, in this process --------------------------------------------------------------------

    def provision(self) -> Record:
        """Provision in this process; return the record."""
        commands.provision(self.pipeline)
        return self.record

    def chunk(self, index: int, table: str = "public.t") -> ChunkRecord:
        """Return a chunk of the record."""
        (found,) = (c for c in self.record.chunks if c.chunk.table == table and c.chunk.index == index)
        return found

    def copy(self, *indexes: int, table: str = "public.t") -> None:
        """Copy chunks of a table one after the other, as tasks of the snapshot do; all of them by default."""
        for index in indexes or [c.chunk.index for c in self.record.chunks if c.chunk.table == table]:
            result = copy_chunk_of(self.pipeline, self.chunk(index, table).chunk)
            if isinstance(result, CdcError):
                raise result

    def copy_tables(self, *indexes: int) -> None:
        """Copy the unfinished chunks of all tables, or those of some indexes, with one look at the record."""
        record, dsn = self.record, self.pipeline.source.dsn
        targets = {target.table.label: target for target in record.targets}
        sink, origin = sink_of(self.pipeline), ServerIdentity.of(record.identity)
        with connected(dsn) as source:
            for chunk in record.unfinished:
                if indexes and chunk.index not in indexes:
                    continue
                target = targets[chunk.table]
                read = plan_chunk_read(source, dsn, target.table, chunk, origin)
                result = copy_chunk(ChunkTask(sink, record.epoch, target, chunk, read, self.pipeline.transform))
                if isinstance(result, CdcError):
                    raise result

    def apply(self) -> None:
        """Apply everything that is committed at the source now; see :func:`apply_stream`."""
        apply_stream(self.pipeline, self.marker())
