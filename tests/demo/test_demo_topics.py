"""The demos of topics: the windows that they expect, and what they consider a failure; a broker where one is needed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from demo.__main__ import TOPICS
from demo.events import (
    ABORTED,
    TRANSACTIONS_PER_SECOND,
    Event,
    EventProducer,
    Message,
    ends,
    make_topics,
    read_committed,
    windows,
    written,
)
from demo.topic_cases import CASES, visit
from demo.topics import Outcome, TopicMoment, Unreadable, summary
from demo.work_directory import write_pipeline
from local_servers.kafka import KafkaServer
from tests.support.demo_run import NEW, task
from tests.support.kafka_server import SECONDS

TEN = datetime(2024, 5, 1, 10, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return TEN + timedelta(seconds=seconds)


def events(*times: float, key: str = "a") -> list[Event]:
    return [Event(key, at(seconds), 1) for seconds in times]


def test_windows_begin_at_multiples_of_their_width_and_leave_their_end_to_the_next() -> None:
    found = windows([*events(0, 1.999, 2), *events(3.999, key="b")], timedelta(seconds=2))

    assert found == Counter([("a", at(0), 2), ("a", at(2), 1), ("b", at(2), 1)])


def test_windows_that_are_not_closed_yet_are_left_out() -> None:
    found = windows(events(0, 20, 40), timedelta(seconds=20), until=at(40))

    assert found == Counter([("a", at(0), 1), ("a", at(20), 1)])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100_000), st.integers(-9, 9))), st.integers(1, 7))
def test_each_event_is_in_one_window_which_holds_its_time(made: list[tuple[str, int, int]], seconds: int) -> None:
    width = timedelta(seconds=seconds)
    given_events = [Event(key, at(milliseconds / 1000), value) for key, milliseconds, value in made]

    found = windows(given_events, width)

    assert sum(total for _, _, total in found.elements()) == sum(event.value for event in given_events)
    for key, start, total in found.elements():
        assert start.timestamp() % seconds == 0
        assert total == sum(e.value for e in given_events if e.key == key and start <= e.at < start + width)


@pytest.mark.parametrize("name", TOPICS)
def test_what_a_case_draws_it_can_read(name: str) -> None:
    case, random = CASES[name], Random(1)
    drawn = [case.draw(random, at(n / 1000)) for n in range(20_000)]
    read = {message: case.read(message.value) for message in drawn}

    assert len(CASES) == len(TOPICS)
    assert {message.key for message, event in read.items() if event} == {event.key for event in read.values() if event}
    assert 0 < sum(event is None for event in read.values()) < len(read) / 5
    assert all(event.at == at(n / 1000) for n, event in enumerate(map(read.get, drawn)) if event)


@pytest.mark.parametrize(
    "value", [b"", b"click 1", b"[]", b"1", b'{"id": "a", "value": 1}', b'{"at": "2024-05-01T10:00:00Z", "value": 1}']
)
def test_messages_without_a_click_are_in_no_window(value: bytes) -> None:
    case = CASES["kafka-to-mysql"]
    click = json.dumps({"id": "a", "at": written(at(3)), "value": 7}).encode()

    assert case.expected([value, click, click]) == Counter([("a", at(2), 14)])


@pytest.mark.parametrize("identifier", ["ax-1", "AX1", " AX-1", "AX-1?", "AXE-1", "AX-", ""])
def test_visits_count_once_their_window_is_closed_by_a_valid_one(identifier: str) -> None:
    case = CASES["kafka-to-kafka"]
    visits = [visit("AX-1", at(19)), visit(identifier, at(19)), visit("AX-1", at(24)), visit(identifier, at(100))]

    assert case.expected([message.value for message in visits]) == Counter()
    assert case.expected([message.value for message in [*visits, visit("BY-2", at(25))]]) == Counter(
        [("AX-1", at(0), 1)]
    )


@pytest.mark.parametrize("name", TOPICS)
def test_the_pipeline_files_can_be_read_and_have_no_address(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = write_pipeline(tmp_path, case.topic, case.text, **case.parts)
    connections = {"AIRFLOW_CONN_DEMO_KAFKA": "kafka://h:9092", "AIRFLOW_CONN_DEMO_MARIADB": "mysql://root@h:1/"}

    source = topic_settings(Pipeline.load(path, connections))

    assert source is not None
    assert (source.topics, source.dead_letters) == ((case.topic,), case.unreadable or "")
    assert case.once is None or case.once.delay == timedelta(seconds=source.watermark[1])
    assert f"{case.width.seconds} seconds" in source.sql
    assert "h:" not in path.read_text()


STREAMING: Mapping[str, Any] = {
    **NEW,
    "state": "streaming",
    "applied_lsn": "0/2A",
    "offsets": {"clicks": {"0": 5, "1": 7}},
    "lag_messages": 4_321,
}


def test_a_line_tells_how_much_is_applied_and_what_is_not_yet() -> None:
    moment = TopicMoment(STREAMING, "running", [task("stream", "deferred")], 98_765)

    assert TopicMoment(NEW, "queued", [], 0).line == "Dag run queued · 0 messages written"
    assert moment.line == "stream · unit 42 · lag 4,321 messages · 98,765 messages written"


@pytest.mark.parametrize(
    ("goal", "reached"), [({}, True), ({"0": 5, "1": 7}, True), ({"0": 4}, True), ({"1": 8}, False), ({"2": 1}, False)]
)
def test_a_moment_knows_what_has_been_read(goal: Mapping[str, int], reached: bool) -> None:
    moment = TopicMoment(STREAMING, "running", [], 0)

    assert moment.has_read("clicks", goal) is reached


VERIFIED: Mapping[str, Any] = {
    "equal": True,
    "tables": [{"table": "clicks.sums", "source_rows": 2, "target_rows": 2, "equal": True}],
    "not_compared": [],
}

ROWS = Counter([("a", at(0), 3), ("b", at(2), 4)])

OUTCOME = Outcome(
    live=[TopicMoment({**STREAMING, "lag_messages": lag}, "running", [], 0) for lag in (None, 9_000, 3_000, 2_000)],
    end=TopicMoment(STREAMING, "success", [task("stream", "success")], 100),
    written="100 messages in 9 transactions, of which 1 were aborted",
    read=90,
    expected=ROWS,
    found=ROWS,
    unreadable=Unreadable("clicks-unreadable", 12, kept=True),
    verified=VERIFIED,
    stream={"changes": 900, "seconds": 3.0},
    seconds=125.0,
)


def test_the_summary_shows_both_comparisons() -> None:
    lines = summary(OUTCOME).splitlines()

    assert OUTCOME.problems == []
    assert [line.split()[-3:] for line in lines if line.startswith(("a plain consumer", "airflow-cdc verify"))] == [
        ["2", "2", "yes"],
        ["2", "2", "yes"],
    ]
    assert "producer    100 messages in 9 transactions, of which 1 were aborted" in lines
    assert "unreadable  12 messages, kept in clicks-unreadable" in lines
    assert "stream      90 messages into 900 rows, 30 messages/s of work" in lines
    assert "live        3,000 messages behind the producer (median)" in lines


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"found": ROWS - Counter([("a", at(0), 3)])}, "1 rows: a, 10:00:00, 3 is missing in the target"),
        ({"found": ROWS + Counter([("b", at(2), 4)])}, "1 rows: b, 10:00:02, 4 is in the target but not expected"),
        ({"expected": Counter(), "found": Counter()}, "no window"),
        ({"unreadable": Unreadable("dead", 12, kept=False)}, "dead does not contain exactly"),
        ({"verified": {**VERIFIED, "tables": [{"table": "clicks.sums", "equal": False}]}}, "differ in clicks.sums"),
        ({"verified": {**VERIFIED, "tables": []}}, "not compared: all"),
        ({"end": replace(OUTCOME.end, run="failed")}, "ended as failed"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], problem: str) -> None:
    (found,) = replace(OUTCOME, **change).problems

    assert problem in found


@pytest.mark.slow
def test_what_the_producer_has_aborted_is_not_read(kafka: KafkaServer) -> None:
    make_topics(kafka.brokers, {"demo-events": 3})
    numbers = count()
    with EventProducer(kafka.brokers, "demo-events", lambda *_: Message(None, b"%d" % next(numbers)), 40) as producer:
        assert await_condition(lambda: producer.aborted > 0 and producer.transactions > ABORTED, SECONDS)
    producer.send(Message(None, b"last"))

    size = 40 // TRANSACTIONS_PER_SECOND
    left = {b"%d" % n for n in range(next(numbers)) if n // size % ABORTED != ABORTED - 1}
    assert Counter(read_committed(kafka.brokers, "demo-events")) == Counter(left | {b"last"})
    assert sum(ends(kafka.brokers, "demo-events").values()) > producer.messages
