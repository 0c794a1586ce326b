"""The demo of topics: windows of events that a producer writes to Kafka, in MariaDB or in another topic.

When the producer has ended and all that it wrote has been read, the stream is asked
to stop, and every row of the target is compared: by ``verify``, and with what a plain
consumer and plain Python make of the topic.
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
from local_servers.jars import at_hand

MESSAGES_PER_SECOND = 2000
PARTITIONS = 4

NEAR_SECONDS = 10.0  # behind the producer, who follows it
LIVE_SECONDS = 20.0
LONG_AFTER = timedelta(hours=1)

INTRODUCTION = """\
{what}:
a producer writes {rate:,} messages a second in transactions, some of which it aborts, and a Dag in a real Airflow
runs the pipeline as a Spark job. Then every row is compared with what a plain consumer makes of the topic.
It takes two to seven minutes, and all that is started here is stopped at the end.
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

    :param started: ends all of it.
    """
    started.enter_context(at_hand(PACKAGE))
    broker = start_broker(started, directory / "source")
    target = case.start(started, directory / "target", broker)
    make_topics(broker.brokers, {case.topic: PARTITIONS, **({case.unreadable: 1} if case.unreadable else {})})
    screen.say(f"The source is the topic {case.topic} of Kafka on port {broker.port}, the target {target.place}.")
    file = write_pipeline(directory, case.topic, case.text, **case.parts)
    connections = {"demo_kafka": f"kafka://{broker.brokers}", **target.connections}
    airflow = start_airflow(started, directory, file, connections, screen)
    return TopicStage(airflow, file, connections, case, broker.brokers, target)


def begin(started: ExitStack, directory: Path, screen: Screen, case: Case) -> TopicRun:
    """Set the stage, let the producer begin, and trigger the Dag."""
    screen.print(INTRODUCTION.format(what=case.what, rate=MESSAGES_PER_SECOND))
    stage = set_stage(started, directory, screen, case)
    screen.print(f"\n{stage.file}:\n\n{stage.file.read_text(encoding='utf-8')}")
    producer = started.enter_context(EventProducer(stage.brokers, case.topic, case.draw, MESSAGES_PER_SECOND))
    screen.say(f"The producer writes from here on: {MESSAGES_PER_SECOND:,} messages a second.")
    return TopicRun(stage, screen, producer)


@dataclass(frozen=True)
class TopicMoment(Moment):
    """What one look at a pipeline over a topic saw.

    :param messages: that have been written so far.
    """

    messages: int

    @property
    def lag(self) -> int | None:
        """How many messages have not been read; ``None`` where that is not known."""
        behind: int | None = self.status.get("lag_messages")
        return behind

    @property
    def line(self) -> str:
        """What is at work, how much has been applied, and how far behind that is."""
        parts = [self.activity]
        if self.applied:
            parts.append(f"unit {self.applied:,}")
        if self.lag is not None:
            parts.append(f"lag {self.lag:,} messages")
        parts.append(f"{self.messages:,} messages written")
        return " · ".join(parts)

    def has_read(self, topic: str, goal: Mapping[str, int]) -> bool:
        """Whether a topic has been read up to offsets of its partitions."""
        offsets = self.status.get("offsets", {}).get(topic, {})
        return all(offsets.get(partition, 0) >= offset for partition, offset in goal.items())


class TopicRun(DagRun[TopicMoment]):
    """The run that reads a topic.

    :param producer: who is at work.
    """

    def __init__(self, stage: TopicStage, screen: Screen, producer: EventProducer) -> None:
        super().__init__(stage, screen)
        self._case = stage.case
        self._brokers = stage.brokers
        self._target = stage.target
        self._producer = producer

    @property
    def source(self) -> str:
        """See :attr:`.DagRun.source`."""
        return self._brokers

    def moment(self, status: Mapping[str, Any], run: str, tasks: Sequence[TaskState]) -> TopicMoment:
        """See :meth:`.DagRun.moment`."""
        return TopicMoment(status, run, tasks, self._producer.messages)

    def perform(self) -> bool:
        """See :meth:`.DagRun.perform`."""
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
        equal = "every window that the topic's messages make is in the target, and no other."
        return self.conclude(summary(outcome), outcome.problems, equal)

    def _follow(self) -> tuple[list[TopicMoment], TopicMoment]:
        """Follow the run to its end; what was seen while the producer was at work, and then."""
        say = self.screen.say
        self.until("the first unit", lambda moment: moment.applied > 0)
        say("The first unit is applied. The stream brings in what was written before it began.")
        near = NEAR_SECONDS * MESSAGES_PER_SECOND
        self.until("the stream to catch up", lambda moment: moment.lag is not None and moment.lag < near)
        say("The stream is near the topic's ends, and follows the producer.")
        live = self.some_time(LIVE_SECONDS)
        self._producer.stop()
        say(f"The producer has ended: {self._producer.account}.")
        self._catch_up()
        if self._case.once is not None:
            self._close_windows()
        say("The target has all that was written.")
        return live, self.stop()

    def _catch_up(self) -> None:
        goal = ends(self._brokers, self._case.topic)
        self.until("the record to reach the topic's ends", lambda moment: moment.has_read(self._case.topic, goal))

    def _close_windows(self) -> None:
        """Have the last windows told: Spark learns the time from a message, and heeds it from the next one on."""
        assert self._case.once is not None
        for number in range(2):
            at = datetime.now(UTC) + LONG_AFTER + timedelta(seconds=number)
            self._producer.send(self._case.once.marker(at))
            self._catch_up()
        self.screen.say("Messages of an hour later have come: all windows of before are closed.")

    def _unreadable(self, values: Sequence[bytes]) -> Unreadable | None:
        topic = self._case.unreadable
        if topic is None:
            return None
        unreadable = {value for value in values if self._case.read(value) is None}
        return Unreadable(topic, len(unreadable), set(read_committed(self._brokers, topic)) == unreadable)


@dataclass(frozen=True)
class Unreadable:
    """What became of messages that cannot be read.

    :param topic: where they should go.
    :param kept: whether all of them are there, and no others.
    """

    topic: str
    messages: int
    kept: bool


@dataclass(frozen=True)
class Outcome:
    """What the demo came to.

    :param live: seen while the producer was at work.
    :param end: seen when all was over.
    :param written: what the producer has to say of its work.
    :param read: how many messages a plain consumer gets.
    :param expected: what has to become of them.
    :param found: what is in the target.
    :param verified: what ``airflow-cdc verify`` returned at the end.
    :param stream: progress of the stream's Spark job.
    :param seconds: from the start of the demo to its end.
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
        """What is not as it should be; none when the demo succeeded."""
        found = verification_problems(self.verified)
        for rows, what in (
            (self.expected - self.found, "not in the target, as it should be"),
            (self.found - self.expected, "in the target, as it should not be"),
        ):
            if rows:
                key, start, value = min(rows)
                found.append(f"{rows.total()} rows: {key}, {start:%H:%M:%S}, {value} is {what}")
        if not self.expected:
            found.append("the topic's messages make no window")
        if self.unreadable and not self.unreadable.kept:
            found.append(f"{self.unreadable.topic} has others than the messages that cannot be read")
        if self.end.run != "success":
            found.append(f"the Dag run ended as {self.end.run}")
        return found


def summary(outcome: Outcome) -> str:
    """The table of the comparisons, and the numbers of the run."""
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
