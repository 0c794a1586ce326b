"""Runs triggers in the test's process like a triggerer does: several in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cdc_provider.triggers.slots import ExpectationTrigger
from tests.support.patience import SECONDS


class Store(dict[str, Any]):
    """The state of an asset in Airflow."""

    async def aget(self, key: str) -> Any:
        return self.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self[key] = value


def again(trigger: BaseTrigger) -> Any:
    """Return the trigger that a triggerer would restore from its stored form."""
    path, kwargs = trigger.serialize()
    assert path == f"{type(trigger).__module__}.{type(trigger).__name__}"
    return type(trigger)(**kwargs)


def expectation(kind: str, **kwargs: Any) -> ExpectationTrigger:
    """Return a trigger that checks often, restored as in a triggerer."""
    made: ExpectationTrigger = again(ExpectationTrigger(kind=kind, **{"interval": 0.2, "timeout": SECONDS} | kwargs))
    return made


async def first(events: AsyncIterator[TriggerEvent]) -> TriggerEvent:
    """Return the first event."""
    return await asyncio.wait_for(anext(events), SECONDS)


async def outcome(trigger: BaseTrigger) -> Any:
    """Return the payload of the only event of a sensor's trigger."""
    events = [event async for event in trigger.run()]
    assert len(events) == 1
    return events[0].payload


def run(trigger: BaseTrigger) -> Any:
    """Run a sensor's trigger to its end."""
    return asyncio.run(asyncio.wait_for(outcome(trigger), SECONDS))


def make_slot(dsn: str, name: str) -> None:
    """Make a slot like ``provision`` does."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


def move_slot(dsn: str, name: str) -> None:
    """Move both positions of a slot, like a stream that acknowledges."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(3):
            connection.execute("SELECT pg_log_standby_snapshot()")
            connection.execute("SELECT pg_logical_emit_message(true, 'test', 'x')")
            connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [name])


def lose_slot(dsn: str) -> None:
    """Write log until a server with the settings ``LOSING`` has invalidated its slots."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(4):
            connection.execute("SELECT pg_logical_emit_message(false, 'test', 'x'), pg_switch_wal()")
        connection.execute("CHECKPOINT")


LOSING = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
"""Settings of a server that invalidates slots soon."""
