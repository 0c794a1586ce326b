"""The sensor of a replication slot, against slots that move, stay, and are lost."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from tests.airflow_support import write_pipeline

# isort: split
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_cdc_provider.sensors.slot import SlotProgressSensor, SlotState
from tests.conftest import Databases

pytestmark = pytest.mark.airflow


def make_slot(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


def move_slot(dsn: str, name: str) -> None:
    """Move both positions of a slot, as a stream that acknowledges does."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(3):
            connection.execute("SELECT pg_log_standby_snapshot()")
            connection.execute("SELECT pg_logical_emit_message(true, 'test', 'x')")
            connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [name])


@pytest.fixture
def slot(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a slot on the server of the connection ``source``."""
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", databases.source)
    name = f"slot_{os.getpid()}"
    make_slot(databases.source, name)
    return name


def state_of(databases: Databases, slot: str) -> SlotState:
    state = SlotState.read(databases.source, slot)
    assert state is not None
    return state


def test_a_slot_has_moved_since_a_position(databases: Databases, slot: str) -> None:
    before = state_of(databases, slot)
    sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot, moved_since=before.restart_lsn)

    assert sensor.poke({}) is False
    move_slot(databases.source, slot)
    assert sensor.poke({}) is True


def test_a_slot_reaches_positions(databases: Databases, slot: str) -> None:
    move_slot(databases.source, slot)
    state = state_of(databases, slot)

    def reached(**lsns: str | None) -> bool:
        sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot)
        vars(sensor).update(lsns)
        return sensor.poke({})

    assert reached(restart_lsn=state.restart_lsn)
    assert reached(restart_lsn=state.restart_lsn, confirmed_flush_lsn=state.confirmed_flush_lsn)
    assert not reached(restart_lsn=state.restart_lsn, confirmed_flush_lsn="FF/0")
    assert not reached(restart_lsn="FF/0")


class Store(dict[str, Any]):
    """A task's state store."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


def test_a_rescheduled_sensor_remembers_its_first_poke(databases: Databases, slot: str) -> None:
    store = Store()

    def poke(attempt: int) -> bool:
        sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot)
        context: Any = {"task_state_store": store, "ti": SimpleNamespace(try_number=attempt)}
        return sensor.poke(context)

    assert not poke(1)
    assert not poke(1)
    move_slot(databases.source, slot)
    assert poke(1)
    assert not poke(2)


def test_a_sensor_that_stays_in_its_process_remembers_too(databases: Databases, slot: str) -> None:
    sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot, mode="poke", poke_interval=0.2, timeout=30)
    mover = threading.Timer(0.5, move_slot, (databases.source, slot))
    mover.start()

    sensor.execute({})

    mover.join()


def test_a_sensor_watches_the_slot_of_a_pipeline(
    databases: Databases, slot: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", databases.target)
    path = write_pipeline(tmp_path, **{"tables: [": f"slot: {slot}, tables: ["})

    assert SlotProgressSensor(task_id="t", pipeline=str(path), moved_since="0/1").poke({})


@pytest.mark.parametrize(("soft_fail", "kind"), [(False, AirflowFailException), (True, AirflowException)])
def test_a_missing_slot_fails_at_once(databases: Databases, slot: str, soft_fail: bool, kind: type[Exception]) -> None:
    sensor = SlotProgressSensor(task_id="t", conn_id="source", slot="gone", soft_fail=soft_fail)

    with pytest.raises(AirflowException, match=r"slot gone does not exist\.\n.*resnapshot") as caught:
        sensor.poke({})

    assert type(caught.value) is kind


def test_a_lost_slot_fails_at_once(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(settings={"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"})
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    make_slot(server.dsn(), "doomed")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for _ in range(4):
            connection.execute("SELECT pg_logical_emit_message(false, 'test', 'x'), pg_switch_wal()")
        connection.execute("CHECKPOINT")

    with pytest.raises(AirflowFailException, match=r"doomed is lost .*wal_status lost"):
        SlotProgressSensor(task_id="t", conn_id="source", slot="doomed").poke({})


@pytest.mark.parametrize("value", ["None", "", "soon"])
def test_a_position_that_is_none_fails_with_its_name(databases: Databases, slot: str, value: str) -> None:
    sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot, moved_since=value)

    with pytest.raises(AirflowFailException, match=r"argument moved_since is not an LSN"):
        sensor.poke({})


@pytest.mark.parametrize("arguments", [{}, {"conn_id": "c"}, {"slot": "s"}, {"pipeline": "p", "conn_id": "c"}])
def test_a_sensor_wants_one_way_to_its_slot(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either pipeline, or conn_id and slot"):
        SlotProgressSensor(task_id="t", **arguments)
