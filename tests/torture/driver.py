"""The pipeline under torture: ``run``, then ``stream``, started again whenever it ends."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from airflow_cdc_provider.demo.servers import await_condition
from airflow_cdc_provider.engine.state import State, read_heartbeats
from tests.airflow_support import ROOT, connection_json, migrate_database
from tests.pipelines import Command, Outcome, PipelineUnderTest
from tests.threads import Stoppable

_DAGS = Path(__file__).parent / "dags"
_SECONDS = 0.1
END_SECONDS = 600.0
"""How long the end of a run is waited for, that another has fenced, or that has fenced the other and catches up."""
# What may end a job whose processes, servers and connections are cut; all are tried again.
_RETRYABLE = {
    "ConnectionFailed",
    "StreamFailed",
    "Blocked",
    "OlderTransactions",
    "Failpoint",
    "SchemaChanged",
    "SecondWriter",
    "SparkLost",
    "StagingLost",
}
# What a job says that was robbed of a process: nothing, or that its JVM has gone before it was up.
_KILLED = ("exit", "SparkUnusable")


@dataclass
class Job:
    """A start of the pipeline.

    :param name: of its command.
    :param task: whether a task of Airflow runs it.
    :param expected: beginnings of the kinds of errors that are nothing wrong for it.
    """

    name: str
    command: Command
    task: bool = False
    expected: set[str] = field(default_factory=set)

    def processes(self, part: str) -> list[psutil.Process]:
        """Its processes of one kind: ``task``, ``guard``, ``driver``, ``jvm``, ``worker``, ``reader``."""
        return [process for process in self.command.processes() if self._part(process) == part]

    def _part(self, process: psutil.Process) -> str:
        try:
            line = process.cmdline()
        except psutil.Error:
            return ""
        if process.pid == self.command.process.pid:
            return "task" if self.task else "driver"
        if "pyspark.daemon" in line:
            return "worker"
        if "java" in line[0]:
            return "jvm"
        if self.task and line[1:2] == ["-c"] and line[0] == "/bin/sh":
            return "guard"
        if self.task and any(argument.endswith("engine/job.py") for argument in line[1:2]):
            return "driver"
        return "reader" if any("streaming" in argument for argument in line) else ""


class Driver(Stoppable):
    """Keeps the pipeline going.

    :param starting_over: set while the slot may be newer than the sink's record.
    :param say: told of each start and end.
    """

    def __init__(self, pipeline: PipelineUnderTest, starting_over: threading.Event, say: Callable[[str], None]) -> None:
        super().__init__("driver")
        self._pipeline = pipeline
        self._starting_over = starting_over
        self._say = say
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._copied = False
        self._rivals = 0
        self._task_next = False
        self._all_next = False
        self.failpoint: str | None = None
        self.starts = 0
        self.ends = Counter[str]()
        self.wrong: list[str] = []
        self.last = "no job has ended"
        """How the last job ended that did not end well, for a pipeline that does not get on."""

    @property
    def job(self) -> Job | None:
        """What runs at the moment."""
        return self._job

    def work(self) -> None:
        while not self._halt.wait(_SECONDS):
            with self._lock:
                self._keep_going()

    def processes(self, part: str) -> list[psutil.Process]:
        """Processes of the job at hand, see :meth:`Job.processes`; none if it has ended."""
        job = self._job
        return job.processes(part) if job is not None and job.command.running else []

    # -- what the nemesis may do ---------------------------------------------------------------------

    def expect_kill(self) -> None:
        """The job at hand is about to be robbed of a process."""
        if self._job is not None:
            self._job.expected.update(_KILLED)

    def expect_stop(self) -> None:
        """The job at hand is about to be asked to stop; tasks that follow a stopped snapshot refuse to stream."""
        if self._job is not None and self._job.task:
            self._job.expected.add("GateClosed")

    @contextmanager
    def rival(self) -> Iterator[None]:
        """Another run is at work in the block, and may fence a job that has no heartbeat yet."""
        with self._lock:
            self._rivals += 1
            if self._job is not None:
                self._job.expected.add("Fenced")
        try:
            yield
        finally:
            self._rivals -= 1

    def kill(self) -> None:
        """Kill all processes of the job at hand."""
        with self._lock:
            self.expect_kill()
            if self._job is not None:
                self._job.command.kill()

    def take_over(self) -> None:
        """Let another run take the pipeline over; the one at hand has to end."""
        with self._lock:
            self._replace("Fenced", takeover=True)

    def start_over(self) -> None:
        """Make slot and publication anew and read everything again, beside the job at hand, which has to end."""
        with self._lock:
            self._all_next = True
            self._replace("Fenced", "GateClosed", takeover=True)  # it may miss the slot before it sees the epoch

    def become_task(self) -> None:
        """Let a task of Airflow run the pipeline from now on until it ends."""
        migrate_database()
        with self._lock:
            if self._job is not None and not self._job.task:
                self.expect_kill()
                self._job.command.kill()
                self._task_next = True

    def beats(self) -> bool:
        """Whether the job at hand has let its heart beat."""
        drivers = {process.pid for process in self.processes("driver")}
        return any(beat.owner.pid in drivers for beat in read_heartbeats(State(self._pipeline.pipeline.state)))

    def kill_task(self, guarded: bool) -> None:
        """Kill the Airflow task at hand, but not its job: another run takes over at once, and the job has to end.

        :param guarded: spare the guard, which ends the job; otherwise the job goes on until it is fenced.
        """
        with self._lock:
            if self._job is None or not self._job.task or not self._job.command.running:
                return
            self.expect_kill()
            guards = [] if guarded else self._job.processes("guard")
            for process in (*guards, *self._job.processes("task")):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._replace(takeover=not guarded)

    # -- starts and ends ---------------------------------------------------------------------------

    def _keep_going(self) -> None:
        if self._job is not None:
            if self._job.command.running:
                return
            job, self._job = self._job, None
            job.command.kill()  # workers that outlive their driver
            self._ended(job, job.command.outcome())
        self._start()

    def _replace(self, *expected: str, takeover: bool) -> None:
        """Start another job beside the one at hand, which has to end by itself, and all its processes with it."""
        old = self._job
        self._start(takeover)
        if old is None:
            return
        old.expected.update(expected)
        outcome = old.command.wait(END_SECONDS)
        if not await_condition(lambda: not old.command.processes(), END_SECONDS):
            self.wrong.append(f"{old.name} has ended, but not {old.command.processes()}:\n{old.command.output()}")
            old.command.kill()
        self._ended(old, outcome)

    def _start(self, takeover: bool = False) -> None:
        self.starts += 1
        failpoint, self.failpoint = self.failpoint, None
        options = ["--takeover"] * takeover
        if self._all_next:
            self._starting_over.set()
            self._copied = self._all_next = False
            self._job = Job("resnapshot", self._pipeline.start("resnapshot", "--all", "--json", *options))
        elif self._task_next:
            self._task_next = False
            self._job = Job("task", self._start_task(takeover, failpoint), task=True)
        else:
            name = "stream" if self._copied else "run"
            self._job = Job(name, self._pipeline.start(name, "--json", *options, failpoint=failpoint))
        if self._starting_over.is_set():
            self._job.expected.add("GateClosed")
        if self._rivals:
            self._job.expected.add("Fenced")
        if failpoint is not None and ":kill" in failpoint:
            self._job.expected.update(_KILLED)
        self._say(f"starts {self._job.name}" + (f" with {failpoint}" if failpoint else ""))

    def _start_task(self, takeover: bool, failpoint: str | None) -> Command:
        variables = {
            "AIRFLOW__CORE__DAGS_FOLDER": str(_DAGS),
            "AIRFLOW_CONN_SPARK_DEFAULT": connection_json(conn_type="spark", host="local[2]"),
            "PYTHONPATH": str(ROOT),
            "TORTURED_PIPELINE": str(self._pipeline.file),
            **({"TORTURED_TAKEOVER": "1"} if takeover else {}),
        }
        program = [sys.executable, str(_DAGS / "pipeline.py")]
        return self._pipeline.start_program("task of Airflow", program, failpoint, variables)

    def _ended(self, job: Job, outcome: Outcome) -> None:
        kind = self._kind(outcome)
        self.ends[kind] += 1
        self._say(f"{job.name} ended: {kind}")
        text = f"{job.command.title} ended with {kind}:\n{outcome.stdout[-1500:]}\n{outcome.stderr[-3000:]}"
        if kind != "done":
            self.last = text
        if kind == "done":
            # A run that was stopped in its snapshot has not streamed.
            self._copied |= job.name != "resnapshot" and '"stream": null' not in outcome.stdout
        elif kind not in _RETRYABLE and not kind.startswith(tuple(job.expected)):
            self.wrong.append(text)
        if self._job is None and kind == "done":  # else another has begun meanwhile
            self._starting_over.clear()
        elif self._job is None and kind == "GateClosed":
            self._all_next = True  # it has broken off between the new slot and its record

    @staticmethod
    def _kind(outcome: Outcome) -> str:
        """The error's class, ``done``, or the exit code of a command that could say nothing."""
        if outcome.code == 0:
            return "done"
        try:
            return str(json.loads(outcome.stdout.splitlines()[-1])["error"]["kind"])
        except (ValueError, KeyError, TypeError, IndexError):
            return f"exit {outcome.code}"
