"""The asset watcher's trigger, and the metrics of the poll that it shares with the sensors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from tests.support import airflow_support  # noqa: F401

# isort: split
from airflow.sdk._shared.observability.metrics.statsd_logger import SafeStatsdLogger
from airflow.sdk.observability import stats
from airflow.triggers.base import TriggerEvent

from airflow_cdc_provider.hooks import metrics
from airflow_cdc_provider.triggers.watcher import SlotProgressTrigger
from tests.conftest import Databases
from tests.support.watching import Store, again, expectation, first, make_slot, move_slot, run

pytestmark = pytest.mark.airflow


@pytest.fixture
def slot(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", databases.source)
    name = f"slot_{os.getpid()}"
    make_slot(databases.source, name)
    return name


def test_each_move_is_told_once_also_over_a_restart_of_the_triggerer(databases: Databases, slot: str) -> None:
    store = Store()

    def watcher() -> SlotProgressTrigger:
        made: SlotProgressTrigger = again(SlotProgressTrigger(conn_id="source", slot=slot, interval=0.2))
        made.asset_state_store = store  # type: ignore[assignment]
        return made

    async def move() -> str:
        """Move the slot to its end, in steps that the watcher may see."""
        await asyncio.to_thread(move_slot, databases.source, slot)
        return await asyncio.to_thread(position, databases, slot)

    async def moved(event: TriggerEvent, events: AsyncIterator[TriggerEvent], end: str) -> Any:
        """Return the events about the end of a move, from a given event on."""
        while event.payload["confirmed_flush_lsn"] != end:
            event = await first(events)
        return event.payload

    async def scenario() -> list[Any]:
        events = watcher().run()
        coming = asyncio.create_task(first(events))
        await asyncio.sleep(1)
        assert not coming.done()
        end = await move()
        payloads = [await moved(await coming, events, end)]
        coming = asyncio.create_task(first(events))
        await asyncio.sleep(1)
        assert not coming.done()
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        # Moved while no triggerer runs.
        end = await move()
        events = watcher().run()
        payloads.append(await moved(await first(events), events, end))
        await events.aclose()  # type: ignore[attr-defined]
        return payloads

    before, after = asyncio.run(scenario())

    assert before["slot"] == after["slot"] == slot
    assert set(before) == {"slot", "restart_lsn", "confirmed_flush_lsn", "retained_bytes"}
    assert store["confirmed_flush_lsn"] == before["confirmed_flush_lsn"] != after["confirmed_flush_lsn"]


def position(databases: Databases, slot: str) -> str:
    """Return the slot's position."""
    with psycopg.connect(databases.source) as connection:
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        ((found,),) = connection.execute(query, [slot]).fetchall()
    return str(found)


@pytest.mark.parametrize("arguments", [{}, {"conn_id": "c"}, {"pipeline": "p", "conn_id": "c", "slot": "s"}])
def test_a_watcher_wants_one_way_to_its_slot(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="either pipeline, or conn_id and slot"):
        SlotProgressTrigger(**arguments)


class Statsd:
    """The client library of StatsD that Airflow's environments contain, reduced to what is used here."""

    def __init__(self, address: Any) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def gauge(self, stat: str, value: float, rate: float, delta: bool) -> None:
        self._socket.sendto(f"{stat}:{value}|g".encode(), self._address)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Run a StatsD server that receives Airflow's stats, with tags in Telegraf's format."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(30)
        client: Any = Statsd(server.getsockname())
        metrics._stats()
        logger = SafeStatsdLogger(client, influxdb_tags_enabled=True, statsd_influxdb_enabled=True)
        stats.initialize(factory=lambda: logger, export_legacy_names=True)
        yield server
    metrics._stats.cache_clear()
    metrics._stats()


def received(listener: socket.socket, count: int) -> dict[str, str]:
    """Return the next datagrams: value and kind by name and tags."""
    return dict(listener.recv(1000).decode().rsplit(":", 1) for _ in range(count))


def test_a_poll_tells_airflows_metrics(databases: Databases, slot: str, listener: socket.socket) -> None:
    run(expectation("healthy", conn_id="source", slot=slot))

    server = databases.source.partition("@")[2].partition("/")[0].replace(":", "_")
    sent: dict[str, str] = {}
    while f"cdc.slot.acknowledgement_age.{slot}" not in sent:
        sent |= received(listener, 1)
    for name in ("retained_bytes", "lag_bytes", "acknowledgement_age"):
        assert sent[f"cdc.slot.{name},slot={slot},server={server}"].endswith("|g")
        assert sent[f"cdc.slot.{name}.{slot}"].endswith("|g")
    assert sent[f"cdc.slot.retained_bytes.{slot}"] != "0|g"


def test_a_jobs_progress_as_metrics(listener: socket.socket) -> None:
    progress = {"lag_bytes": 7, "lag_seconds": 0.5, "rows_per_second": 9, "chunks": 4, "finished": 1, "restart": {}}
    stream = {
        "batch_seconds": 2.5,
        "lag_messages": 3,
        "acknowledgement_seconds": None,
        "slot": {"retained_bytes": 8, "active": True},
    }
    metrics.report_pipeline("shop", progress | stream)

    sent = received(listener, 16)

    names = {"lag_bytes": 7, "lag_seconds": 0.5, "rows_per_second": 9, "chunks": 4, "chunks_finished": 1}
    names |= {"batch_seconds": 2.5, "lag_messages": 3, "retained_bytes": 8}
    wanted = {f"cdc.pipeline.{name}": f"{value}|g" for name, value in names.items()}
    tagged = {f"{name},pipeline=shop": value for name, value in wanted.items()}
    assert sent == tagged | {f"{name}.shop": value for name, value in wanted.items()}
