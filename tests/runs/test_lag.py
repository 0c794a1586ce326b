"""The lag and the speed that a job reports: changes left to apply count, not the time that it has been idle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import SlotState, emit_marker
from airflow_cdc_provider.engine.runs import lag as lag_module
from airflow_cdc_provider.engine.runs.lag import Lag
from airflow_cdc_provider.engine.runs.rate import Rate
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import InlineStaging, report_idle
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from airflow_cdc_provider.engine.spark.local_sockets import socket_directory
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.patience import SECONDS
from tests.support.slot_reading import slot_reader


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the whole engine."""
    return Clock(monkeypatch)


def look(lag: Lag, end: int) -> None:
    """Read the slot of a server whose log ends at ``end``."""
    lag.observe_slot(SlotState("pgoutput", "d", True, 1, 0, 0, "reserved", end))


def behind(lag: Lag) -> tuple[int, float]:
    found = lag.as_dict()
    return found["lag_bytes"], found["lag_seconds"]


def test_an_idle_stream_is_not_behind(clock: Clock) -> None:
    """This holds however long ago it has advanced: others write into the log all the time."""
    lag = Lag(100, clock.now - 3600)
    for passed in (100, 250, 300):
        look(lag, passed + 50)
        lag.idle(passed)
        assert behind(lag) == (50, 0.0)
        clock.now += 10
        lag.idle(passed + 50)
        assert behind(lag) == (0, 0.0)
    assert lag.as_dict()["applied_lsn"] == "0/64"


def test_a_stream_is_behind_while_it_has_something_to_apply(clock: Clock) -> None:
    """Its lag counts from the first check that saw them, however often it advances on the way."""
    lag = Lag(100, clock.now - 30)
    look(lag, 500)
    assert behind(lag) == (400, 30.0)
    for applied in (200, 300):
        clock.now += 10
        lag.advance(applied)
        look(lag, 600)
    assert behind(lag) == (300, 50.0)
    lag.advance(500)
    assert behind(lag) == (100, 10.0)
    lag.advance(600)
    assert behind(lag) == (0, 0.0)


def test_a_reader_that_gets_nothing_is_behind_in_the_end(clock: Clock) -> None:
    """It has nothing to apply, because the server is still decoding a large transaction."""
    lag = Lag(100, clock.now)
    look(lag, 500)
    lag.idle(100)
    assert behind(lag) == (400, 0.0)
    clock.now += 10
    lag.idle(100)
    look(lag, 900)
    assert behind(lag) == (800, 10.0)


def test_a_lag_of_days_takes_little_memory(clock: Clock) -> None:
    lag = Lag(100, clock.now)
    for n in range(5000):
        clock.now += 10
        look(lag, 200 + n)
    assert behind(lag)[1] == 50_000
    assert len(lag._waiting) <= lag_module._LOOKS


def test_a_rate_is_of_the_last_seconds(clock: Clock) -> None:
    rate = Rate()
    clock.now += 2
    assert rate.of(1000) == 500
    clock.now += 2
    assert rate.of(1000) == 250
    for _ in range(6):
        clock.now += 2
        last = rate.of(1000)
    assert last == 0
    clock.now += 2
    assert rate.of(1200) == 20


def marker(dsn: str) -> int:
    """Write a marker into the log of a server, and return its end."""
    with connected(dsn, settings={"synchronous_commit": "local"}) as source:
        return emit_marker(source, "test")


def test_the_reader_says_that_it_has_nothing_to_apply(databases: Databases) -> None:
    with slot_reader(databases.source, "INSERT INTO t VALUES (1)") as (reader, start):
        assert await_condition(lambda: reader.passed(Position(start)) is None, SECONDS)
        end = reader.reach(marker(databases.source))
        assert reader.passed(end) is not None
        execute(databases.source, "INSERT INTO t VALUES (2)")
        assert await_condition(lambda: reader.passed(end) is None, SECONDS)


def test_the_driver_hears_it(tmp_path: Path) -> None:
    heard: list[int] = []
    with socket_directory() as directory:
        with InlineStaging().serving(directory, heard.append):
            report_idle(directory, 0x2_00000007)
        assert heard == [0x2_00000007]
        report_idle(directory, 8)  # without a listener
    assert heard == [0x2_00000007]
