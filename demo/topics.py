"""The demo of topics: builds windows of events that a producer writes to Kafka, in MariaDB or in another topic.

When the producer has ended and the stream has read all its messages, the demo asks the stream to stop. It then compares
every row of the target twice: with ``verify``, and with the result of a plain consumer and plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from airflow_cdc_provider.engine.sources.kafka.settings import PACKAGE
from demo.dag_run import DagRun, verification_problems
from demo.events import EventProducer, Rows, ends, make_topics, read_committed
from demo.screen import Comparison, Moment, Screen, clock, comparison_table, facts, rate
from demo.topic_cases import Case, Target
from demo.warehouse import start_broker
from demo.work_directory import Stage, start_airflow, write_pipeline
from local_servers.airflow_client import TaskState
from local_servers.jars import package_available

MESSAGES_PER_SECOND = 2000
PARTITIONS = 4

NEAR_SECONDS = 10.0  # behind the producer
LIVE_SECONDS = 20.0
LONG_AFTER = timedelta(hours=1)

INTRODUCTION = """\
{what}:
a producer writes {rate:,} messages per second in transactions, some of which it aborts, and a Dag in a real Airflow
runs the pipeline as a Spark job. Then it compares every row with the result of a plain consumer.
This takes two to seven minutes, and everything started here is stopped at the end.
"""


@dataclass(frozen=True)
class TopicStage(Stage):
    """A stage with a broker, an empty topic and the target.

    :param brokers: address of the broker.
    """

    case: Case
    brokers: str
    target: Target


def set_stage(started: ExitStack, directory: Path, screen: Screen, case: Case) -> TopicStage:
    """Start servers and Airflow.

    :param started: stops everything when it is closed.
    """
    started.enter_context(package_available(PACKAGE))
    broker = start_broker(started, directory / "source")
    target = case.start(started, directory / "target", broker)
    make_topics(broker.brokers, {case.topic: PARTITIONS, **({case.unreadable: 1} if case.unreadable else {})})
    screen.say(f"The source is the Kafka topic {case.topic} on port {broker.port}, the target is {target.place}.")
    file = write_pipeline(directory, case.topic, case.text, **case.parts)
    connections = {"demo_kafka": f"kafka://{broker.brokers}", **target.connections}
    airflow = start_airflow(started, directory, file, connections, screen)
    return TopicStage(airflow, file, connections, case, broker.brokers, target)


def begin(started: ExitStack, directory: Path, screen: Screen, case: Case) -> TopicRun:
    """Set the stage, start the producer, and trigger the Dag."""
    screen.print(INTRODUCTION.format(what=case.what, rate=MESSAGES_PER_SECOND))
    stage = set_stage(started, directory, screen, case)
    screen.print(f"\n{stage.file}:\n\n{stage.file.read_text(encoding='utf-8')}")
    producer = started.enter_context(EventProducer(stage.brokers, case.topic, case.draw, MESSAGES_PER_SECOND))
    screen.say(f"The producer writes from here on: {MESSAGES_PER_SECOND:,} messages a second.")
    return TopicRun(stage, screen, producer)


@dataclass(frozen=True)
class TopicMoment(Moment):
    """The state of a pipeline over a topic that one look saw.

    :param messages: messages written so far.
    """

    messages: int

    @property
    def lag(self) -> int | None:
        """Return the number of unread messages, or ``None`` if it is unknown."""
        behind: int | None = self.status.get("lag_messages")
        return behind

    @property
    def line(self) -> str:
        """Return a line with the running tasks, the applied unit, and the lag."""
        parts = [self.activity]
        if self.applied:
            parts.append(f"unit {self.applied:,}")
        if self.lag is not None:
            parts.append(f"lag {self.lag:,} messages")
        parts.append(f"{self.messages:,} messages written")
        return " · ".join(parts)

    def has_read(self, topic: str, goal: Mapping[str, int]) -> bool:
        """Return whether a topic has been read up to the given offsets of its partitions."""
        offsets = self.status.get("offsets", {}).get(topic, {})
        return all(offsets.get(partition, 0) >= offset for partition, offset in goal.items())


class TopicRun(DagRun[TopicMoment]):
    """The run that reads a topic.

    :param producer: the running producer.
    """

    def __init__(self, stage: TopicStage, screen: Screen, producer: EventProducer) -> None:
        super().__init__(stage, screen)
        self._case = stage.case
        self._brokers = stage.brokers
        self._target = stage.target
        self._producer = producer

    @property
    def source(self) -> str:
        return self._brokers

    def moment(self, status: Mapping[str, Any], run: str, tasks: Sequence[TaskState]) -> TopicMoment:
        return TopicMoment(status, run, tasks, self._producer.messages)

    def perform(self) -> bool:
        live, end = self._follow()
        values = list(read_committed(self._brokers, self._case.topic))
        outcome = Outcome(
            live=live,
            end=end,
            written=self._producer.account,
            read=len(values),
            expected=self._case.expected(values),
            found=self._target.rows(),
            unreadable=self._unreadable(values),
            verified=self.verify(),
            stream=self.jobs().get("stream", {}),
            seconds=self.screen.seconds,
        )
        equal = "every window of the topic's messages is in the target, and no other window."
        return self.conclude(summary(outcome), outcome.problems, equal)

    def _follow(self) -> tuple[list[TopicMoment], TopicMoment]:
        """Follow the run to its end; return the moments while the producer was writing, and the last moment."""
        say = self.screen.say
        self.until("the first unit", lambda moment: moment.applied > 0)
        say("The first unit is applied. The stream reads the messages written before it started.")
        near = NEAR_SECONDS * MESSAGES_PER_SECOND
        self.until("the stream to catch up", lambda moment: moment.lag is not None and moment.lag < near)
        say("The stream has almost caught up, and follows the producer.")
        live = self.some_time(LIVE_SECONDS)
        self._producer.stop()
        say(f"The producer has ended: {self._producer.account}.")
        self._catch_up()
        if self._case.once is not None:
            self._close_windows()
        say("The target has everything that was written.")
        return live, self.stop()

    def _catch_up(self) -> None:
        goal = ends(self._brokers, self._case.topic)
        self.until(
            "the commit record to reach the end of the topic", lambda moment: moment.has_read(self._case.topic, goal)
        )

    def _close_windows(self) -> None:
        """Send messages that close the last windows; Spark applies the time of one message from the next one on."""
        assert self._case.once is not None
        for number in range(2):
            at = datetime.now(UTC) + LONG_AFTER + timedelta(seconds=number)
            self._producer.send(self._case.once.marker(at))
            self._catch_up()
        self.screen.say("Messages of an hour later have arrived: all earlier windows are closed.")

    def _unreadable(self, values: Sequence[bytes]) -> Unreadable | None:
        topic = self._case.unreadable
        if topic is None:
            return None
        unreadable = {value for value in values if self._case.read(value) is None}
        return Unreadable(topic, len(unreadable), set(read_committed(self._brokers, topic)) == unreadable)


@dataclass(frozen=True)
class Unreadable:
    """The fate of messages that cannot be read.

    :param topic: topic that should contain them.
    :param kept: whether it contains exactly these messages.
    """

    topic: str
    messages: int
    kept: bool


@dataclass(frozen=True)
class Outcome:
    """The result of the demo.

    :param live: moments while the producer was writing.
    :param end: the moment when everything was over.
    :param written: the producer's summary of its work.
    :param read: number of messages that a plain consumer reads.
    :param expected: rows that the messages should yield.
    :param found: rows in the target.
    :param verified: result of ``airflow-cdc verify`` at the end.
    :param stream: progress of the stream's Spark job.
    :param seconds: duration of the demo.
    """

    live: Sequence[TopicMoment]
    end: TopicMoment
    written: str
    read: int
    expected: Rows
    found: Rows
    unreadable: Unreadable | None
    verified: Mapping[str, Any]
    stream: Mapping[str, Any]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Return what is wrong; nothing if the demo succeeded."""
        found = verification_problems(self.verified)
        for rows, what in (
            (self.expected - self.found, "missing in the target"),
            (self.found - self.expected, "in the target but not expected"),
        ):
            if rows:
                key, start, value = min(rows)
                found.append(f"{rows.total()} rows: {key}, {start:%H:%M:%S}, {value} is {what}")
        if not self.expected:
            found.append("the topic's messages yield no window")
        if self.unreadable and not self.unreadable.kept:
            found.append(f"{self.unreadable.topic} does not contain exactly the unreadable messages")
        if self.end.run != "success":
            found.append(f"the Dag run ended as {self.end.run}")
        return found


def summary(outcome: Outcome) -> str:
    """Return the table of the comparisons, and the figures of the run."""
    expected, found = outcome.expected, outcome.found
    compared = [Comparison("a plain consumer", expected.total(), found.total(), expected == found)]
    for table in outcome.verified["tables"]:
        compared.append(Comparison("airflow-cdc verify", table["source_rows"], table["target_rows"], table["equal"]))
    columns = ("compared by", "expected rows", "found rows")
    return f"{comparison_table(columns, compared)}\n\n{facts(_facts(outcome))}"


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    rows, worked = outcome.stream.get("changes", 0), outcome.stream.get("seconds", 0.0)
    lags = [moment.lag for moment in outcome.live if moment.lag is not None]
    told = [("producer", outcome.written)]
    if outcome.unreadable:
        told.append(("unreadable", f"{outcome.unreadable.messages:,} messages, kept in {outcome.unreadable.topic}"))
    return [
        *told,
        ("stream", f"{outcome.read:,} messages into {rows:,} rows, {rate(outcome.read, worked)} messages/s of work"),
        ("live", f"{median(lags or [0]):,.0f} messages behind the producer (median)"),
        ("applied", f"unit {outcome.end.applied:,}"),
        ("Dag run", outcome.end.ending),
        ("total time", f"{clock(outcome.seconds)} minutes"),
    ]
