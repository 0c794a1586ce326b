"""Sensors, asset watcher and slot guard in a real Airflow: waiting uses no worker."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.airflow.client import Client
from tests.airflow.server import POLL, SECONDS, AirflowUnderTest
from tests.conftest import Databases
from tests.support.watching import make_slot, move_slot

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

CONNECTION = "watched_pg"
DAGS = """
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Asset, AssetWatcher, BaseNotifier, task

from airflow_cdc_provider.operators.slot_guard import CdcSlotGuardOperator
from airflow_cdc_provider.sensors.slot import SlotHealthySensor, SlotProgressSensor, SlotRetainedWalSensor
from airflow_cdc_provider.triggers.watcher import SlotProgressTrigger

CONN, SLOT = "watched_pg", "watched"
again = {"retries": 2, "retry_delay": timedelta(0)}


class Noted(BaseNotifier):
    template_fields = ("text",)

    def __init__(self, text):
        super().__init__()
        self.text = text

    def notify(self, context):
        with Path(__file__).with_suffix(".noted").open("a") as file:
            print(self.text, file=file)


with DAG("watching", schedule=None, params={"slot": SLOT}, default_args={"conn_id": CONN, "poke_interval": 1}):

    @task
    def begin():
        return {"restart_lsn": "0/1"}

    begin() >> [
        SlotProgressSensor(task_id="templated", slot="{{ params.slot }}", moved_since="0/1"),
        SlotProgressSensor(
            task_id="pulled", slot=SLOT, moved_since="{{ ti.xcom_pull(task_ids='begin')['restart_lsn'] }}"
        ),
        SlotProgressSensor(task_id="moved", slot=SLOT),
        SlotHealthySensor(task_id="healthy", slot=SLOT, on_success_callback=Noted("{{ ti.task_id }}: {{ ti.state }}")),
        SlotHealthySensor(
            task_id="gone", slot="gone", on_failure_callback=Noted("{{ ti.task_id }}: {{ exception }}"), **again
        ),
        SlotRetainedWalSensor(task_id="skipped", slot=SLOT, below=1, timeout=5, soft_fail=True, **again),
        CdcSlotGuardOperator(
            task_id="guard", budget=1, on_findings=Noted("{{ ti.task_id }}: {{ findings }}"), **again
        ),
    ]
    SlotHealthySensor.partial(task_id="mapped").expand(slot=[SLOT, SLOT])

trigger = SlotProgressTrigger(conn_id=CONN, slot=SLOT, interval=1)
with DAG("watched", schedule=[Asset("applied", watchers=[AssetWatcher(name="slot", trigger=trigger)])]):

    @task
    def payload(triggering_asset_events=None):
        ((event, *_),) = triggering_asset_events.values()
        return event.extra["payload"]

    payload()
"""


@pytest.fixture
def slot(client: Client, databases: Databases) -> Iterator[str]:
    """Create a slot, and a connection of Airflow to its server."""
    make_slot(databases.source, "watched")
    body = {"connection_id": CONNECTION, "conn_type": "postgres", **address(databases.source)}
    client.call("POST", "/connections", json=body)
    yield "watched"
    client.call("DELETE", f"/connections/{CONNECTION}")


def address(dsn: str) -> dict[str, object]:
    """Return a DSN as fields of a connection."""
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    return {"host": info["host"], "port": int(str(info["port"])), "login": info["user"], "schema": info["dbname"]}


def test_sensors_wait_without_a_worker(
    airflow: AirflowUnderTest, client: Client, databases: Databases, slot: str
) -> None:
    airflow.add_dag("watching", DAGS)
    client.await_dag("watching")
    client.await_dag("watched")
    run = client.trigger("watching", {})

    airflow.await_state("watching", run, "moved", "deferred")
    for name in ("templated", "pulled"):
        airflow.await_state("watching", run, name, "success")
    for index in (0, 1):
        airflow.await_state("watching", run, "mapped", "success", map_index=index)
    airflow.await_state("watching", run, "gone", "failed")
    airflow.await_state("watching", run, "healthy", "success")
    airflow.await_state("watching", run, "skipped", "skipped")
    airflow.await_state("watching", run, "guard", "failed")
    for name in ("gone", "guard"):
        assert client.task("watching", run, name)["try_number"] == 1
    # Airflow sets the state of a task before its callbacks run.
    noted = airflow.dags / "watching.noted"
    for told in ("guard: [{", f"slot '{slot}' retains ", "gone: replication slot 'gone' does not exist", "healthy: "):
        assert await_condition(lambda told=told: told in noted.read_text(), SECONDS, POLL), noted.read_text()
    reason = client.failures("watching", run)
    assert "replication slot 'gone' does not exist" in reason, reason
    assert "resnapshot --all" in reason
    started = client.task("watching", run, "moved")
    assert started["state"] == "deferred"

    # Before the sensor has recorded the slot's position, a move would go unnoticed.
    seen = f"/dags/watching/dagRuns/{run}/taskInstances/moved/xcomEntries/slot_at_first_look"
    assert await_condition(lambda: client.request("GET", seen).status_code == 200, SECONDS, POLL)
    move_slot(databases.source, slot)

    airflow.await_state("watching", run, "moved", "success")
    for name in ("moved", "templated"):
        ended = client.task("watching", run, name)
        # Running a task on a worker records its process and host.
        assert (ended["pid"], ended["hostname"], ended["try_number"]) == (None, "", 1), ended
    assert client.task("watching", run, "gone")["pid"] is not None

    assert await_condition(lambda: "success" in client.runs("watched").values(), SECONDS, POLL)
    run = next(run for run, state in client.runs("watched").items() if state == "success")
    payload = client.xcom("watched", run, "payload")
    assert payload["slot"] == slot
    assert payload["confirmed_flush_lsn"]


def test_the_slot_guard_from_the_ui(airflow: AirflowUnderTest, client: Client, databases: Databases, slot: str) -> None:
    client.await_dag("cdc_slot_guard")
    client.pause("cdc_slot_guard", False)
    run = client.trigger("cdc_slot_guard", {"conn_id": CONNECTION, "budget": "1 GiB"})
    airflow.succeed("cdc_slot_guard", run)
    client.pause("cdc_slot_guard")

    assert client.xcom("cdc_slot_guard", run, "look")["dropped"] == []
    body = {"logical_date": None, "conf": {"budget": "10GB"}}
    answer = client.request("POST", "/dags/cdc_slot_guard/dagRuns", json=body)
    assert answer.status_code == 400
    assert "'10GB' does not match" in answer.json()["detail"]
