"""The pipelines over topics that the demo shows: their files, the messages they read, and the stores they write to."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

from demo.events import Draw, Event, Message, Rows, parsed, read_committed, windows, written
from demo.warehouse import start_mariadb
from local_servers.kafka import KafkaServer

CLICKS = """\
pipeline: clicks
source:
  type: kafka
  conn_id: demo_kafka
  topics: [clicks]
  columns: id STRING NOT NULL, at TIMESTAMP NOT NULL, value BIGINT NOT NULL
  bad_records: {{dead_letter: clicks-unreadable}}
  watermark: {{column: at, delay: 10 seconds}}
  sql: >-
    SELECT id, window.start AS start, sum(value) AS total
    FROM messages GROUP BY id, window(at, '2 seconds')
  table: clicks.sums
  key: [id, start]
sink:
  type: mysql
  conn_id: demo_mariadb
  mode: mirror
state: {state}
stream: {{trigger: 1 second, heartbeat: 2 seconds}}
"""

VISITS = """\
pipeline: visits
source:
  type: kafka
  conn_id: demo_kafka
  topics: [visits]
  columns: identifier STRING, at TIMESTAMP NOT NULL
  watermark: {{column: at, delay: 5 seconds}}
  sql: >-
    SELECT identifier, window.start AS start, count(*) AS visits
    FROM messages WHERE identifier RLIKE '{valid}'
    GROUP BY identifier, window(at, '20 seconds')
  table: visits.windows
  key: [identifier, start]
sink:
  type: kafka
  conn_id: demo_kafka
  topic: visits.{{table}}
  format: json
  partitions: 2
state: {state}
stream: {{trigger: 1 second, heartbeat: 2 seconds}}
"""

VALID = "^[A-Z][A-Z]-[0-9]+$"

_BLUNDERS: Sequence[Callable[[str], str]] = (
    str.lower,
    lambda name: f" {name}",
    lambda name: name.replace("-", ""),
    lambda name: f"{name}?",
    lambda name: "",
)


@dataclass(frozen=True)
class Target:
    """The store that a pipeline writes to.

    :param place: kind and address of the store, for display.
    :param rows: reads all of its rows.
    :param connections: Airflow's connections to it, as URIs by id.
    """

    place: str
    rows: Callable[[], Rows]
    connections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Once:
    """The emission of each window once, when it can no longer change.

    :param delay: how late a message may be; windows close after it.
    :param marker: makes a message with a given time, which closes all earlier windows.
    """

    delay: timedelta
    marker: Callable[[datetime], Message]


@dataclass(frozen=True)
class Case:
    """A pipeline over a topic.

    :param what: description of its purpose, as a sentence.
    :param text: text of its file.
    :param draw: draws the topic's messages.
    :param read: parses a message; returns ``None`` for messages that belong to no window.
    :param width: width of a window.
    :param start: starts the target, given a running broker.
    :param parts: fields of the text that other code also uses.
    :param once: how windows are emitted once; ``None`` if they are emitted whenever they change.
    :param unreadable: topic for unreadable messages, if there is one.
    """

    topic: str
    what: str
    text: str
    draw: Draw
    read: Callable[[bytes], Event | None]
    width: timedelta
    start: Callable[[ExitStack, Path, KafkaServer], Target]
    parts: Mapping[str, str] = field(default_factory=dict)
    once: Once | None = None
    unreadable: str | None = None

    def expected(self, values: Sequence[bytes]) -> Rows:
        """Return the rows that the messages should yield."""
        events = [event for event in map(self.read, values) if event is not None]
        until = max(event.at for event in events) - self.once.delay if self.once and events else None
        return windows(events, self.width, until)


def draw_click(random: Random, at: datetime) -> Message:
    """Draw a user's click, or now and then a message that is not a click."""
    user = f"user-{random.randrange(200)}"
    if random.random() < 0.001:
        timeless = {"id": user, "value": random.getrandbits(60)}
        return Message(None, random.choice([json.dumps(timeless), f"click {random.getrandbits(60)}"]).encode())
    click = {"id": user, "at": written(at), "value": random.randrange(1, 100)}
    return Message(user, json.dumps(click).encode())


def read_click(value: bytes) -> Event | None:
    """Return the click in a message, or ``None`` if it is not one."""
    found = parsed(value)
    if found.keys() != {"id", "at", "value"}:
        return None
    return Event(found["id"], datetime.fromisoformat(found["at"]), found["value"])


def draw_visit(random: Random, at: datetime) -> Message:
    """Draw a visit with an identifier, which may be invalid."""
    name = f"{random.choice(['AX', 'BY', 'CZ'])}-{random.randrange(100)}"
    if random.random() < 0.1:
        name = random.choice(_BLUNDERS)(name)
    return visit(name, at)


def visit(identifier: str, at: datetime) -> Message:
    """Return the message of a visit."""
    return Message(identifier, json.dumps({"identifier": identifier, "at": written(at)}).encode())


def read_visit(value: bytes) -> Event | None:
    """Return the visit in a message, or ``None`` if its identifier is invalid."""
    found = parsed(value)
    if not re.search(VALID, found["identifier"]):
        return None
    return Event(found["identifier"], datetime.fromisoformat(found["at"]), 1)


def _mariadb(started: ExitStack, directory: Path, broker: KafkaServer) -> Target:
    server = start_mariadb(started, directory)

    def rows() -> Rows:
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id, start, total FROM clicks.sums")
            return Counter((key, start.replace(tzinfo=UTC), int(total)) for key, start, total in cursor.fetchall())

    return Target(f"MariaDB on port {server.port}", rows, {"demo_mariadb": server.dsn})


def _topic(started: ExitStack, directory: Path, broker: KafkaServer) -> Target:
    topic = "visits.windows"

    def rows() -> Rows:
        found = map(parsed, read_committed(broker.brokers, topic))
        return Counter((row["identifier"], datetime.fromisoformat(row["start"]), row["visits"]) for row in found)

    return Target(f"its topic {topic}", rows)


CASES: Mapping[str, Case] = {
    "kafka-to-mysql": Case(
        topic="clicks",
        what="This demo sums up clicks from a Kafka topic in windows of 2 seconds, and mirrors them in a MariaDB table",
        text=CLICKS,
        draw=draw_click,
        read=read_click,
        width=timedelta(seconds=2),
        start=_mariadb,
        unreadable="clicks-unreadable",
    ),
    "kafka-to-kafka": Case(
        topic="visits",
        what="This demo counts visits with valid identifiers in windows of 20 seconds, from one Kafka topic to another",
        text=VISITS,
        draw=draw_visit,
        read=read_visit,
        width=timedelta(seconds=20),
        start=_topic,
        parts={"valid": VALID},
        once=Once(timedelta(seconds=5), lambda at: visit("ZZ-0", at)),
    ),
}
"""The cases by their names on the command line."""
