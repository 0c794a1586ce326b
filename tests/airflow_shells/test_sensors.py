"""The sensors and their trigger, in this process, with slots that move, stay, and are lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from tests.support.airflow_support import write_pipeline

# isort: split
from airflow.sdk import DAG, Asset
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException, TaskDeferred

from airflow_cdc_provider.engine.commands.wait_conditions import Seen, create_condition
from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import Slots, SlotState, read_slots
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.sensors.base import CdcSensor
from airflow_cdc_provider.sensors.pipeline import CdcLagSensor, SnapshotFinishedSensor
from airflow_cdc_provider.sensors.slot import SlotHealthySensor, SlotProgressSensor, SlotRetainedWalSensor
from airflow_cdc_provider.triggers.poll import Poll
from airflow_cdc_provider.triggers.slots import ExpectationTrigger
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.support.patience import SECONDS
from tests.support.watching import LOSING, expectation, lose_slot, make_slot, move_slot, outcome, run

pytestmark = pytest.mark.airflow

SUCCESS = "success"


def seen(
    applied: int = 90,
    unfinished: int = 0,
    record: bool = True,
    pipeline: int | None = None,
    start: int = 50,
    **state: Any,
) -> Seen:
    """Return a slot at restart_lsn 50 and confirmed_flush_lsn 80 of a log that ends at 100."""
    slot = dataclasses.replace(SlotState("pgoutput", "shop", True, 1, 50, 80, "reserved", 50), **state)
    chunks: Any = [SimpleNamespace(watermark=None, chunk=i) for i in range(unfinished)]
    chunks += [SimpleNamespace(watermark=SimpleNamespace(high=85), chunk=9)]
    file: Any = SimpleNamespace(stream=SimpleNamespace(max_retained_wal=pipeline)) if pipeline else None
    return Seen(
        slot="s",
        pipeline=file,
        slots=Slots(100, {"s": slot}),
        record=Record(1, applied, 995.0, {}, (), tuple(chunks)) if record else None,
        start=start,
        now=1000.0,
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "situation", "reached", "words"),
    [
        ("progress", {}, {"start": 50}, False, "awaited: restart_lsn beyond 0/32"),
        ("progress", {}, {"start": 49}, True, "restart_lsn 0/32, confirmed_flush_lsn 0/50"),
        ("progress", {"moved_since": "0/31"}, {}, True, ""),
        ("progress", {"restart_lsn": "0/32"}, {}, True, ""),
        ("progress", {"restart_lsn": "0/33"}, {}, False, "awaited: restart_lsn 0/33"),
        ("progress", {"moved_since": "0/31", "confirmed_flush_lsn": "0/51"}, {}, False, "confirmed_flush_lsn 0/51"),
        ("retained", {"below": 50}, {}, False, "retains 50 B of log; the budget is 50 B"),
        ("retained", {"below": "1KiB"}, {}, True, ""),
        ("retained", {"below": None}, {"pipeline": 49}, False, "the budget is 49 B"),
        ("lag", {"below_bytes": "10"}, {}, False, "10 B and 5.0 s behind; awaited: less than 10 B"),
        ("lag", {"below_bytes": "11", "below_seconds": "5"}, {}, False, "less than 11 B and 5 s"),
        ("lag", {"below_bytes": "11", "below_seconds": "5.1"}, {}, True, ""),
        ("lag", {"below_seconds": "1"}, {"applied": 100}, True, "0 B and 0.0 s behind"),
        ("lag", {"below_seconds": "1"}, {"record": False}, False, "has not been provisioned"),
        ("healthy", {}, {}, True, ""),
        ("healthy", {}, {"wal_status": "unreserved"}, False, "exceeds max_slot_wal_keep_size"),
        ("finished", {"consistent": False}, {"unfinished": 2}, False, "1 of 3 chunks"),
        ("finished", {"consistent": "False"}, {"applied": 84}, True, ""),
        ("finished", {"consistent": "True"}, {"applied": 84}, False, "applied up to 0/54 of 0/55"),
        ("finished", {"consistent": "True"}, {"applied": 85}, True, ""),
        ("finished", {"consistent": True}, {"record": False}, False, "has not been provisioned"),
    ],
)
def test_judgements(kind: str, arguments: dict[str, Any], situation: dict[str, Any], reached: bool, words: str) -> None:
    evaluation = create_condition(kind, arguments).evaluate(seen(**situation))

    assert evaluation.reached == reached, evaluation
    assert words in evaluation.sentence


@pytest.mark.parametrize("kind", ["progress", "retained", "lag", "healthy"])
def test_nothing_is_expected_of_a_lost_slot(kind: str) -> None:
    expected = create_condition(kind, {"below": "1B"} if kind == "retained" else {})
    with pytest.raises(GateClosed, match=r"has lost the log it needs .*wal_removed") as lost:
        expected.evaluate(seen(wal_status="lost", invalidation="wal_removed"))
    with pytest.raises(GateClosed, match="'t' does not exist") as missing:
        expected.evaluate(dataclasses.replace(seen(), slot="t"))
    assert "resnapshot --all" in lost.value.solution
    assert "resnapshot --all" in missing.value.solution


def test_a_lag_may_be_awaited_before_there_is_a_slot() -> None:
    condition = create_condition("lag", {"below_bytes": "1"})
    evaluation = condition.evaluate(dataclasses.replace(seen(record=False), slot="t"))
    assert not evaluation.reached
    assert "has not been provisioned" in evaluation.sentence


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("progress", {"moved_since": "None"}),
        ("progress", {"restart_lsn": ""}),
        ("retained", {"below": "10GB"}),
        ("lag", {"below_seconds": "soon"}),
        ("finished", {"consistent": "perhaps"}),
    ],
)
def test_an_argument_that_is_wrong_is_named(kind: str, arguments: dict[str, str]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError, match=f"argument {name} is {value!r}"):
        create_condition(kind, arguments)


@pytest.fixture
def slot(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a slot on the server of the connection ``source``."""
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", databases.source)
    name = f"slot_{os.getpid()}"
    make_slot(databases.source, name)
    return name


def state_of(databases: Databases, slot: str) -> SlotState:
    with connected(databases.source) as connection:
        return read_slots(connection).states[slot]


def test_a_trigger_waits_until_a_slot_has_moved(databases: Databases, slot: str) -> None:
    async def scenario() -> Any:
        waiting = asyncio.create_task(outcome(expectation("progress", conn_id="source", slot=slot)))
        await asyncio.sleep(1)
        assert not waiting.done()
        await asyncio.to_thread(move_slot, databases.source, slot)
        return await asyncio.wait_for(waiting, SECONDS)

    before = format_lsn(state_of(databases, slot).restart_lsn)
    assert asyncio.run(scenario()) == SUCCESS
    assert run(expectation("progress", conn_id="source", slot=slot, moved_since=before)) == SUCCESS


def test_a_trigger_ends_in_time_and_says_why(slot: str) -> None:
    trigger = expectation("retained", conn_id="source", slot=slot, below="1B", timeout=600)
    trigger.timeout_after = datetime.now(UTC) + timedelta(seconds=61)  # Airflow's own deadline, from before a restart

    event = run(trigger)

    assert event["timed_out"]
    assert "retains" in event["message"]
    assert "after 600 seconds" in event["message"]
    assert "airflow-cdc status" in event["solution"]


def test_a_lost_slot_ends_the_wait_at_once(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(settings=LOSING)
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    make_slot(server.dsn(), "doomed")
    lose_slot(server.dsn())

    event = run(expectation("progress", conn_id="source", slot="doomed"))

    assert not event["timed_out"]
    assert "'doomed' has lost the log" in event["message"]
    assert "max_slot_wal_keep_size" in event["solution"]
    assert "'gone' does not exist" in run(expectation("healthy", conn_id="source", slot="gone"))["message"]


def queries(server: PostgresServer) -> int:
    """Return how often a server was asked for its slots, according to its log."""
    return server.log_file.read_text().count("SELECT log.lsn::text")


def test_all_triggers_of_a_server_share_one_poll(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(settings={"log_statement": "all"})
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", server.dsn("template1"))
    names = [f"s{i}" for i in range(8)]
    for name in names:
        make_slot(server.dsn(), name)

    async def watch(count: int) -> list[Any]:
        triggers = [
            expectation("progress", conn_id=("source", "other")[i % 2], slot=name, interval=0.5 + i, timeout=4.2)
            for i, name in enumerate(names[:count])
        ]
        return await asyncio.gather(*map(outcome, triggers))

    asked = []
    for count in (1, 8):
        before = queries(server)
        events = asyncio.run(watch(count))
        asked.append(queries(server) - before)
        assert [event["timed_out"] for event in events] == [True] * count
    # A sensor with an interval of half a second asks nine times in 4.2 seconds; eight sensors ask no more often.
    assert 1 < asked[0] <= 9
    assert 1 < asked[1] <= 9
    assert not Poll._running
    with psycopg.connect(server.dsn()) as connection:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'airflow-cdc triggerer'"
        assert await_condition(lambda: connection.execute(sessions).fetchone() == (0,), SECONDS)


@pytest.mark.parametrize("database", ["gone", "closed"])
def test_a_database_without_entry_holds_up_no_other(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    server = make_server()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in (
            "CREATE ROLE r LOGIN",
            "CREATE DATABASE closed",
            "REVOKE CONNECT ON DATABASE closed FROM public",
        ):
            connection.execute(statement)
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn("postgres", "r"))
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", server.dsn(database, "r"))
    make_slot(server.dsn(), "s")

    async def scenario() -> Any:
        # The first of a server's triggers connects for all.
        other = asyncio.create_task(outcome(expectation("healthy", conn_id="other", slot="s", timeout=4)))
        await asyncio.sleep(0.5)
        assert await asyncio.wait_for(outcome(expectation("healthy", conn_id="source", slot="s")), SECONDS) == SUCCESS
        assert "message" in await other

    asyncio.run(scenario())


def test_an_outage_of_the_server_is_no_failure(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    make_slot(server.dsn(), "s")

    async def scenario() -> Any:
        waiting = asyncio.create_task(outcome(expectation("progress", conn_id="source", slot="s")))
        await asyncio.sleep(1)
        await asyncio.to_thread(server.stop, "immediate")
        given_up = await outcome(expectation("retained", conn_id="source", slot="s", below="1B", timeout=5))
        assert not waiting.done()
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(move_slot, server.dsn(), "s")
        assert await asyncio.wait_for(waiting, SECONDS) == SUCCESS
        return given_up

    event = asyncio.run(scenario())

    assert event["timed_out"]
    assert "cannot connect to" in event["message"]


@pytest.fixture
def pipeline(databases: Databases, slot: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the path of a file whose pipeline has that slot."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", databases.target)
    replaced = {
        "tables: [": f"slot: {slot}, tables: [",
        "pipeline: shop\n": "pipeline: shop\nstream: {max_retained_wal: 1}\n",
    }
    return str(write_pipeline(tmp_path, **replaced))


def test_a_pipeline_file_has_slot_budget_and_record(pipeline: str) -> None:
    assert run(expectation("healthy", pipeline=pipeline)) == SUCCESS
    over = run(expectation("retained", pipeline=pipeline, below=None, timeout=1))
    assert "the budget is 1 B" in over["message"]
    for kind in ("lag", "finished"):
        assert "not been provisioned" in run(expectation(kind, pipeline=pipeline, timeout=1))["message"]


def test_the_sink_may_be_awaited_before_there_is_a_slot(databases: Databases, slot: str, pipeline: str) -> None:
    with psycopg.connect(databases.source, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    for kind in ("lag", "finished"):
        event = run(expectation(kind, pipeline=pipeline, timeout=1))
        assert event["timed_out"], event
        assert "not been provisioned" in event["message"]


SENSORS: list[CdcSensor] = [
    SlotProgressSensor(task_id="t", conn_id="{{ c }}", slot="s", moved_since="{{ x }}"),
    SlotRetainedWalSensor(task_id="t", pipeline="p", timeout=100),
    SlotHealthySensor(task_id="t", pipeline="p", execution_timeout=timedelta(seconds=50)),
    CdcLagSensor(task_id="t", pipeline="p", below_bytes="64MiB", below_seconds=30),
    SnapshotFinishedSensor(task_id="t", pipeline="p", consistent=True),
]


@pytest.mark.parametrize("sensor", SENSORS, ids=lambda sensor: type(sensor).__name__)
def test_sensors_start_in_the_triggerer_with_what_they_would_defer_with(sensor: CdcSensor) -> None:
    assert sensor.start_from_trigger
    args = sensor.start_trigger_args
    with pytest.raises(TaskDeferred) as deferred:
        sensor.execute({})

    trigger = deferred.value.trigger
    assert trigger.serialize() == (args.trigger_cls, args.trigger_kwargs)
    assert json.loads(json.dumps(args.trigger_kwargs)) == args.trigger_kwargs
    assert (deferred.value.timeout, deferred.value.method_name) == (args.timeout, args.next_method)
    # The triggerer renders attributes of the trigger with the names of the sensor's template fields.
    assert set(sensor.template_fields) <= set(args.trigger_kwargs)
    assert all(hasattr(trigger, name) for name in sensor.template_fields)
    assert not type(sensor).start_from_trigger
    assert not type(sensor).start_trigger_args.trigger_kwargs


def test_deadlines() -> None:
    timeouts = [sensor.start_trigger_args.timeout.total_seconds() for sensor in SENSORS[1:3]]
    assert timeouts == [110, 60]


def test_what_only_a_worker_can_do_starts_or_ends_there() -> None:
    with DAG("d"):
        above = SlotHealthySensor(task_id="above", pipeline="p")
        below = SlotHealthySensor(task_id="below", pipeline=above.output)
    assert not below.start_from_trigger
    assert below.upstream_task_ids == {"above"}
    pulling = SlotProgressSensor(task_id="t", pipeline="p", moved_since="{{ ti.xcom_pull('provision')['x'] }}")
    assert not pulling.start_from_trigger
    since = SlotProgressSensor(task_id="t", pipeline="p-{{ prev_start_date_success }}", moved_since="0/1")
    assert not since.start_from_trigger
    assert SlotProgressSensor(task_id="t", pipeline="{{ params.pipeline }}", moved_since="0/1").start_from_trigger
    assert not SlotHealthySensor(task_id="t", pipeline="p", deferrable=False).start_from_trigger
    for given in ({"outlets": [Asset("a")]}, {"on_success_callback": print}):
        sensor = SlotHealthySensor(task_id="t", pipeline="p", **given)
        assert sensor.start_trigger_args.trigger_kwargs["end_task"] is False


@pytest.mark.parametrize("kind", [SlotHealthySensor, CdcStreamOperator])
def test_only_a_value_in_the_environment_is_the_default_of_deferrable(
    kind: type[SlotHealthySensor | CdcStreamOperator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deferrable(**given: bool) -> bool:
        task = kind(task_id="t", pipeline="p", **given)
        if isinstance(task, SlotHealthySensor):
            assert task.start_from_trigger is task.deferrable
        return task.deferrable

    monkeypatch.delenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", raising=False)
    conf.set("operators", "default_deferrable", "false")  # as in the file that Airflow creates
    try:
        assert deferrable()
    finally:
        conf.remove_option("operators", "default_deferrable", remove_default=False)
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")
    assert deferrable()
    assert not deferrable(deferrable=False)
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "False")
    assert not deferrable()
    assert deferrable(deferrable=True)


@pytest.mark.parametrize("never_fail", [False, True])
@pytest.mark.parametrize("soft_fail", [False, True])
@pytest.mark.parametrize("timed_out", [False, True])
def test_only_a_timeout_is_soft(timed_out: bool, soft_fail: bool, never_fail: bool) -> None:
    if soft_fail and never_fail:
        pytest.skip("Airflow allows only one of them")
    sensor = SlotHealthySensor(task_id="t", pipeline="p", soft_fail=soft_fail, never_fail=never_fail)
    event = {"message": "it is so", "solution": "Do this.", "timed_out": timed_out}
    wanted: type[Exception] = AirflowSensorTimeout if timed_out else AirflowFailException
    if never_fail or (soft_fail and timed_out):
        wanted = AirflowSkipException

    with pytest.raises(wanted) as caught:
        sensor.resume_execution("execute_complete", {"event": event}, {})

    assert "it is so.\nDo this." in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("event", [None, {}, "success"])
def test_other_events_are_successes(event: object) -> None:
    SlotHealthySensor(task_id="t", pipeline="p").execute_complete({}, event)


class Store(dict[str, Any]):
    """A task's state store."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


def test_without_a_triggerer_a_rescheduled_sensor_remembers_its_first_poke(databases: Databases, slot: str) -> None:
    store = Store()

    def poke(attempt: int) -> bool:
        sensor = SlotProgressSensor(task_id="t", conn_id="source", slot=slot, deferrable=False)
        context: Any = {"task_state_store": store, "ti": SimpleNamespace(try_number=attempt)}
        return sensor.poke(context)

    assert not poke(1)
    assert not poke(1)
    move_slot(databases.source, slot)
    assert poke(1)
    assert not poke(2)


def test_without_a_triggerer_a_sensor_that_stays_in_its_process_remembers_too(databases: Databases, slot: str) -> None:
    sensor = SlotProgressSensor(
        task_id="t", conn_id="source", slot=slot, deferrable=False, mode="poke", poke_interval=0.2, timeout=30
    )
    mover = threading.Timer(0.5, move_slot, (databases.source, slot))
    mover.start()

    sensor.execute({})

    mover.join()


@pytest.mark.parametrize("soft_fail", [False, True])
def test_without_a_triggerer_a_missing_slot_fails_at_once_too(slot: str, soft_fail: bool) -> None:
    sensor = SlotHealthySensor(
        task_id="t", conn_id="source", slot="gone", soft_fail=soft_fail, deferrable=False, mode="poke"
    )
    with pytest.raises(AirflowFailException, match=r"'gone' does not exist\.\n.*resnapshot"):
        sensor.execute({})


@pytest.mark.parametrize("arguments", [{}, {"conn_id": "c"}, {"slot": "s"}, {"pipeline": "p", "conn_id": "c"}])
def test_a_sensor_wants_one_way_to_its_slot(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either pipeline, or conn_id and slot"):
        SlotProgressSensor(task_id="t", **arguments)


def test_a_sensor_wants_a_limit() -> None:
    with pytest.raises(ValueError, match="below_bytes, below_seconds or both"):
        CdcLagSensor(task_id="t", pipeline="p")
    with pytest.raises(ValueError, match="give below, or pipeline"):
        SlotRetainedWalSensor(task_id="t", conn_id="c", slot="s")


def test_a_trigger_carries_no_secret(slot: str, databases: Databases) -> None:
    trigger = ExpectationTrigger(kind="healthy", interval=1, timeout=1, conn_id="source", slot=slot)
    assert databases.source not in repr(trigger) + json.dumps(trigger.serialize())
