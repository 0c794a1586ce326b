"""The slot guard: its findings on real servers, its notifications, and when it drops a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from tests.support import airflow_support

# isort: split
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.slot_health import Holder, Limits, inspect
from airflow_cdc_provider.engine.postgres.slots import Slots, SlotState
from airflow_cdc_provider.operators.slot_guard import MEMORY, CdcSlotGuardOperator
from local_servers.postgres import PostgresServer
from tests.conftest import ServerMaker
from tests.support.patience import SECONDS
from tests.support.watching import LOSING, lose_slot, make_slot, move_slot

pytestmark = pytest.mark.airflow

LIMITS = Limits(budget=1000, dead_seconds=60, transaction_seconds=60)


def state(**fields: Any) -> SlotState:
    values: dict[str, Any] = {"active": False, "retained": 0, "wal_status": "reserved"} | fields
    return SlotState(plugin="pgoutput", database="d", active_pid=None, restart_lsn=1, confirmed_flush_lsn=1, **values)


@pytest.mark.parametrize(
    ("fields", "idle", "found"),
    [
        ({}, 0, []),
        ({"retained": 801}, 0, [("warning", "budget")]),
        ({"retained": 1001}, 0, [("critical", "budget")]),
        ({"retained": 1001, "temporary": True}, 100, []),
        ({"wal_status": "lost", "retained": 2000}, 100, [("critical", "lost")]),
        ({"invalidation": "idle_timeout"}, 0, [("critical", "lost")]),
        ({"wal_status": "unreserved"}, 0, [("critical", "unreserved")]),
        ({}, 61, [("critical", "dead")]),
        ({"idle_seconds": 61.0}, 0, [("critical", "dead")]),
        ({"idle_seconds": 61.0, "active": True}, 0, []),
    ],
)
def test_slots(fields: dict[str, Any], idle: float, found: list[tuple[str, str]]) -> None:
    findings = inspect(Slots(1, {"s": state(**fields)}), [], LIMITS, {"s": idle})
    assert [(finding.severity, finding.kind) for finding in findings] == found
    assert all(finding.subject == "s" and finding.solution for finding in findings)


def test_transactions_come_after_what_is_critical() -> None:
    holders = [
        Holder(7, "app", "web", 61.0, 9, 42),
        Holder(8, "app", "web", 59.0, 9, None),
        Holder(None, "gid", None, 61.0, 9, None),
    ]
    findings = inspect(Slots(1, {"s": state(retained=5000)}), holders, LIMITS)
    assert [(finding.kind, finding.subject) for finding in findings] == [
        ("budget", "s"),
        ("transaction", "7"),
        ("prepared", "gid"),
    ]
    assert "query id 42" in findings[1].message


class Stores(dict[Any, Any]):
    """The state of assets."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def look(**arguments: Any) -> tuple[dict[str, Any] | None, str]:
    """Run the operator once; return its result, or the XCom that it leaves when it fails, and the failure's text."""
    pushed: list[Any] = []
    context: Any = {"ti": SimpleNamespace(xcom_push=lambda key, value: pushed.append(value))}
    context["asset_state_store"] = arguments.pop("stores", {MEMORY: Stores()})
    try:
        return CdcSlotGuardOperator(task_id="t", conn_id="source", **arguments).execute(context), ""
    except AirflowFailException as e:
        return pushed[0] if pushed else None, str(e)


@pytest.fixture
def server(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """Run a separate server, because the guard checks all slots of a server."""
    server = make_server()
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    return server


@contextlib.contextmanager
def session(server: PostgresServer, *statements: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn(), application_name="forgetful", autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
        yield connection


def test_the_guard_on_a_server(server: PostgresServer) -> None:
    assert look() == ({"findings": [], "dropped": []}, "")

    make_slot(server.dsn(), "dead")
    temporary = "SELECT pg_create_logical_replication_slot('passing', 'pgoutput', true)"
    with (
        session(server, temporary),
        session(server, "CREATE TABLE t ()", "BEGIN", "INSERT INTO t DEFAULT VALUES", "PREPARE TRANSACTION 'old'"),
        session(server, "BEGIN", "INSERT INTO t DEFAULT VALUES") as writer,
        session(server, "BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT FROM t") as reader,
    ):
        told: list[dict[str, Any]] = []
        result, failure = look(transaction_seconds=0, on_findings=told.append)

        assert failure == ""
        assert result is not None
        found = {(finding["kind"], finding["subject"]): finding["message"] for finding in result["findings"]}
        assert set(found) == {
            ("prepared", "old"),
            ("transaction", str(writer.info.backend_pid)),
            ("transaction", str(reader.info.backend_pid)),
        }
        assert "forgetful" in found["transaction", str(writer.info.backend_pid)]
        assert "holds all slots back" in found["transaction", str(writer.info.backend_pid)]
        assert "holds all slots back" not in found["transaction", str(reader.info.backend_pid)]
        assert told[0]["findings"] == result["findings"]

    # Before Postgres 17 only the guard itself knows how long a slot has been without a reader.
    stores = {MEMORY: Stores()}
    assert look(dead_seconds=1, stores=stores)[1] == ""
    stores[MEMORY]["source"]["dead"]["since"] -= 60
    result, failure = look(dead_seconds=50, stores=stores)
    assert "slot 'dead' has had no reader for 60 seconds" in failure
    assert result is not None
    assert [finding["kind"] for finding in result["findings"]] == ["dead"]

    # A slot that has moved between two checks has a reader.
    move_slot(server.dsn(), "dead")
    assert look(dead_seconds=50, stores=stores)[1] == ""


def test_the_circuit_breaker(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    make_slot(server.dsn(), "large")
    make_slot(server.dsn(), "larger")
    with session(server, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 2000000))") as connection:
        make_slot(server.dsn(), "small")

        def slots() -> set[str]:
            return {name for (name,) in connection.execute("SELECT slot_name FROM pg_replication_slots")}

        _, failure = look(budget="1MiB")
        assert "slot 'large' retains" in failure
        assert "the budget is 1.0 MiB" in failure
        assert slots() == {"large", "larger", "small"}

        with contextlib.closing(psycopg.connect(f"{server.dsn()}?replication=database")) as reader:
            options = b"(proto_version '1', publication_names 'p')"
            reader.pgconn.send_query(b"START_REPLICATION SLOT large LOGICAL 0/0 " + options)
            active = "SELECT active FROM pg_replication_slots WHERE slot_name = 'large'"
            assert await_condition(lambda: connection.execute(active).fetchone() == (True,), SECONDS)
            # A role that may not end the superuser's session still drops the others, and reports this.
            connection.execute("CREATE ROLE guard LOGIN REPLICATION")
            told: list[dict[str, Any]] = []
            with monkeypatch.context() as patch:
                patch.setenv("AIRFLOW_CONN_SOURCE", server.dsn().replace("postgres@", "guard@"))
                result, failure = look(budget="1GiB", drop_beyond="1MiB", drop_active="True", on_findings=told.append)
            assert result is not None
            assert [(finding["kind"], finding["subject"]) for finding in result["findings"]] == [("kept", "large")]
            assert result["dropped"] == ["larger"]
            assert {name: told[0][name] for name in result} == result
            assert "slot 'large' retains 1.9 MiB of log and cannot be dropped: role 'guard' lacks" in failure
            assert "slot 'larger' was dropped" in failure

            result, failure = look(budget="1GiB", drop_beyond="1MiB", drop_active="True")
            assert result == {"findings": [], "dropped": ["large"]}
            assert "slot 'large' was dropped" in failure
        assert slots() == {"small"}

        connection.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 2000000))")
        result, failure = look(budget="1MiB", drop_beyond="1MiB")
        assert result is not None
        assert result["dropped"] == ["small"]
        assert "slot 'small' retains" in failure


def test_a_lost_slot_is_critical(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(settings=LOSING)
    monkeypatch.setenv("AIRFLOW_CONN_SOURCE", server.dsn())
    make_slot(server.dsn(), "doomed")
    lose_slot(server.dsn())

    assert "slot 'doomed' is lost" in look()[1]


def test_the_dag_every_minute() -> None:
    bag = DagBag(str(airflow_support.ROOT / "dags"))
    assert bag.import_errors == {}
    dag = bag.dags["cdc_slot_guard"]
    dag.params.validate()
    assert (dag.schedule, dag.catchup, dag.max_active_runs) == ("* * * * *", False, 1)
    for name, param in ((name, dag.params.get_param(name)) for name in dag.params):
        schema = param.schema
        assert schema["title"], name
        assert param.description or schema.get("description_md"), name
    assert dag.params["drop_beyond"] is None
    with pytest.raises(ParamValidationError):
        dag.params.get_param("budget").resolve("10GB")


@pytest.mark.parametrize("arguments", [{"budget": "10GB"}, {"dead_seconds": "soon"}, {"drop_beyond": "all"}])
def test_wrong_arguments_are_named(arguments: dict[str, str]) -> None:
    ((name, value),) = arguments.items()
    assert f"the argument {name} is {value!r}" in look(**arguments)[1]
