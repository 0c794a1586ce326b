"""The pipeline under torture: ``run``, then ``stream``, started again whenever it ends."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable

import psutil

from tests.pipelines import Command, Outcome, PipelineUnderTest
from tests.threads import Stoppable

_SECONDS = 0.1
# What may end a job whose processes, servers and connections are cut; all are tried again.
_RETRYABLE = {
    "ConnectionFailed",
    "StreamFailed",
    "Blocked",
    "OlderTransactions",
    "Failpoint",
    "SecondWriter",
    "SparkLost",
    "StagingLost",
}
# What a job says that was robbed of a process: nothing, or that its JVM has gone before it was up.
_KILLED = ("exit", "SparkUnusable")


class Driver(Stoppable):
    """Keeps the pipeline going.

    :param say: told of each start and end.
    """

    def __init__(self, pipeline: PipelineUnderTest, say: Callable[[str], None]) -> None:
        super().__init__("driver")
        self._pipeline = pipeline
        self._say = say
        self._lock = threading.Lock()
        self._command: Command | None = None
        self._copied = False
        self._killed = False
        self._rival = False
        self.failpoint: str | None = None
        self.starts = 0
        self.ends = Counter[str]()
        self.wrong: list[str] = []

    @property
    def command(self) -> Command | None:
        """What runs at the moment."""
        return self._command

    def work(self) -> None:
        while not self._halt.wait(_SECONDS):
            with self._lock:
                self._keep_going()

    def expect_kill(self) -> None:
        """The command at hand is about to be killed, or robbed of a process."""
        self._killed = True

    def take_over(self) -> None:
        """Let another run take the pipeline over; the one at hand has to end, and the other is the command then."""
        with self._lock:
            old, self._rival = self._command, True
            self._command = self._pipeline.start("run", "--json", "--takeover")
            if old is not None:
                outcome = old.wait()
                old.kill()
                self._ended(old, outcome)

    def expect_rival(self) -> None:
        """Another run begins beside the command at hand, and may fence it while it has no heartbeat yet."""
        self._rival = True

    def kill(self) -> None:
        """Kill all its processes."""
        with self._lock:
            self._killed = True
            if self._command is not None:
                self._command.kill()

    def _keep_going(self) -> None:
        if self._command is not None:
            if self._command.running:
                return
            command, self._command = self._command, None
            command.kill()  # workers that outlive their driver
            self._ended(command, command.outcome())
        self.starts += 1
        self._rival = False
        name = "stream" if self._copied else "run"
        failpoint, self.failpoint = self.failpoint, None
        self._command = self._pipeline.start(name, "--json", failpoint=failpoint)
        self._say(f"starts {name}" + (f" with {failpoint}" if failpoint else ""))

    def _ended(self, command: Command, outcome: Outcome) -> None:
        killed, self._killed = self._killed, False
        rival, self._rival = self._rival, False
        kind = self._kind(outcome)
        self.ends[kind] += 1
        self._say(f"{command.title.split()[0]} ended: {kind}")
        if kind == "done":
            # A run that was stopped in its snapshot has not streamed.
            self._copied |= '"stream": null' not in outcome.stdout
        elif kind not in _RETRYABLE and not (kind == "Fenced" and rival) and not (killed and kind.startswith(_KILLED)):
            self.wrong.append(f"{command.title} ended with {kind}:\n{outcome.stdout[-1500:]}\n{outcome.stderr[-3000:]}")

    @staticmethod
    def _kind(outcome: Outcome) -> str:
        """The error's class, ``done``, or the exit code of a command that could say nothing."""
        if outcome.code == 0:
            return "done"
        try:
            return str(json.loads(outcome.stdout)["error"]["kind"])
        except (ValueError, KeyError, TypeError):
            return f"exit {outcome.code}"

    # -- its processes -----------------------------------------------------------------------------

    def processes(self, part: str) -> list[psutil.Process]:
        """The command's processes of one kind: ``driver``, ``jvm``, ``worker``, ``reader``."""
        command, found = self._command, []
        if command is None or not command.running:
            return []
        for process in command.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            kind = "other"
            if process.pid == command.process.pid:
                kind = "driver"
            elif "pyspark.daemon" in line:
                kind = "worker"
            elif "java" in line.split(" ")[0]:
                kind = "jvm"
            elif "streaming" in line:
                kind = "reader"
            if kind == part:
                found.append(process)
        return found
