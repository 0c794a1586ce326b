"""The output of the demos: permanent lines, one line of progress, and the table at the end."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.lsn import LogPosition, parse_lsn
from airflow_cdc_provider.engine.core.text_output import text_table
from local_servers.airflow_client import TaskState

QUIET_SECONDS = 10.0

# States of tasks that have work left, and how to display them. All other tasks have not started, or are over.
BUSY_STATES: Mapping[str | None, str] = {
    "scheduled": " (queued)",
    "queued": " (queued)",
    "running": "",
    # The task waits in the triggerer, for example for a Spark job.
    "deferred": "",
    # A sensor waits between two checks.
    "up_for_reschedule": "",
    "up_for_retry": " (waiting for a retry)",
}


@dataclass(frozen=True)
class Moment(ABC):
    """The state of the pipeline that one look saw.

    :param status: status of the pipeline, as ``airflow-cdc status`` returns it.
    :param run: state of the Dag run.
    """

    status: Mapping[str, Any]
    run: str
    tasks: Sequence[TaskState]

    @property
    @abstractmethod
    def line(self) -> str:
        """Return a line with the running tasks and their progress."""

    @property
    def applied(self) -> LogPosition:
        """Return the position that is durable in the sink, or 0 if there is none yet."""
        return parse_lsn(self.status["applied_lsn"] or "0/0")

    @property
    def busy(self) -> set[str]:
        """Return the ids of the tasks that have work left."""
        return {task["task_id"] for task in self.tasks if task["state"] in BUSY_STATES}

    @property
    def activity(self) -> str:
        """Return the tasks that have work left, as text with counts of mapped ones, or else the run's state."""
        names = [task["task_id"] + BUSY_STATES[task["state"]] for task in self.tasks if task["state"] in BUSY_STATES]
        working = ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).items())
        return working or f"Dag run {self.run}"

    @property
    def ending(self) -> str:
        """Return a summary of the run's end."""
        tries = [
            f"{task['task_id']} needed {task['try_number']} tries" for task in self.tasks if task["try_number"] > 1
        ]
        return ", ".join([self.run, f"{len(self.tasks)} tasks", *tries])


class Screen:
    """Prints lines with the time since the start; on a terminal, it rewrites the progress line in place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._started = time.monotonic()
        self._shown: tuple[set[str], float] = (set(), 0.0)

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.print(f"{clock(self.seconds)}  {text}")

    def tell_failure(self, error: CdcError) -> None:
        """Print an error and its remedy."""
        self.say(f"FAILED. {error.message}\n{error.solution}")

    def print(self, text: str) -> None:
        """Print text as it is, in place of the progress line."""
        self._out.write(f"{self._erase}{text}\n")
        self._out.flush()

    def show(self, moment: Moment) -> None:
        """Show progress: always on a terminal, otherwise when the running tasks change, and every few seconds."""
        line = f"{clock(self.seconds)}    {moment.line}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"{self._erase}{line[:width]}")
            self._out.flush()
        elif moment.busy != self._shown[0] or self.seconds - self._shown[1] >= QUIET_SECONDS:
            self._shown = (moment.busy, self.seconds)
            self.print(line)

    @property
    def _erase(self) -> str:
        return "\r\x1b[K" if self._terminal else ""


@dataclass(frozen=True)
class Comparison:
    """Expected and actual numbers of rows.

    :param name: name of what was compared.
    """

    name: str
    expected: int
    found: int
    equal: bool


def comparison_table(columns: tuple[str, str, str], compared: Iterable[Comparison]) -> str:
    """Return a table with a line per comparison.

    :param columns: headings of the name and the two numbers.
    """
    body = [[each.name, f"{each.expected:,}", f"{each.found:,}", "yes" if each.equal else "NO"] for each in compared]
    return text_table([*columns, "equal"], body)


def facts(found: Iterable[tuple[str, str]]) -> str:
    """Return a line per fact, with its name first."""
    return "\n".join(f"{name:<12}{text}" for name, text in found)


def clock(seconds: float) -> str:
    """Return minutes and seconds, for example ``2:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def rate(count: int, seconds: float) -> str:
    """Return a rate per second as text."""
    return f"{round(count / seconds):,}" if seconds > 0 else "0"
