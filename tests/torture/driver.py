"""The pipeline under torture: ``run``, then ``stream``, restarted whenever it ends."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from tests.support.pipelines import Command, Outcome, PipelineUnderTest
from tests.support.threads import Stoppable
from tests.torture.airflow import Airflow, DagRun, part_of

_SECONDS = 0.1
END_SECONDS = 600.0
"""Seconds to wait for the end of a run that was fenced, or that has fenced another and catches up."""
# Errors that may end a job whose processes, servers and connections are cut; all of them are retried.
_RETRYABLE = {
    "ConnectionFailed",
    "StreamFailed",
    "Blocked",
    "OlderTransactions",
    "Failpoint",
    "JobLost",
    "SchemaChanged",
    "SecondWriter",
    "SparkLost",
    "StagingLost",
}
_LEFT_BEHIND = re.compile(r"on timeline \d+.*`airflow-cdc resnapshot --all`", re.DOTALL)
# Errors of a job that has lost a process: none, or that its JVM has ended during its start.
_KILLED = ("exit", "SparkUnusable")


@dataclass
class Job:
    """One start of the pipeline.

    :param name: name of its command.
    :param expected: prefixes of the kinds of errors that are acceptable for it.
    """

    name: str
    command: Command | DagRun
    expected: set[str] = field(default_factory=set)

    @property
    def task(self) -> bool:
        """Return whether tasks of Airflow run it."""
        return isinstance(self.command, DagRun)

    def processes(self, part: str) -> list[psutil.Process]:
        """Return its processes of one kind: of :func:`.airflow.part_of`, and for a task ``task`` and ``supervisor``."""
        return [process for found, process in self.parts() if found == part]

    def parts(self) -> Iterator[tuple[str, psutil.Process]]:
        """Return all its processes with their kinds."""
        if isinstance(self.command, DagRun):
            yield from self.command.parts()
            return
        for process in self.command.processes():
            with contextlib.suppress(psutil.Error):
                driver = process.pid == self.command.process.pid
                yield "driver" if driver else part_of(process.cmdline()), process


class Driver(Stoppable):
    """Keeps the pipeline running.

    :param airflow: runs the pipeline when tasks are to run it.
    :param starting_over: set while the slot may be newer than the sink's record.
    :param say: called at each start and end.
    """

    def __init__(
        self,
        pipeline: PipelineUnderTest,
        airflow: Airflow,
        starting_over: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        super().__init__("driver")
        self._airflow = airflow
        self._pipeline = pipeline
        self._starting_over = starting_over
        self._say = say
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._copied = False
        self._rivals = 0
        self._task_next = False
        self._all_next = False
        self._source_moved = False
        self.failpoint: str | None = None
        self.starts = 0
        self.ends = Counter[str]()
        self.wrong: list[str] = []
        self.last = "no job has ended"
        """The end of the last job that did not succeed, for a pipeline that makes no progress."""

    @property
    def job(self) -> Job | None:
        """Return the current job."""
        return self._job

    def work(self) -> None:
        while not self._halt.wait(_SECONDS):
            with self._lock:
                self._keep_going()

    def processes(self, part: str) -> list[psutil.Process]:
        """Return the processes of the current job, see :meth:`Job.processes`; none if it has ended."""
        job = self._job
        return job.processes(part) if job is not None and job.command.running else []

    # -- actions of the nemesis ----------------------------------------------------------------------

    def expect_kill(self) -> None:
        """Expect errors, because a process of the current job is about to be killed."""
        if self._job is not None:
            self._job.expected.update(_KILLED)

    def expect_stop(self) -> None:
        """Expect the current job to be asked to stop; tasks that follow a stopped snapshot refuse to stream."""
        if self._job is not None and self._job.task:
            self._job.expected.add("GateClosed")

    @contextmanager
    def rival(self) -> Iterator[None]:
        """Let another run work during the block, which may fence a job that has no heartbeat yet."""
        with self._lock:
            self._rivals += 1
            if self._job is not None:
                self._job.expected.add("Fenced")
        try:
            yield
        finally:
            self._rivals -= 1

    def kill(self) -> None:
        """Kill all processes of the current job."""
        with self._lock:
            self.expect_kill()
            if self._job is not None:
                self._job.command.kill()

    def take_over(self) -> None:
        """Let another run take the pipeline over; the current run has to end."""
        with self._lock:
            self._replace("Fenced", takeover=True)

    def start_over(self) -> None:
        """Recreate slot and publication and re-read everything while the current job is running, which has to end."""
        with self._lock:
            self._all_next = True
            self._replace("Fenced", "GateClosed", takeover=True)  # it may miss the slot before it sees the epoch

    def source_moves(self) -> None:
        """Replace the source by a standby; if the pipeline cannot continue, it is started over."""
        self._source_moved = True

    def become_task(self) -> None:
        """Let tasks of Airflow run the pipeline from now on until their Dag run ends."""
        self._airflow.start()
        with self._lock:
            if self._job is not None and not self._job.task:
                self.expect_kill()
                self._job.command.kill()
                self._task_next = True

    def beats(self) -> bool:
        """Return whether the current job has sent a heartbeat."""
        drivers = {process.pid for process in self.processes("driver")}
        return any(beat.owner.pid in drivers for beat in read_heartbeats(State(self._pipeline.pipeline.state)))

    def kill_task(self, part: str) -> bool:
        """Kill an Airflow task, or its supervisor, but not its job, which Airflow's next try finds again.

        :param part: ``task`` or ``supervisor``.
        :returns: whether there was one.
        """
        job = self._job
        if job is None or not isinstance(job.command, DagRun) or not job.command.running:
            return False
        run, tries = job.command, job.command.tries
        self.expect_kill()
        killed = job.processes(part)
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await_condition(lambda: run.tries > tries or not run.running, END_SECONDS, interval=0.5)
        await_condition(lambda: not run.running or _lonely(job), END_SECONDS, interval=0.5)
        if run.running and not _lonely(job):
            self.wrong.append(f"{part} of {run.title} was killed, and two jobs do the same:\n{run.output()}")
        return bool(killed)

    def end(self) -> None:
        """Let the current job end normally, and start no other."""
        self.stop()
        if self._job is None or not self._job.command.running:
            return
        command = self._job.command
        if isinstance(command, DagRun):

            def ended() -> bool:
                """Request the end repeatedly, because an attempt that fails does not pass the request to the next."""
                self._pipeline.start("stop").wait(END_SECONDS)
                return not command.running

            await_condition(ended, END_SECONDS, interval=10)
        else:
            command.terminate()
        command.wait(END_SECONDS)

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
        """Start another job while the current one is running; that one has to end with all its processes."""
        old = self._job
        self._start(takeover)
        if old is None:
            return
        old.expected.update(expected)
        new = self._job
        assert new is not None
        await_condition(lambda: not (old.command.running and new.command.running), END_SECONDS, interval=0.5)
        if old.task and old.command.running:  # Airflow retries, and the other run has failed before that
            self._job = old
            self._ended(new, new.command.outcome())
            return
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
            self._job = Job("Dag run", self._airflow.trigger())
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

    def _ended(self, job: Job, outcome: Outcome) -> None:
        errors = _errors(outcome)
        end = "done" if outcome.code == 0 else errors[-1]["kind"] if errors else f"exit {outcome.code}"
        self.ends[end] += 1
        self._say(f"{job.name} ended: {end}")
        text = f"{job.command.title} ended with {end}:\n{outcome.stdout[-1500:]}\n{outcome.stderr[-3000:]}"
        if end != "done":
            self.last = text
        left_behind = any(map(self._is_left_behind, errors))
        kinds = {end, *(error["kind"] for error in errors if not self._is_left_behind(error))}
        for kind in kinds - _RETRYABLE - {"done"}:
            if not kind.startswith(tuple(job.expected)) and not (kind == "GateClosed" and left_behind):
                self.wrong.append(text)
        if end == "done":
            # A run that was stopped in its snapshot has not streamed.
            self._copied |= job.name != "resnapshot" and '"stream": null' not in outcome.stdout
        if self._job is None and end == "done":  # otherwise another run has started meanwhile
            self._starting_over.clear()
        elif self._job is None and end == "GateClosed":
            self._all_next = True  # the repair that is named, also when one broke off between slot and record

    def _is_left_behind(self, error: Mapping[str, str]) -> bool:
        """Return whether a failover has destroyed what the pipeline needs, and the repair is named."""
        found = _LEFT_BEHIND.search(f"{error['message']} {error['solution']}")
        return self._source_moved and error["kind"] == "GateClosed" and bool(found)


def _errors(outcome: Outcome) -> list[dict[str, str]]:
    """Return the errors that a command, or the tasks of a Dag run, have printed."""
    errors = []
    for line in outcome.stdout.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            errors.append(json.loads(line)["error"])
    return errors


def _lonely(job: Job) -> bool:
    """Return whether no two of its drivers do the same work."""
    lines = []
    for process in job.processes("driver"):
        with contextlib.suppress(psutil.Error):
            lines.append(tuple(process.cmdline()[-2:]))  # until when, or which chunks
    return len(lines) == len(set(lines))
