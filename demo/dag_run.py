"""A run of the Dag ``cdc_pipeline``, watched from its trigger to its end."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from airflow_cdc_provider.engine.state.submission import read_all
from demo.screen import Moment, Screen
from demo.work_directory import DAG, DemoFailed, Stage
from local_servers.airflow_client import FINAL_STATES, TaskState

LOOK_SECONDS = 2.0
STEP_SECONDS = 600.0
LOG_LINES = 60

_STANDARD_ERROR = 2

M = TypeVar("M", bound=Moment)


class DagRun(ABC, Generic[M]):
    """A run of the Dag whose stream runs until it is asked to stop; each kind of demo has a subclass.

    The constructor triggers the run.

    :cvar groups: number of Spark jobs that copy at the same time.
    """

    groups = 2

    def __init__(self, stage: Stage, screen: Screen) -> None:
        self.airflow = stage.airflow
        self.pipeline: Pipeline = stage.pipeline
        self.screen = screen
        conf = {"pipeline": str(stage.file), "until": "forever", "groups": self.groups}
        self._id = self.airflow.client.trigger(DAG, conf)
        screen.say(f"Triggered the Dag {DAG}: prepare, snapshot, stream, verify.")

    @property
    @abstractmethod
    def source(self) -> str:
        """Return the address of the source, for display."""

    @abstractmethod
    def perform(self) -> bool:
        """Follow the run to its end, check the result, and return whether everything is right."""

    @abstractmethod
    def moment(self, status: Mapping[str, Any], run: str, tasks: Sequence[TaskState]) -> M:
        """Return what one look at the pipeline saw, including the facts of this kind of demo."""

    def look(self) -> M:
        """Read the current state of everything, and show it."""
        client = self.airflow.client
        status = commands.status(self.pipeline)
        moment = self.moment(status, client.run_state(DAG, self._id), client.task_states(DAG, self._id))
        self.screen.show(moment)
        return moment

    def until(self, what: str, holds: Callable[[M], bool]) -> list[M]:
        """Look repeatedly until a condition holds, and return all moments seen; the last one fulfills the condition.

        :raises DemoFailed: if the run ends before, or time is up.
        """
        seen: list[M] = []
        reached = False

        def over() -> bool:
            nonlocal reached
            seen.append(self.look())
            reached = holds(seen[-1])
            return reached or seen[-1].run in FINAL_STATES

        in_time = await_condition(over, STEP_SECONDS, LOOK_SECONDS)
        if reached:
            return seen
        why = f"the Dag run ended as {seen[-1].run}" if in_time else f"{STEP_SECONDS:.0f} seconds have passed"
        raise DemoFailed(f"Stopped waiting for {what} because {why}.", self.explain())

    def some_time(self, seconds: float) -> list[M]:
        """Look repeatedly for some seconds, and return all moments seen."""
        end = self.screen.seconds + seconds
        return self.until("some seconds of the live stream", lambda moment: self.screen.seconds >= end)

    def stop(self) -> M:
        """Ask the stream to stop, and wait for the end of the run."""
        # If Airflow is about to restart the stream, this repeats until the stream runs and can be asked.
        self.until(
            "the stream to accept the request to stop", lambda moment: bool(commands.stop(self.pipeline)["asked"])
        )
        self.screen.say("Asked the stream to stop; the run continues with verify.")
        *_, end = self.until("the end of the run", lambda moment: moment.run in FINAL_STATES)
        self.screen.say(f"The Dag run ended as {end.run}. Comparing every row once more.")
        return end

    def verify(self) -> dict[str, Any]:
        """Return the result of ``airflow-cdc verify``; the output of its Spark goes to a file."""
        with _errors_to(self.airflow.home.with_name("verify.log")):
            return commands.verify(self.pipeline)

    def jobs(self) -> dict[str, Mapping[str, Any]]:
        """Return the progress of the run's Spark jobs by their part."""
        state = State(self.pipeline.state)
        # The stream removes the heartbeats of the snapshot when it starts.
        ended = {job.part: job.result for job in read_all(state) if job.result is not None}
        return {**ended, **{beat.part: beat.progress for beat in read_heartbeats(state)}}

    def conclude(self, summary: str, problems: Sequence[str], equal: str) -> bool:
        """Print the result of the run, and return whether it has no problems.

        :param equal: text to print if there are no problems.
        """
        self.screen.print(f"\n{summary}\n")
        for problem in problems:
            self.screen.print(f"FAILED: {problem}.")
        self.screen.print(self.explain() if problems else f"Equal: {equal}")
        return not problems

    def explain(self) -> str:
        """Return the last error of the engine, and the logs of failed tasks."""
        error = commands.status(self.pipeline)["last_error"]
        logs = self.airflow.client.failures(DAG, self._id).splitlines()
        said = [f"{error['message']}. {error['solution']}"] if error else []
        return "\n".join([*said, *logs[-LOG_LINES:]])


@contextmanager
def _errors_to(file: Path) -> Iterator[None]:
    """Redirect standard error of this process, and of those that it starts meanwhile, to a file."""
    before = os.dup(_STANDARD_ERROR)
    with file.open("ab") as log:
        os.dup2(log.fileno(), _STANDARD_ERROR)
    try:
        yield
    finally:
        os.dup2(before, _STANDARD_ERROR)
        os.close(before)


def verification_problems(verified: Mapping[str, Any]) -> list[str]:
    """Return the problems in a result of ``airflow-cdc verify``."""
    different = [table["table"] for table in verified["tables"] if not table["equal"]]
    found = [f"source and target differ in {', '.join(different)}"] if different else []
    if not verified["tables"] or verified["not_compared"]:
        found.append(f"tables were not compared: {', '.join(verified['not_compared']) or 'all'}")
    return found
