"""What the demos print: lines that stay, one line of progress, and the table at the end."""

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

# What a task is in while it has work before it, and what to call that; the others have not begun or are over.
BUSY_STATES: Mapping[str | None, str] = {
    "scheduled": " (queued)",
    "queued": " (queued)",
    "running": "",
    # It waits in the triggerer, for a Spark job for one.
    "deferred": "",
    # A sensor waits between two looks.
    "up_for_reschedule": "",
    "up_for_retry": " (to be tried again)",
}


@dataclass(frozen=True)
class Moment(ABC):
    """What one look at the pipeline saw.

    :param status: of the pipeline, as ``airflow-cdc status`` has it.
    :param run: state of the Dag run.
    """

    status: Mapping[str, Any]
    run: str
    tasks: Sequence[TaskState]

    @property
    @abstractmethod
    def line(self) -> str:
        """What is at work, and how far it is."""

    @property
    def applied(self) -> LogPosition:
        """The position that is durable in the sink, 0 before there is one."""
        return parse_lsn(self.status["applied_lsn"] or "0/0")

    @property
    def busy(self) -> set[str]:
        """The tasks at work."""
        return {task["task_id"] for task in self.tasks if task["state"] in BUSY_STATES}

    @property
    def activity(self) -> str:
        """The tasks at work in words, those of a mapped one counted; the run's state when there are none."""
        names = [task["task_id"] + BUSY_STATES[task["state"]] for task in self.tasks if task["state"] in BUSY_STATES]
        working = ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).items())
        return working or f"Dag run {self.run}"

    @property
    def ending(self) -> str:
        """How the run went, in words."""
        tries = [
            f"{task['task_id']} needed {task['try_number']} tries" for task in self.tasks if task["try_number"] > 1
        ]
        return ", ".join([self.run, f"{len(self.tasks)} tasks", *tries])


class Screen:
    """Prints with the time since the start; progress is rewritten in place where a terminal can do that."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._started = time.monotonic()
        self._shown: tuple[set[str], float] = (set(), 0.0)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.print(f"{clock(self.seconds)}  {text}")

    def tell_failure(self, error: CdcError) -> None:
        """Print what went wrong and what to do about it."""
        self.say(f"FAILED. {error.message}\n{error.solution}")

    def print(self, text: str) -> None:
        """Print text as it is, in the place of a line of progress."""
        self._out.write(f"{self._erase}{text}\n")
        self._out.flush()

    def show(self, moment: Moment) -> None:
        """Show progress: always on a terminal, elsewhere when other tasks are at work, and now and then."""
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
    """How many rows there should be, and how many there are.

    :param name: of what was compared.
    """

    name: str
    expected: int
    found: int
    equal: bool


def comparison_table(columns: tuple[str, str, str], compared: Iterable[Comparison]) -> str:
    """A line for each comparison.

    :param columns: what names and the two numbers are.
    """
    body = [[each.name, f"{each.expected:,}", f"{each.found:,}", "yes" if each.equal else "NO"] for each in compared]
    return text_table([*columns, "equal"], body)


def facts(found: Iterable[tuple[str, str]]) -> str:
    """Lines of what was found out, by name."""
    return "\n".join(f"{name:<12}{text}" for name, text in found)


def clock(seconds: float) -> str:
    """Minutes and seconds, for example ``2:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def rate(count: int, seconds: float) -> str:
    """So many a second."""
    return f"{round(count / seconds):,}" if seconds > 0 else "0"
