"""What the demo prints: lines that stay, one line of progress, and the table at the end."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TextIO

from airflow_cdc_provider.demo.client import TaskState
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.table import human_bytes, text_table

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
class Moment:
    """What one look at the pipeline saw.

    :param status: of the pipeline, as ``airflow-cdc status`` has it.
    :param run: state of the Dag run.
    :param transactions: committed by the shop's writers so far.
    """

    status: Mapping[str, Any]
    run: str
    tasks: Sequence[TaskState]
    transactions: int

    @property
    def applied(self) -> int:
        """The position that is durable in the sink, 0 before there is one."""
        return parse_lsn(self.status["applied_lsn"] or "0/0")

    @property
    def restart(self) -> int:
        """The position from which the source keeps its log for the slot, 0 before there is a slot."""
        return parse_lsn(self.status["slot"]["restart_lsn"]) if self.status["slot"] else 0

    @property
    def chunks(self) -> tuple[int, int]:
        """How many chunks are finished, and how many there are."""
        tables = self.status["tables"]
        return sum(table["finished"] for table in tables), sum(table["chunks"] for table in tables)

    @property
    def copied(self) -> bool:
        """Whether the snapshot is finished."""
        finished, chunks = self.chunks
        return 0 < chunks == finished

    @property
    def live(self) -> bool:
        """Whether a stream is at work on a copy that is a state of the source."""
        return bool(self.status["consistent"]) and self.status["state"] == "streaming"

    @property
    def busy(self) -> set[str]:
        """The tasks at work."""
        return {task["task_id"] for task in self.tasks if task["state"] in BUSY_STATES}

    @property
    def activity(self) -> str:
        """The tasks at work in words, those of a mapped one counted."""
        names = [task["task_id"] + BUSY_STATES[task["state"]] for task in self.tasks if task["state"] in BUSY_STATES]
        return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).items())


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

    def print(self, text: str) -> None:
        """Print text as it is, in the place of a line of progress."""
        self._out.write(f"{self._erase}{text}\n")
        self._out.flush()

    def show(self, moment: Moment) -> None:
        """Show progress: always on a terminal, elsewhere when other tasks are at work, and now and then."""
        line = f"{clock(self.seconds)}    {progress_line(moment)}"
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


def clock(seconds: float) -> str:
    """Minutes and seconds, for example ``2:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def progress_line(moment: Moment) -> str:
    """What is at work, how fast it is, how far behind, and what that costs the source."""
    status, parts = moment.status, [moment.activity or f"Dag run {moment.run}"]
    finished, chunks = moment.chunks
    jobs = [job for job in status["jobs"] if "rows_per_second" in job]
    speed = sum(job["rows_per_second"] for job in jobs)
    if chunks and finished < chunks:
        parts.append(f"{finished} of {chunks} chunks")
    if speed:
        parts.append(f"{speed:,} rows/s")
    if status["lag_bytes"] is not None:
        parts.append(f"lag {human_bytes(status['lag_bytes'])}, {status['lag_seconds']:.1f} s")
    if status["slot"]:
        parts.append(f"slot keeps {human_bytes(status['slot']['retained_bytes'])}")
    parts.append(f"{moment.transactions:,} transactions")
    return " · ".join(parts)


@dataclass(frozen=True)
class Course:
    """How the run went.

    :param start: seen when the slot had been made.
    :param live: seen while the stream followed the writers.
    :param end: seen when all was over.
    """

    start: Moment
    live: Sequence[Moment]
    end: Moment


@dataclass(frozen=True)
class Outcome:
    """What the demo came to.

    :param verified: what ``airflow-cdc verify`` returned at the end.
    :param jobs: progress of the Spark jobs by the part they had in the run.
    :param seconds: from the start of the demo to its end.
    """

    course: Course
    verified: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What is not as it should be; none when the demo succeeded."""
        different = [table["table"] for table in self.verified["tables"] if not table["equal"]]
        found = [f"source and target differ in {', '.join(different)}"] if different else []
        if not self.verified["tables"] or self.verified["not_compared"]:
            found.append(f"tables were not compared: {', '.join(self.verified['not_compared']) or 'all'}")
        start, end = self.course.start, self.course.end
        if end.run != "success":
            found.append(f"the Dag run ended as {end.run}")
        if end.restart <= start.restart:
            found.append(f"restart_lsn was {format_lsn(start.restart)} and is {format_lsn(end.restart)}")
        return found


def summary(outcome: Outcome) -> str:
    """The table of the tables, and the numbers of the run."""
    tables = outcome.verified["tables"]
    body = [_row(table["table"], table["source_rows"], table["target_rows"], table["equal"]) for table in tables]
    source, target = (sum(table[side] for table in tables) for side in ("source_rows", "target_rows"))
    body.append(_row("together", source, target, outcome.verified["equal"]))
    facts = [f"{name:<12}{text}" for name, text in _facts(outcome)]
    return "\n".join([text_table(["table", "source rows", "target rows", "equal"], body), "", *facts])


def _row(name: str, source: int, target: int, equal: bool) -> list[str]:
    return [name, f"{source:,}", f"{target:,}", "yes" if equal else "NO"]


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    copies = [job for part, job in outcome.jobs.items() if part.startswith("snapshot") and "rows" in job]
    rows, seconds = sum(job["rows"] for job in copies), max((job["seconds"] for job in copies), default=0.0)
    stream = outcome.jobs.get("stream", {})
    changes, worked = stream.get("changes", 0), stream.get("seconds", 0.0)
    course, end = outcome.course, outcome.course.end
    lag = median(moment.status["lag_seconds"] or 0.0 for moment in course.live)
    kept = human_bytes(end.status["slot"]["retained_bytes"])
    tries = [f"{task['task_id']} needed {task['try_number']} tries" for task in end.tasks if task["try_number"] > 1]
    return [
        ("writers", f"{end.transactions:,} transactions while snapshot and stream were at work"),
        ("snapshot", f"{rows:,} rows in {seconds:.1f} s, {_rate(rows, seconds)} rows/s"),
        ("stream", f"{changes:,} row changes in {worked:.1f} s of work, {_rate(changes, worked)} rows/s"),
        ("live", f"{lag:.1f} s behind the writers (median)"),
        ("applied", format_lsn(end.applied)),
        (
            "slot",
            f"restart_lsn from {format_lsn(course.start.restart)} to {format_lsn(end.restart)}, keeps {kept} of log",
        ),
        ("Dag run", ", ".join([end.run, f"{len(end.tasks)} tasks", *tries])),
        ("total time", f"{clock(outcome.seconds)} minutes"),
    ]


def _rate(count: int, seconds: float) -> str:
    return f"{round(count / seconds):,}" if seconds > 0 else "0"
