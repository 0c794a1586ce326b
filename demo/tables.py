"""The demo of tables: copies a shop from a Postgres server to another store while its customers continue to buy.

The demo reads a million rows while writers change them, and compares every row at the end. It succeeds only if both
sides are equal, the run succeeded, and the slot released the source's log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.postgres import slots
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from demo import shop, shop_writers
from demo.dag_run import DagRun, verification_problems
from demo.screen import Comparison, Moment, Screen, clock, comparison_table, facts, rate
from demo.warehouse import POSTGRES, TITLES, WAREHOUSES, Warehouse, start_server
from demo.work_directory import Stage, start_airflow, write_pipeline
from local_servers.airflow_client import TaskState

TRANSACTIONS_PER_SECOND = 300.0

LIVE_SECONDS = 20.0

INTRODUCTION = """\
This demo copies a shop of a million rows from Postgres to {sink} while its customers continue to buy:
a Dag in a real Airflow takes a snapshot without locks and follows the write-ahead log, both as Spark jobs.
Then it compares every row. This takes two to seven minutes, and everything started here is stopped at the end.
"""

PIPELINE = """\
pipeline: shop
source:
  conn_id: shop_source
  tables: ["shop.*"]
sink:
{sink}state: {state}
snapshot: {{chunk_rows: 50000}}
stream: {{trigger: 1 second, heartbeat: 5 seconds}}
"""


@dataclass(frozen=True)
class ShopStage(Stage):
    """A stage with the shop.

    :param source: address of the shop's database.
    :param warehouse: the empty store to copy it to.
    """

    source: str
    warehouse: Warehouse


def set_stage(
    started: ExitStack, directory: Path, screen: Screen, sink: str = "postgres", scale: float = 1.0, views: str = ""
) -> ShopStage:
    """Start servers and Airflow, and fill the shop.

    :param started: stops everything when it is closed.
    :param sink: kind of the warehouse, one of :data:`.WAREHOUSES`.
    :param scale: size of the shop, 1 for a million rows.
    :param views: further lines of the pipeline file's ``sink`` section.
    """
    server = start_server(started, directory / "source", "shop")
    source, warehouse = server.dsn("shop"), WAREHOUSES[sink](started, directory / "target")
    screen.say(f"The source is Postgres {POSTGRES} on port {server.port}, the target {warehouse.place}.")
    file = write_pipeline(directory, "shop", PIPELINE, sink=warehouse.section + views)
    connections = {"shop_source": source, **warehouse.connections}
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load, source, screen.say, scale)
        airflow = start_airflow(started, directory, file, connections, screen)
        loading.result()
    return ShopStage(airflow, file, connections, source, warehouse)


def _load(dsn: str, say: Callable[[str], None], scale: float) -> None:
    with psycopg.connect(dsn, client_encoding="UTF8") as connection:
        shop.create_schema(connection)
    say(f"Loaded the shop: {shop.load(dsn, scale):,} rows in {len(shop.TABLES)} tables.")


def begin(started: ExitStack, directory: Path, screen: Screen, sink: str) -> ShopRun:
    """Set the stage, start the writers, and trigger the Dag."""
    screen.print(INTRODUCTION.format(sink=TITLES[sink]))
    stage = set_stage(started, directory, screen, sink)
    screen.print(f"\n{stage.file}:\n\n{stage.file.read_text(encoding='utf-8')}")
    writers = started.enter_context(shop_writers.Writers(stage.source, TRANSACTIONS_PER_SECOND))
    screen.say(f"Customers are now buying: {TRANSACTIONS_PER_SECOND:.0f} transactions per second.")
    return ShopRun(stage, screen, writers)


@dataclass(frozen=True)
class ShopMoment(Moment):
    """The state of the shop's pipeline that one look saw.

    :param transactions: transactions that the shop's writers have committed so far.
    """

    transactions: int

    @property
    def restart(self) -> Lsn:
        """Return the position from which the source keeps its log for the slot, or 0 if there is no slot yet."""
        return parse_lsn(self.status["slot"]["restart_lsn"]) if self.status["slot"] else LOG_START

    @property
    def chunks(self) -> tuple[int, int]:
        """Return the number of finished chunks and of all chunks."""
        tables = self.status["tables"]
        return sum(table["finished"] for table in tables), sum(table["chunks"] for table in tables)

    @property
    def copied(self) -> bool:
        """Return whether the snapshot is finished."""
        finished, chunks = self.chunks
        return 0 < chunks == finished

    @property
    def live(self) -> bool:
        """Return whether a stream is running and the copy is consistent."""
        return bool(self.status["consistent"]) and self.status["state"] == "streaming"

    @property
    def line(self) -> str:
        """Return a line with the running tasks, their speed, the lag, and the log that the slot keeps."""
        status, parts = self.status, [self.activity]
        finished, chunks = self.chunks
        if chunks and finished < chunks:
            parts.append(f"{finished} of {chunks} chunks")
        speed = sum(job.get("rows_per_second", 0) for job in status["jobs"])
        if speed:
            parts.append(f"{speed:,} rows/s")
        if status["lag_bytes"] is not None:
            parts.append(f"lag {human_bytes(status['lag_bytes'])}, {status['lag_seconds']:.1f} s")
        if status["slot"]:
            parts.append(f"slot keeps {human_bytes(status['slot']['retained_bytes'])}")
        parts.append(f"{self.transactions:,} transactions")
        return " · ".join(parts)


@dataclass(frozen=True)
class Course:
    """The course of the run.

    :param start: the moment when the slot existed.
    :param live: moments while the stream followed the writers.
    :param end: the moment when everything was over.
    """

    start: ShopMoment
    live: Sequence[ShopMoment]
    end: ShopMoment


class ShopRun(DagRun[ShopMoment]):
    """The run that copies the shop.

    :param writers: the running writers.
    """

    def __init__(self, stage: ShopStage, screen: Screen, writers: shop_writers.Writers) -> None:
        super().__init__(stage, screen)
        self._writers = writers

    @property
    def source(self) -> str:
        return postgres_settings(self.pipeline).dsn

    def moment(self, status: Mapping[str, Any], run: str, tasks: Sequence[TaskState]) -> ShopMoment:
        return ShopMoment(status, run, tasks, self._writers.transactions)

    def perform(self) -> bool:
        outcome = self.outcome()
        equal = "every row of the source is in the target, and no other row."
        return self.conclude(summary(outcome), outcome.problems, equal)

    def outcome(self) -> Outcome:
        """Follow the run to its end, and compare source and target."""
        course = self._follow()
        verified = self.verify()
        return Outcome(replace(course, end=self.look()), verified, self.jobs(), self.screen.seconds)

    def live(self) -> list[ShopMoment]:
        """Follow the live stream for some time."""
        return self.some_time(LIVE_SECONDS)

    def _follow(self) -> Course:
        say = self.screen.say
        *_, start = self.until("the slot", lambda moment: moment.applied > 0 and moment.restart > 0)
        say(f"The slot exists, and its restart_lsn is {format_lsn(start.restart)}. Spark copies chunks.")
        *_, copied = self.until("the snapshot", lambda moment: moment.copied)
        say(f"The snapshot is finished: {copied.chunks[1]} chunks. The stream applies the changes made meanwhile.")
        self.until("a consistent copy", lambda moment: moment.live)
        say("The copy is consistent: from now on it always equals a recent state of the source.")
        live = self.live()
        self._writers.stop()
        with connected(postgres_settings(self.pipeline).dsn) as source:
            marker = slots.emit_marker(source, "demo")
        say(f"The writers have stopped; all their changes precede {format_lsn(marker)} in the log.")
        self.until(f"the copy to reach {format_lsn(marker)}", lambda moment: moment.applied >= marker)
        say("The copy has caught up.")
        *_, moved = self.until("restart_lsn to move", lambda moment: moment.restart > start.restart)
        say(
            f"The slot's restart_lsn has moved to {format_lsn(moved.restart)}:"
            " the source may remove its log up to that position."
        )
        return Course(start, live, self.stop())


@dataclass(frozen=True)
class Outcome:
    """The result of the demo.

    :param verified: result of ``airflow-cdc verify`` at the end.
    :param jobs: progress of the Spark jobs by their part.
    :param seconds: duration of the demo.
    """

    course: Course
    verified: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Return what is wrong; nothing if the demo succeeded."""
        found = verification_problems(self.verified)
        start, end = self.course.start, self.course.end
        if end.run != "success":
            found.append(f"the Dag run ended as {end.run}")
        if end.restart <= start.restart:
            found.append(f"restart_lsn was {format_lsn(start.restart)} and is {format_lsn(end.restart)}")
        return found


def summary(outcome: Outcome) -> str:
    """Return the table of compared tables, and the figures of the run."""
    tables = outcome.verified["tables"]
    compared = [Comparison(each["table"], each["source_rows"], each["target_rows"], each["equal"]) for each in tables]
    source, target = sum(each.expected for each in compared), sum(each.found for each in compared)
    compared.append(Comparison("together", source, target, outcome.verified["equal"]))
    return f"{comparison_table(('table', 'source rows', 'target rows'), compared)}\n\n{facts(_facts(outcome))}"


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    copies = [job for part, job in outcome.jobs.items() if part.startswith("snapshot") and "rows" in job]
    rows, seconds = sum(job["rows"] for job in copies), max((job["seconds"] for job in copies), default=0.0)
    stream = outcome.jobs.get("stream", {})
    changes, worked = stream.get("changes", 0), stream.get("seconds", 0.0)
    course, end = outcome.course, outcome.course.end
    lag = median(moment.status["lag_seconds"] or 0.0 for moment in course.live)
    kept = human_bytes(end.status["slot"]["retained_bytes"])
    return [
        ("writers", f"{end.transactions:,} transactions during snapshot and stream"),
        ("snapshot", f"{rows:,} rows in {seconds:.1f} s, {rate(rows, seconds)} rows/s"),
        ("stream", f"{changes:,} row changes in {worked:.1f} s of work, {rate(changes, worked)} rows/s"),
        ("live", f"{lag:.1f} s behind the writers (median)"),
        ("applied", format_lsn(end.applied)),
        (
            "slot",
            f"restart_lsn from {format_lsn(course.start.restart)} to {format_lsn(end.restart)}, keeps {kept} of log",
        ),
        ("Dag run", end.ending),
        ("total time", f"{clock(outcome.seconds)} minutes"),
    ]
